"""What is kept of a dataset: its content, which never changes, and the names it goes by. Frozen; no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from server.errors import BadRequest
from server.repository import names
from server.repository.aliases import DamagedDocument

SCHEMA = 1
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Content:
    """One uploaded file, and what its check found in it."""

    digest: str  # sha256, hexadecimal; what it is kept under
    size: int  # bytes
    description: Mapping[str, Any]  # rows, format, columns, classes: what `core.train.data` says of a file

    def dump(self) -> bytes:
        """Return the document that lies beside the file."""
        return _dump({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def parse(cls, raw: bytes) -> Content:
        """Read the document; raises DamagedDocument."""
        match _load(raw):
            case {"digest": str(digest), "size": int(size), "description": dict(description)}:
                return cls(digest, size, description)
        raise DamagedDocument("dataset: expected digest, size and description")


@dataclass(frozen=True, slots=True)
class Naming:
    """When a name was given to a content, and by whom."""

    digest: str
    time: str  # RFC 3339, UTC
    actor: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """A name and what it has stood for, oldest first; the last is what it stands for now."""

    name: str
    history: tuple[Naming, ...]

    @property
    def digest(self) -> str:
        """What it stands for now."""
        return self.history[-1].digest

    @property
    def digests(self) -> frozenset[str]:
        """All it has stood for, which is kept for as long."""
        return frozenset(naming.digest for naming in self.history)

    def given(self, naming: Naming) -> Named:
        """Return it standing for something else; itself where that is what it stands for."""
        return self if naming.digest == self.digest else replace(self, history=(*self.history, naming))

    def without(self, digest: str) -> Named | None:
        """Return it with a content forgotten, None when nothing is left."""
        left = tuple(naming for naming in self.history if naming.digest != digest)
        return replace(self, history=left) if left else None

    def dump(self) -> bytes:
        """Return the document."""
        return _dump({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def parse(cls, raw: bytes) -> Named:
        """Read the document; raises DamagedDocument."""
        match _load(raw):
            case {"name": str(name), "history": [_, *_] as history}:
                return cls(name, tuple(_naming(entry) for entry in history))
        raise DamagedDocument("dataset's name: expected name and history")


def check_name(text: str) -> str:
    """Return ``text`` if it may name a dataset; raises BadRequest."""
    if names.MODEL.fullmatch(text) is None:
        raise BadRequest(f"dataset name {text[:80]!r}: expected {names.MODEL.pattern}")
    if is_digest(text):
        raise BadRequest(f"dataset name {text!r}: expected a name, this reads as the sha256 of a content")
    return text


def is_digest(text: str) -> bool:
    """Whether a reference means a content itself, and not a name."""
    return DIGEST.fullmatch(text) is not None


def _naming(entry: object) -> Naming:
    match entry:
        case {"digest": str(digest), "time": str(time), "actor": str(actor)} if is_digest(digest):
            return Naming(digest, time, actor)
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
