"""The log of one model: a write-ahead log with one line per change, and its audit trail.

A line is `<crc32> <json>\n`. A change is committed when its line is durable; all else on disk is derived from it and
can be repeated. A torn tail is the rest of a change that a crash interrupted before it was reported: it is cut off. A
damaged line with valid lines after it is not a torn tail: such a log is renamed and kept.

The lines are a hash chain: each holds the sha256 of the line before it, so that a line can only be changed, removed or
inserted by rewriting all later ones; a copy of the newest digest reveals even that. A line that does not continue the
chain counts as damaged.

A log is read whole at the start, so its length is bounded: the oldest lines move to an archive,
`<model>.log-<generation of the first>`, which no program reads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson

from lathe.server.repository.aliases import Aliases, DamagedDocument
from lathe.server.repository.fs import Fs

log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 18  # bytes at the end of a log that surely hold a whole record
_READ_ATTEMPTS = 3  # attempts to read a log that other processes replace meanwhile
MAX_REMEMBERED = 2_000  # changes per model in the audit trail; also how long an idempotency key is recognised


@dataclass(frozen=True, slots=True)
class Record:
    """One change of a model.

    `action`: publish, adopt, alias, rollback, delete, canary (a trial begins), step (its next step begins), promoted,
    rolled_back or cancelled (it ends), or void (an interrupted change was undone).
    """

    time: str  # RFC 3339, UTC
    action: str
    state: Aliases  # the aliases after the change; their generation numbers the change
    version: int  # the version published, adopted, deleted, on trial, or that the alias names now
    alias: str | None = None
    digest: str | None = None  # of the model file
    staging: str | None = None  # the folder that a publish renames, relative to the staging folder
    actor: str = ""
    reason: str = ""  # why a trial ended, or why a version took no alias
    key: str | None = None  # idempotency key after its namespace and a blank; older releases wrote no namespace
    fingerprint: str | None = None  # of the request that carried the key
    previous: str | None = None  # digest of the line before; None in the first line, and in those of old releases
    _digest: str | None = field(default=None, init=False, repr=False, compare=False)  # of the parsed JSON

    @property
    def generation(self) -> int:
        """The change's number."""
        return self.state.generation

    @property
    def chain_digest(self) -> str:
        """The `previous` of the next line: the sha256, in hexadecimal, of this record's JSON as stored."""
        return self._digest or _digest_of(self._body())

    def dump(self) -> bytes:
        """Return the line, with its newline."""
        body = self._body()
        return b"%08x %s\n" % (zlib.crc32(body), body)

    def _body(self) -> bytes:
        given = {name: value for name, value in _fields(self) if value not in (None, "")}
        return orjson.dumps({**given, "state": self.state.to_json()})

    @classmethod
    def parse(cls, line: bytes) -> Record:
        """Parse a line without its newline; raises DamagedDocument."""
        head, _, body = line.partition(b" ")
        if head != b"%08x" % zlib.crc32(body):
            raise DamagedDocument("journal: checksum does not match")
        try:
            document = orjson.loads(body)
            record = cls(**{**document, "state": Aliases.from_json(document["state"])})
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise DamagedDocument("journal: not a record") from error
        object.__setattr__(record, "_digest", _digest_of(body))  # a release may serialize it differently
        return record


