"""Datasets of documents: text files, and JSON Lines (https://jsonlines.org) of texts or conversations.

Only the places of the documents stay in memory: 24 bytes for each. `take` reads their texts from the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import Column, Dataset, Rows, Values
from lathe.core.train.data.location import Location
from lathe.core.train.data.members import Members, members_of

TEXT, MESSAGES = "text", "messages"
TEXT_SUFFIXES = (".txt", ".md")
LINES_SUFFIXES = (".jsonl", ".ndjson")
_LONGEST = 1 << 26  # bytes of a document or line: a file without line breaks must not fill the memory
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class _SingleFile:
    """A file on its own, as `Members` has the files of a folder."""

    location: Location

    @property
    def names(self) -> list[str]:
        return [""]

    def open(self, name: str) -> IO[bytes]:
        return self.location.path.open("rb")


@dataclass(frozen=True)
class _Places:
    """Where documents are: the number of the file, the first byte, the number of bytes and the line (from 1) of each.

    All are int64 [documents].
    """

    file: Rows
    start: Rows
    size: Rows
    line: Rows


@dataclass(frozen=True)
class DocumentSource:
    """A column of texts that are read from their files. `field` is the field of each line that holds the text.

    Conversations are JSON texts of their list of messages. Without `field`, a document is the text itself.
    """

    column: Column
    location: Location
    members: Members | _SingleFile
    places: _Places
    field: str | None

    def __len__(self) -> int:
        return len(self.places.file)

    def take(self, rows: Rows) -> Values:
        """The texts of these rows: an object array of `str`."""
        found = np.empty(len(rows), object)
        order = np.lexsort((self.places.start[rows], self.places.file[rows]))  # a member of a zip is read forwards
        for number in np.unique(self.places.file[rows]).tolist():
            with self.members.open(self.members.names[number]) as file:
                for index in order[self.places.file[rows][order] == number].tolist():
                    file.seek(int(self.places.start[rows[index]]))
                    found[index] = self._text(file.read(int(self.places.size[rows[index]])))
        return found

    def _text(self, content: bytes) -> str:
        if self.field is None:
            return content.decode()
        value = json.loads(content)[self.field]
        return value if self.field == TEXT else json.dumps(value)


def is_documents(members: Members) -> str | None:
    """The format of a folder whose files are all documents: `text` or `jsonl`; None for other files."""
    for format, suffixes in (("text", TEXT_SUFFIXES), ("jsonl", LINES_SUFFIXES)):
        if members.names and all(name.lower().endswith(suffixes) for name in members.names):
            return format
    return None


def is_json_lines(head: bytes) -> bool:
    """Whether a file with these first bytes is JSON Lines: its first line is an object."""
    try:
        return head.startswith(b"{") and isinstance(json.loads(head.split(b"\n", 1)[0]), dict)
    except (ValueError, RecursionError):
        return False


def open_text(location: Location) -> Dataset:
    """Documents of text, UTF-8: each file of a folder or zip, or the paragraphs of a single file (between blank lines).

    DataError for a document that is no UTF-8 or has more than 64 MiB; it names the file or, in a single file, the line.
    """
    members = _members(location)
    documents = []
    for number, name in enumerate(members.names):
        with members.open(name) as file:
            spans = _paragraphs(location, file) if isinstance(members, _SingleFile) else _whole(location, name, file)
            documents += [(number, *span) for span in spans]
    return _dataset(location, members, documents, TEXT, None, "text")


def open_json_lines(location: Location) -> Dataset:
    """JSON Lines: objects with a field `text`, or with `messages`, a list of {"role", "content"}.

    Roles are system, user and assistant. All lines have the same of both fields; other fields and blank lines are
    ignored. DataError, which names the line, for a line that is nothing of this.
    """
    members = _members(location)
    documents, field = [], None
    for number, name in enumerate(members.names):
        with members.open(name) as file:
            for start, line, content in _lines(location, file):
                if content.strip():
                    field = _field(location, content, line, field)
                    documents.append((number, start, len(content), line))
    return _dataset(location, members, documents, field or TEXT, field or TEXT, "jsonl")


def _members(location: Location) -> Members | _SingleFile:
    import zipfile

    is_file = location.path.is_file() and not zipfile.is_zipfile(location.path)
    return _SingleFile(location) if is_file else members_of(location.path)


def _dataset(
    location: Location,
    members: Members | _SingleFile,
    documents: list[tuple[int, int, int, int]],
    column: str,
    field: str | None,
    format: str,
) -> Dataset:
    table = np.array(documents, np.int64).reshape(-1, 4)
    places = _Places(*(np.ascontiguousarray(values) for values in table.T))
    source = DocumentSource(Column(column, DType.STRING), location, members, places, field)
    is_single = len(members.names) == 1
    line_of = (lambda row: int(places.line[row])) if is_single else None
    return Dataset(location.name, {column: source}, location.digest, format, line_of=line_of)


def _whole(location: Location, name: str, file: IO[bytes]) -> Iterator[tuple[int, int, int]]:
    """The place of a document that is a whole file; nothing for an empty one."""
    content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise location.error(f"'{name}': expected a document of at most {_LONGEST} bytes")
    _check_text(location, content, f"'{name}': ", None)
    if content.strip():
        yield 0, len(content), 1


def _paragraphs(location: Location, file: IO[bytes]) -> Iterator[tuple[int, int, int]]:
    """The places of the paragraphs of a file: start, size, first line. Blank lines belong to none."""
    begin, end, first = 0, 0, 0
    for start, line, content in _lines(location, file):
        _check_text(location, content, "", line)
        if content.strip():
            begin, first = (begin, first) if end else (start, line)
            end = start + len(content)
        elif end:
            yield begin, end - begin, first
            end = 0
        if end and end - begin > _LONGEST:
            raise location.error(f"expected a paragraph of at most {_LONGEST} bytes", line=first)
    if end:
        yield begin, end - begin, first


def _lines(location: Location, file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """The lines of a file: start, number from 1, content with its line break. DataError for one above 64 MiB."""
    start, number = 0, 1
    while content := file.readline(_LONGEST + 1):
        if len(content) > _LONGEST:
            raise location.error(f"expected a line of at most {_LONGEST} bytes", line=number)
        yield start, number, content
        start, number = start + len(content), number + 1


def _check_text(location: Location, content: bytes, where: str, line: int | None) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise location.error(f"{where}expected UTF-8 text, got {error.reason}", line=line) from None


def _field(location: Location, content: bytes, line: int, expected: str | None) -> str:
    """The field of a line that holds its document: `expected`, if another line had one before."""
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise location.error(f"expected a line of JSON: {str(error)[:200]}", line=line) from None
    fields = value if isinstance(value, dict) else {}
    found = next((name for name in (TEXT, MESSAGES) if name in fields), None)
    if found is None or (expected is not None and found != expected):
        wanted = f"`{expected}`" if expected else "`text` or `messages`"
        raise location.error(f"expected an object with the field {wanted}, got {content[:60]!r}", line=line)
    if found == TEXT and not isinstance(fields[TEXT], str):
        raise location.error(f"expected a text, got {json.dumps(fields[TEXT])[:60]}", TEXT, line=line)
    if found == MESSAGES and not _are_messages(fields[MESSAGES]):
        wanted = f'a list of {{"role", "content"}} with the roles {", ".join(_ROLES)}'
        raise location.error(f"expected {wanted}, got {json.dumps(fields[MESSAGES])[:100]}", MESSAGES, line=line)
    return found


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(each, dict) and each.get("role") in _ROLES and isinstance(each.get("content"), str)
            for each in value
        )
    )
