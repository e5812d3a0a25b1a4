"""The folders of jobs on disk: one per job, whole from its first moment, gone in one step.

<root>/<id>/job.json        the order; once the job has ended, how
<root>/<id>/recipe.json     what the child process is given
<root>/<id>/parent/         the version it starts from, if any
<root>/<id>/log.txt         what the child process said
<root>/<id>/...             what the child process writes: events.jsonl, checkpoints/, result/
<root>/{jobs.db, lock, .trash/}
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from core.train.durable import ASIDE
from server.errors import ServerError, Unavailable
from server.jobs.job import Job, from_json, is_id, to_json
from server.repository.fs import Fs, make_folders, remove_tree
from server.repository.lock import try_lock
from server.repository.store import storage_errors

log = logging.getLogger(__name__)

DATABASE, LOCK, TRASH = "jobs.db", "lock", ".trash"
JOB, RECIPE, PARENT, LOG, EVENTS, RESULT = "job.json", "recipe.json", "parent", "log.txt", "events.jsonl", "result"
CHECKPOINTS = "checkpoints"


class JobFolders:
    """All jobs' folders. Methods block; the caller sees to it that no two change the same job at once."""

    def __init__(self, root: Path, fs: Fs | None = None) -> None:
        self.root = root
        self._fs = fs or Fs()
        self._lock: int | None = None

    # life

    def open(self) -> list[Job]:
        """Take the folder for this process, finish deletions, and return the jobs whose folders are whole.

        Raises Unavailable while another server works on it, or when it cannot be written.
        """
        with storage_errors("opening the jobs folder"):
            self.root.mkdir(parents=True, exist_ok=True)
            self._take()
            make_folders(self._fs, self.root / TRASH)
            for entry in os.scandir(self.root / TRASH):
                remove_tree(self._fs, Path(entry.path))
            return [job for entry in sorted(os.listdir(self.root)) if is_id(entry) and (job := self._read(entry))]

    def close(self) -> None:
        """Let another server have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        if self._lock is not None:
            return
        fd = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if not try_lock(fd):
            os.close(fd)
            raise Unavailable("another server runs the jobs of this folder")
        self._lock = fd

    def _read(self, job_id: str) -> Job | None:
        try:
            job = from_json((self.root / job_id / JOB).read_bytes())
        except (OSError, ValueError) as error:
            log.error("job %s: its folder does not say what it is (%s)", job_id, type(error).__name__)
            return None
        return job if job.id == job_id else None

    # one job

    def path(self, job_id: str) -> Path:
        """Return where a job's files lie."""
        return self.root / job_id

    def exists(self, job_id: str) -> bool:
        """Whether the folder is there."""
        return (self.root / job_id).is_dir()

    def create(self, job: Job, fill: Callable[[Path], None] | None = None) -> None:
        """Make a job's folder, durable and whole on return; ``fill`` may add to it first. Raises StorageFull, ..."""
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
            except (OSError, ServerError):  # refused, so it must not be found by the next start either
                remove_tree(self._fs, staged)
                remove_tree(self._fs, self.root / job.id)
                raise

    def record(self, job: Job) -> None:
        """Replace what the folder says of the job; durable on return."""
        folder = self.root / job.id
        with storage_errors("storing the job's outcome"):
            self._write(folder / f"{JOB}.new", to_json(job))
            self._fs.rename(folder / f"{JOB}.new", folder / JOB)
            self._fs.sync_dir(folder)

    def remove(self, job_id: str) -> None:
        """Remove a job's folder: out of sight in one step, durable, then file by file. A missing one is fine."""
        hidden = self.root / TRASH / f"{job_id}-{secrets.token_hex(4)}"
        with storage_errors("removing the job"):
            try:
                self._fs.rename(self.root / job_id, hidden)
            except FileNotFoundError:
                return
            self._fs.sync_dir(self.root)
            remove_tree(self._fs, hidden)

    def _write(self, path: Path, data: bytes) -> None:
        fd = self._fs.replace(path)
        try:
            self._fs.write(fd, data)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    # what lies in them

    def checkpoint(self, job_id: str) -> int:
        """Return the number of updates of a job's newest checkpoint, 0 without one."""
        try:
            names = os.listdir(self.root / job_id / CHECKPOINTS)
        except OSError:
            return 0
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def remove_unfinished(self, job_id: str) -> None:
        """Remove the folders that a process which has ended was about to make: checkpoints and a result.

        It would do so itself when it goes on, but one that was ended for want of disk does not.
        """
        for folder, names, _ in os.walk(self.path(job_id)):
            for name in [name for name in names if name.endswith(ASIDE)]:
                names.remove(name)
                self._remove_aside(Path(folder, name))

    def _remove_aside(self, folder: Path) -> None:
        try:
            if not folder.is_symlink():
                remove_tree(self._fs, folder)
        except OSError as error:
            log.warning("%s could not be removed: %s", folder.name, error)

    def size(self, job_id: str | None = None) -> int:
        """Return the bytes that one job's files, or all of them, take."""
        return sum(_sizes(self.root / job_id if job_id else self.root))


def _sizes(folder: Path) -> Iterator[int]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # it went away
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _sizes(Path(entry.path))
            continue
        try:
            yield entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