def last_record(path: Path) -> Record | None:
    """Return the newest valid record of a log, without changing or locking it; None if there is none.

    Reads the last 256 KiB. The hash chain is not checked.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    whole = (line for line in reversed(lines[:-1]) if _is_record(line))
    newest = next(whole, None)
    return Record.parse(newest) if newest else None


def _is_record(line: bytes) -> bool:
    try:
        Record.parse(line)
    except DamagedDocument:
        return False
    return True


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _fields(record: Record) -> Iterator[tuple[str, Any]]:
    return ((own.name, getattr(record, own.name)) for own in fields(record) if own.init and own.name != "state")


def _digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Journal:
    """The log of one model. Callers hold the repository's lock for changes; reading needs none.

    Memory holds the newest record and the file offsets of the others, which are read again on demand.
    """

    def __init__(self, fs: Fs, path: Path) -> None:
        self._fs = fs
        self._path = path
        self._lock = threading.Lock()
        self.last: Record | None = None  # the newest change
        self._offsets = array("Q")  # file offsets of the remembered lines
        self._keys: dict[str, int] = {}  # idempotency key -> file offset of its line, oldest first
        self._inode = (0, 0)
        self._end = self._lines = 0  # bytes of the valid records that were read, and their number
        self._newest: str | None = None  # digest of the last valid record
        self._is_entry_durable = False  # whether the log's entry in its folder is known to be durable

    def snapshot(self) -> list[Record]:
        """Return the newest changes in the log, at most `MAX_REMEMBERED`, oldest first.

        Raises OSError, or DamagedDocument if the file changes at each of 3 attempts to read it.
        """
        with self._lock:
            return self._read_back()

    def find_key(self, key: str) -> Record | None:
        """Return the newest change made under an idempotency key, among the newest `MAX_REMEMBERED`; otherwise None.

        A change that was undone (void) does not count. Raises as `snapshot`.
        """
        with self._lock:
            self._refresh()
            if key not in self._keys:
                return None
            return next((record for record in reversed(self._read_back()) if record.key == key), None)

    def refresh(self) -> None:
        """Read the lines that other processes have added; all lines of a log that was replaced. Raises OSError."""
        with self._lock:
            self._refresh()

    def append(self, record: Record) -> Record:
        """Write `record` durably and return it with its `previous`.

        A torn tail is cut off first, and the oldest lines may move to an archive. Raises OSError; then the written part
        of the record is cut off again or, if that fails, too, the next `refresh` reads what the file holds.
        """
        with self._lock:
            self._refresh()
            self._cut_tail()
            if self._lines >= 2 * MAX_REMEMBERED:
                self._archive_oldest()
            record = replace(record, previous=self._newest)
            self._append(record)
            return record

    def settle(self) -> None:
        """Sync the log: a record that recovery found may have been written but not synced. Raises OSError."""
        with self._lock:
            self._sync(self._fs.append(self._path))

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._forget()
            return
        if _inode(status) != self._inode or status.st_size < self._end:
            self._forget()
            self._inode = _inode(status)
        if status.st_size > self._end:
            self._read_new_lines()

    def _append(self, record: Record) -> None:
        line = record.dump()
        try:
            self._write(self._fs.append(self._path), line)
        except OSError:
            self._undo_append()
            raise
        self._inode = _inode(self._path.stat())
        self._remember(record, line)

    def _cut_tail(self) -> None:
        """Cut off a torn tail. If valid lines follow the damage, rename the log instead; a new one begins."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._end)
                tail = file.read()
        except FileNotFoundError:
            return
        lines = tail.split(b"\n")
        if any(map(_is_record, (*lines[:-1], *lines[1:]))):  # a sole line without its newline does not count
            aside = self._path.with_suffix(f".damaged-{time.time_ns()}")
            log.error("the log %s is damaged or was modified: it is kept as %s", self._path.name, aside.name)
            self._fs.rename(self._path, aside)
            self._forget()
        elif tail:
            self._fs.truncate(self._path, self._end)

    def _archive_oldest(self) -> None:
        """Move all but the newest `MAX_REMEMBERED` lines to an archive. The next append makes the rename durable.

        If the archive or the new log cannot be written, the log stays as it is, without an error.
        """
        *lines, _ = self._path.read_bytes()[: self._end].split(b"\n")
        old, recent = lines[:-MAX_REMEMBERED], lines[-MAX_REMEMBERED:]
        archive = self._path.with_suffix(f".log-{Record.parse(old[0]).generation:09d}")
        draft = self._path.with_suffix(".log-new")
        self._is_entry_durable = False  # so that the folder is synced with the archive before its lines leave the log
        try:
            self._write(self._fs.replace(archive), b"\n".join([*old, b""]))
            self._write(self._fs.replace(draft), b"\n".join([*recent, b""]))
        except OSError:
            return  # the log is unchanged, and the next change tries again
        self._fs.rename(draft, self._path)
        self._forget()
        self._refresh()

    def _write(self, fd: int, content: bytes) -> None:
        try:
            self._fs.write(fd, content)
        except OSError:
            self._fs.close(fd)
            raise
        self._sync(fd)

    def _sync(self, fd: int) -> None:
        try:
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)
        if not self._is_entry_durable:
            self._fs.sync_dir(self._path.parent)
            self._is_entry_durable = True

    def _undo_append(self) -> None:
        try:
            self._fs.truncate(self._path, self._end)
        except OSError:
            self._forget()  # the next refresh reads what the disk really holds

    def _read_back(self) -> list[Record]:
        """Return the newest changes in the log, at most `MAX_REMEMBERED`, oldest first, read from the file.

        Another process may replace the log at any time: then the file is read again, in all at most 3 times. OSError,
        or DamagedDocument if it changes at each attempt. The caller holds `_lock`.
        """
        for _ in range(_READ_ATTEMPTS):
            self._refresh()
            if not self._offsets:
                return []
            with suppress(DamagedDocument, FileNotFoundError), self._path.open("rb") as file:
                if _inode(os.fstat(file.fileno())) == self._inode:
                    file.seek(self._offsets[0])
                    *lines, _ = file.read(self._end - self._offsets[0]).split(b"\n")
                    return [Record.parse(line) for line in lines]
            self._forget()
        raise DamagedDocument(f"journal: {self._path.name} changed while it was read")

    def _read_new_lines(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    record = Record.parse(line[:-1])
                except DamagedDocument:
                    return
                if not self._continues_chain(record):
                    return
                self._remember(record, line)

    def _continues_chain(self, record: Record) -> bool:
        """Whether a record continues the hash chain: its `previous` is the digest of the last record read.

        The first line does in any case, since those before it may be archived; so does a record without `previous`
        after another one without, as old releases wrote them.
        """
        before = self.last
        if before is None or (before.previous is None and record.previous is None):
            return True
        return record.previous == self._newest

    def _remember(self, record: Record, line: bytes) -> None:
        if record.action == "void" and self._offsets:
            self._keys = {key: offset for key, offset in self._keys.items() if offset != self._offsets[-1]}
        self._offsets.append(self._end)
        if record.key:
            self._keys.pop(record.key, None)
            self._keys[record.key] = self._end
        self.last = record
        self._newest = record.chain_digest
        self._end += len(line)
        self._lines += 1
        if len(self._offsets) > MAX_REMEMBERED:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        gone = self._offsets.pop(0)
        oldest = next(iter(self._keys), None)
        if oldest is not None and self._keys[oldest] == gone:
            del self._keys[oldest]

    def _forget(self) -> None:
        self.last = None
        self._offsets = array("Q")
        self._keys.clear()
        self._inode = (0, 0)
        self._end = self._lines = 0
        self._newest = None
        self._is_entry_durable = False
