"""The records of a dataset: its content, which never changes, and its names. Immutable values without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from lathe.server.errors import BadRequest
from lathe.server.repository import names
from lathe.server.repository.aliases import DamagedDocument

SCHEMA = 1
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Content:
    """One uploaded file, with the description that its check has made."""

    digest: str  # sha256, hexadecimal; the key in the store
    size: int  # bytes
    description: Mapping[str, Any]  # output of `lathe.core.train.data`: rows, format, columns, classes

    def dump(self) -> bytes:
        """Serialize the record that is stored beside the file."""
        return _dump({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def parse(cls, raw: bytes) -> Content:
        """Parse a serialized record; raises DamagedDocument."""
        match _load(raw):
            case {"digest": str(digest), "size": int(size), "description": dict(description)}:
                return cls(digest, size, description)
        raise DamagedDocument("dataset: expected digest, size and description")


@dataclass(frozen=True, slots=True)
class NameEntry:
    """An entry of a name's history: the content, and when and by which actor the name was given to it."""

    digest: str
    time: str  # RFC 3339, UTC
    actor: str = ""


@dataclass(frozen=True, slots=True)
class DatasetName:
    """A name and the contents it has named, oldest first; the last is its present content."""

    name: str
    history: tuple[NameEntry, ...]

    @property
    def digest(self) -> str:
        """The digest of the name's present content."""
        return self.history[-1].digest

    @property
    def digests(self) -> frozenset[str]:
        """The digests of all contents in the name's history; these are not deleted while they are in it."""
        return frozenset(naming.digest for naming in self.history)

    def with_entry(self, naming: NameEntry) -> DatasetName:
        """Return the name with `naming` added to its history; unchanged if `naming` has the present content."""
        return self if naming.digest == self.digest else replace(self, history=(*self.history, naming))

    def without(self, digest: str) -> DatasetName | None:
        """Return the name without a content in its history, None if that leaves nothing."""
        remaining = tuple(naming for naming in self.history if naming.digest != digest)
        return replace(self, history=remaining) if remaining else None

    def dump(self) -> bytes:
        """Serialize the record."""
        return _dump({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def parse(cls, raw: bytes) -> DatasetName:
        """Parse a serialized record; raises DamagedDocument."""
        match _load(raw):
            case {"name": str(name), "history": [_, *_] as history}:
                return cls(name, tuple(_parse_naming(entry) for entry in history))
        raise DamagedDocument("dataset's name: expected name and history")


def check_name(text: str) -> str:
    """Return `text` if it may name a dataset; raises BadRequest."""
    if names.MODEL_PATTERN.fullmatch(text) is None:
        raise BadRequest(f"dataset name {text[:80]!r}: expected {names.MODEL_PATTERN.pattern}")
    if is_digest(text):
        raise BadRequest(f"dataset name {text!r}: expected a name, got the form of a sha256")
    return text


def is_digest(text: str) -> bool:
    """Whether a reference is a content's digest rather than a name."""
    return DIGEST.fullmatch(text) is not None


def _parse_naming(entry: object) -> NameEntry:
    match entry:
        case {"digest": str(digest), "time": str(time), "actor": str(actor)} if is_digest(digest):
            return NameEntry(digest, time, actor)
    raise DamagedDocument("dataset's name: an entry of the history needs digest, time and actor")


def _dump(document: Mapping[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _load(raw: bytes) -> object:
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DamagedDocument(f"dataset: not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DamagedDocument(f"dataset: expected schema {SCHEMA}")
    return document
