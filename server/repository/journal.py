"""The log of one model: one line per change, the commit point of each, and its audit trail.

A line is ``<crc32> <json>\n``. A change is made when its line is durable; everything else on disk follows from it and
can be done again. A torn or damaged tail is what a crash left of a change that nobody was told of: it is cut off.
Damage with whole lines after it is not that: such a log is put aside, and kept.

Each line names the sha256 of the one before it, so a line cannot be changed, taken out or put in without all later ones
being written anew; whoever has kept the newest digest notices that, too. A line that does not follow is damage.

A log is read whole at the start, so it does not grow for ever: its oldest lines move to
``<model>.log-<generation of the first>``, which nobody reads but people.
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

from server.repository.aliases import Aliases, DamagedDocument
from server.repository.fs import Fs

log = logging.getLogger(__name__)

_TAIL = 1 << 18  # bytes at the end of a log that surely hold a whole record
_TRIES = 3  # readings of a log that other processes replace meanwhile
REMEMBERED = 2_000  # changes per model that are told of; an idempotency key is known for as long


@dataclass(frozen=True, slots=True)
class Record:
    """One change of a model: publish, adopt, alias, rollback, delete, canary (a trial begins), step (of its
    schedule), promoted, rolled_back or cancelled (how it ended), or void (the undoing of a change half done)."""

    time: str  # RFC 3339, UTC
    action: str
    state: Aliases  # what holds once the change is made; its generation numbers the change
    version: int  # that came, went, or is named now
    alias: str | None = None
    digest: str | None = None  # of the model file
    staging: str | None = None  # what a publish renames: the path below the staging folder
    actor: str = ""
    reason: str = ""  # why a trial ended, or why a version took no alias
    key: str | None = None  # idempotency key, after whose it is and a space; older releases wrote it alone
    fingerprint: str | None = None  # of the request that carried the key
    previous: str | None = None  # digest of the line before; none in the first one, and in those of old releases
    _digest: str | None = field(default=None, init=False, repr=False, compare=False)  # of the JSON it was read from

    @property
    def generation(self) -> int:
        """The change's number."""
        return self.state.generation

    @property
    def chain_digest(self) -> str:
        """What the next line calls this one: the sha256 of its JSON as it is stored, hexadecimal."""
        return self._digest or _digest_of(self._body())

    def dump(self) -> bytes:
        """Return the line."""
        body = self._body()
        return b"%08x %s\n" % (zlib.crc32(body), body)

    def _body(self) -> bytes:
        given = {name: value for name, value in _fields(self) if value not in (None, "")}
        return orjson.dumps({**given, "state": self.state.to_json()})

    @classmethod
    def parse(cls, line: bytes) -> Record:
        """Read a line without its end; raises DamagedDocument."""
        head, _, body = line.partition(b" ")
        if head != b"%08x" % zlib.crc32(body):
            raise DamagedDocument("journal: checksum does not match")
        try:
            document = orjson.loads(body)
            record = cls(**{**document, "state": Aliases.from_json(document["state"])})
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise DamagedDocument("journal: not a record") from error
        object.__setattr__(record, "_digest", _digest_of(body))  # another release may write the same otherwise
        return record


