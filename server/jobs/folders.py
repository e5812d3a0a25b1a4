"""The folders of jobs on disk: one per job, created and removed atomically.

<root>/<id>/job.json        the order; after the job's end also its outcome
<root>/<id>/recipe.json     the input of the child process
<root>/<id>/parent/         the model version that it starts from, if any
<root>/<id>/log.txt         stderr of the child process
<root>/<id>/...             output of the child process: events.jsonl, checkpoints/, result/, in a sweep trials/ and
                            finals/
<root>/{jobs.db, lock, .trash/}
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from lathe.core.train.run.durable_files import TEMPORARY_SUFFIX
from lathe.server.errors import ServerError, Unavailable
from lathe.server.jobs.job import Job, from_json, is_id, to_json
from lathe.server.repository.file_lock import try_lock
from lathe.server.repository.fs import Fs, make_folders, remove_tree
from lathe.server.repository.store import storage_errors

log = logging.getLogger(__name__)

DATABASE, LOCK, TRASH = "jobs.db", "lock", ".trash"
JOB, RECIPE, PARENT, LOG, EVENTS, RESULT = "job.json", "recipe.json", "parent", "log.txt", "events.jsonl", "result"
CHECKPOINTS, TRIALS, FINALS, TRIAL = "checkpoints", "trials", "finals", "trial.json"
_ENDED_TRIAL = 1 << 40  # more than the steps of a training


class JobFolders:
    """The folders of all jobs. Methods block; the caller must not change one job from two threads at once."""

    def __init__(self, root: Path, fs: Fs | None = None) -> None:
        self.root = root
        self._fs = fs or Fs()
        self._lock_fd: int | None = None

    # open and close

    def open(self) -> list[Job]:
        """Lock the folder for this process, finish deletions, and return the jobs whose folders are valid.

        Raises Unavailable if another server has locked it or it cannot be written, StorageFull.
        """
        with storage_errors("opening the jobs folder"):
            self.root.mkdir(parents=True, exist_ok=True)
            self._acquire_lock()
            make_folders(self._fs, self.root / TRASH)
            for entry in os.scandir(self.root / TRASH):
                remove_tree(self._fs, Path(entry.path))
            return [job for entry in sorted(os.listdir(self.root)) if is_id(entry) and (job := self._read(entry))]

    def close(self) -> None:
        """Release the lock on the folder."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _acquire_lock(self) -> None:
        if self._lock_fd is not None:
            return
        fd = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if not try_lock(fd):
            os.close(fd)
            raise Unavailable("another server runs the jobs of this folder")
        self._lock_fd = fd

    def _read(self, job_id: str) -> Job | None:
        try:
            job = from_json((self.root / job_id / JOB).read_bytes())
        except (OSError, ValueError) as error:
            log.error("job %s: its job.json cannot be read (%s)", job_id, type(error).__name__)
            return None
        return job if job.id == job_id else None

    # one job

    def path(self, job_id: str) -> Path:
        """Return the folder of a job."""
        return self.root / job_id

    def exists(self, job_id: str) -> bool:
        """Whether a job's folder exists."""
        return (self.root / job_id).is_dir()

    def create(self, job: Job, fill: Callable[[Path], None] | None = None) -> None:
        """Create a job's folder, durable on return; `fill` adds files to it before it appears.

        Raises StorageFull, Unavailable, and the ServerErrors of `fill`; then there is no folder.
        """
        staged = self.root / TRASH / f"new-{job.id}"
        with storage_errors("storing the job"):
            try:
                self._fs.mkdir(staged)
                self._write(staged / RECIPE, orjson.dumps(dict(job.order.recipe)))
                self._write(staged / JOB, to_json(job))
                if fill is not None:
                    fill(staged)
                self._fs.sync_dir(staged)
                self._fs.rename(staged, self.root / job.id)
                self._fs.sync_dir(self.root)
            except (OSError, ServerError):  # the job is refused, so the next start must not find it
                remove_tree(self._fs, staged)
                remove_tree(self._fs, self.root / job.id)
                raise

    def make_scratch(self) -> Path:
        """Make an empty folder, which the caller removes by `remove_scratch`; the next start removes one that is left.

        Raises StorageFull, Unavailable.
        """
        folder = self.root / TRASH / f"check-{secrets.token_hex(8)}"
        with storage_errors("checking the job"):
            self._fs.mkdir(folder)
        return folder

    def remove_scratch(self, folder: Path) -> None:
        """Remove a folder of `make_scratch`; an error is logged, and the next start removes the folder."""
        self._remove_aside(folder)

    def record(self, job: Job) -> None:
        """Replace a job's job.json; durable on return. Raises StorageFull, Unavailable."""
        folder = self.root / job.id
        with storage_errors("storing the job's outcome"):
            self._write(folder / f"{JOB}.new", to_json(job))
            self._fs.rename(folder / f"{JOB}.new", folder / JOB)
            self._fs.sync_dir(folder)

    def remove(self, job_id: str) -> None:
        """Remove a job's folder, if it exists: durably renamed into the trash, then deleted file by file.

        Raises StorageFull, Unavailable.
        """
        trashed = self.root / TRASH / f"{job_id}-{secrets.token_hex(4)}"
        with storage_errors("removing the job"):
            try:
                self._fs.rename(self.root / job_id, trashed)
            except FileNotFoundError:
                return
            self._fs.sync_dir(self.root)
            remove_tree(self._fs, trashed)

    def _write(self, path: Path, data: bytes) -> None:
        fd = self._fs.replace(path)
        try:
            self._fs.write(fd, data)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    # content

    def saved_progress(self, job_id: str) -> int:
        """Return a number that grows with each checkpoint of a job and with each trial of a sweep that ends; else 0.

        Of a training it is the number of steps (batches) before the newest checkpoint. Of a sweep it is the sum of
        these of the trials and of the finals, where a training that has ended counts more than any checkpoint.
        """
        folder = self.root / job_id
        trainings = [path for kind in (TRIALS, FINALS) for path in _entries(folder / kind)]
        return _checkpointed_steps(folder) + sum(
            _ENDED_TRIAL if _has_ended(training) else _checkpointed_steps(training) for training in trainings
        )

    def remove_unfinished(self, job_id: str) -> None:
        """Remove the incomplete checkpoints and result that an ended process left.

        A next attempt would remove them itself, but a job that failed because of a full disk has no next attempt.
        """
        for folder, names, _ in os.walk(self.path(job_id)):
            for name in [name for name in names if name.endswith(TEMPORARY_SUFFIX)]:
                names.remove(name)
                self._remove_aside(Path(folder, name))

    def _remove_aside(self, folder: Path) -> None:
        try:
            if not folder.is_symlink():
                remove_tree(self._fs, folder)
        except OSError as error:
            log.warning("%s could not be removed: %s", folder.name, error)

    def size(self, job_id: str | None = None) -> int:
        """Return the size in bytes of one job's files, or of all files."""
        return sum(_sizes(self.root / job_id if job_id else self.root))


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _checkpointed_steps(folder: Path) -> int:
    return max((int(path.name) for path in _entries(folder / CHECKPOINTS) if path.name.isdecimal()), default=0)


def _has_ended(trial: Path) -> bool:
    """Whether the record of a trial says that it has ended, as `lathe.core.train.run.trials` writes it."""
    try:
        return bool(orjson.loads((trial / TRIAL).read_bytes())["state"] != "running")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sizes(folder: Path) -> Iterator[int]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # removed meanwhile
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _sizes(Path(entry.path))
            continue
        try:
            yield entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