def last_record(path: Path) -> Record | None:
    """Return the newest whole record of a log that is only looked at."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
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
    """The log of one model. Changes come under the repository's lock; reading needs none.

    In memory are the newest change and the places of the others' lines, which are read again when somebody asks.
    """

    def __init__(self, fs: Fs, path: Path) -> None:
        self._fs = fs
        self._path = path
        self._lock = threading.Lock()
        self.last: Record | None = None  # the newest change
        self._places = array("Q")  # where the lines of the remembered changes begin
        self._keys: dict[str, int] = {}  # idempotency key -> where its line begins, oldest first
        self._inode = (0, 0)
        self._end = self._lines = 0  # bytes read that hold whole records, and how many
        self._newest: str | None = None  # digest of the last of them
        self._named = False  # whether the log's name is known to be durable

    def snapshot(self) -> list[Record]:
        """Return the remembered changes, oldest first."""
        with self._lock:
            return self._read_back()

    def find_key(self, key: str) -> Record | None:
        """Return the change that carried an idempotency key."""
        with self._lock:
            self._refresh()
            if key not in self._keys:
                return None
            return next((record for record in reversed(self._read_back()) if record.key == key), None)

    def refresh(self) -> None:
        """Read what was added since the last look."""
        with self._lock:
            self._refresh()

    def append(self, record: Record) -> Record:
        """Make ``record`` durable, or leave the log as it was and raise OSError. Returns it as part of the chain."""
        with self._lock:
            self._refresh()
            self._cut_tail()
            if self._lines >= 2 * REMEMBERED:
                self._shorten()
            record = replace(record, previous=self._newest)
            self._append(record)
            return record

    def settle(self) -> None:
        """Make durable what is in the log: a record found by recovery may have been written, but never synced."""
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
            self._read_on()

    def _append(self, record: Record) -> None:
        line = record.dump()
        try:
            self._write(self._fs.append(self._path), line)
        except OSError:
            self._cut_back()
            raise
        self._inode = _inode(self._path.stat())
        self._remember(record, line)

    def _cut_tail(self) -> None:
        """Remove what a crash left after the last whole line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._end)
                tail = file.read()
        except FileNotFoundError:
            return
        lines = tail.split(b"\n")
        if any(map(_is_record, (*lines[:-1], *lines[1:]))):  # all but a line that was all but written
            aside = self._path.with_suffix(f".damaged-{time.time_ns()}")
            log.error("the log %s is damaged or was changed: it is kept as %s", self._path.name, aside.name)
            self._fs.rename(self._path, aside)
            self._forget()
        elif tail:
            self._fs.truncate(self._path, self._end)

    def _shorten(self) -> None:
        """Move the lines that are not remembered to an archive. The append that follows makes the new name durable."""
        *lines, _ = self._path.read_bytes()[: self._end].split(b"\n")
        old, kept = lines[:-REMEMBERED], lines[-REMEMBERED:]
        archive = self._path.with_suffix(f".log-{Record.parse(old[0]).generation:09d}")
        draft = self._path.with_suffix(".log-new")
        self._named = False  # so the archive's name is made durable, before its lines go from the log
        try:
            self._write(self._fs.replace(archive), b"\n".join([*old, b""]))
            self._write(self._fs.replace(draft), b"\n".join([*kept, b""]))
        except OSError:
            return  # the log is as it was, and the next change tries again
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
        if not self._named:
            self._fs.sync_dir(self._path.parent)
            self._named = True

    def _cut_back(self) -> None:
        try:
            self._fs.truncate(self._path, self._end)
        except OSError:
            self._forget()  # the next look reads what the disk really holds

    def _read_back(self) -> list[Record]:
        """The remembered changes. Another process may replace the log at any moment: then it is read anew."""
        for _ in range(_TRIES):
            self._refresh()
            if not self._places:
                return []
            with suppress(DamagedDocument, FileNotFoundError), self._path.open("rb") as file:
                if _inode(os.fstat(file.fileno())) == self._inode:
                    file.seek(self._places[0])
                    *lines, _ = file.read(self._end - self._places[0]).split(b"\n")
                    return [Record.parse(line) for line in lines]
            self._forget()
        raise DamagedDocument(f"journal: {self._path.name} changed while it was read")

    def _read_on(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    record = Record.parse(line[:-1])
                except DamagedDocument:
                    return
                if not self._follows(record):
                    return
                self._remember(record, line)

    def _follows(self, record: Record) -> bool:
        """Whether the chain goes on. It begins anywhere: earlier lines may be in an archive, or an old release's."""
        before = self.last
        if before is None or (before.previous is None and record.previous is None):
            return True
        return record.previous == self._newest

    def _remember(self, record: Record, line: bytes) -> None:
        if record.action == "void" and self._places:
            self._keys = {key: place for key, place in self._keys.items() if place != self._places[-1]}
        self._places.append(self._end)
        if record.key:
            self._keys.pop(record.key, None)
            self._keys[record.key] = self._end
        self.last = record
        self._newest = record.chain_digest
        self._end += len(line)
        self._lines += 1
        if len(self._places) > REMEMBERED:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        gone = self._places.pop(0)
        oldest = next(iter(self._keys), None)
        if oldest is not None and self._keys[oldest] == gone:
            del self._keys[oldest]

    def _forget(self) -> None:
        self.last = None
        self._places = array("Q")
        self._keys.clear()
        self._inode = (0, 0)
        self._end = self._lines = 0
        self._newest = None
        self._named = False
