"""`manifest.json` of a version: the digests of its files, its time of creation, metadata, inputs and outputs."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from lathe.core.files import open_plain
from lathe.server.pipelines.definition import PIPELINE_FILE
from lathe.server.repository import names
from lathe.server.repository.aliases import DamagedDocument
from lathe.server.types import TensorSpec

SCHEMA = 1
MANIFEST = "manifest.json"
MODEL_FILE = "model.onnx"
GGUF_FILE = "model.gguf"
CONFIG_FILE = "config.json"  # of a Hugging Face folder
GENAI_FILE = "genai_config.json"  # of a folder of ONNX Runtime GenAI
# A version holds exactly one file of the first group that it has any of: other kinds may have a file `config.json`.
_KINDS = ((MODEL_FILE, PIPELINE_FILE), (GGUF_FILE, CONFIG_FILE, GENAI_FILE))
DEFINING = tuple(name for kind in _KINDS for name in kind)
METADATA_LIMIT = 16 << 10  # bytes of JSON
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


class CorruptVersion(Exception):
    """Files do not match the manifest, or cannot be a version; the message names the file, never a path."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a version."""

    sha256: str  # hexadecimal
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a version; versions with equal signatures are interchangeable for callers."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Signature:
        """Build a signature; the order of the tensors does not matter."""
        return cls(tuple(sorted(inputs, key=_name)), tuple(sorted(outputs, key=_name)))

    def describe(self) -> str:
        """Return the signature in one line: `x: FP32[-1, 4] -> y: FP32[-1, 2]`."""
        sides = ([f"{t.name}: {t.text}" for t in side] for side in (self.inputs, self.outputs))
        return " -> ".join(", ".join(side) for side in sides)


def _name(spec: TensorSpec) -> str:
    return spec.name


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`. `metadata` is free-form: accuracy, author, training run."""

    files: Mapping[str, FileEntry]
    created: str = ""  # RFC 3339, UTC
    signature: Signature | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest of the version's content (`content_digest`)."""
        return content_digest(self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "created": self.created,
            "files": {n: {"sha256": f.sha256, "size": f.size} for n, f in sorted(self.files.items())},
            "metadata": dict(self.metadata),
        }
        if self.signature is not None:
            document["inputs"] = [_spec_document(spec) for spec in self.signature.inputs]
            document["outputs"] = [_spec_document(spec) for spec in self.signature.outputs]
        return document

    def dump(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        return orjson.dumps(self.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, document: object) -> Manifest:
        """Parse the document; raises DamagedDocument naming the field, also for an unknown field at the top level.

        Unknown fields of a file, an input or an output are ignored.
        """
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise DamagedDocument(f"manifest: expected schema {SCHEMA}")
        unknown = set(document) - {"schema", "created", "files", "metadata", "inputs", "outputs"}
        if unknown:
            raise DamagedDocument(f"manifest: unknown fields {sorted(map(str, unknown))}")
        created, metadata = document.get("created", ""), document.get("metadata", {})
        if not isinstance(created, str) or not isinstance(metadata, dict):
            raise DamagedDocument("manifest: expected 'created' to be text and 'metadata' an object")
        return cls(_parse_files(document.get("files")), created, _parse_signature(document), metadata)


def _parse_files(listed: object) -> dict[str, FileEntry]:
    if not isinstance(listed, dict) or not is_version_content(listed):
        raise DamagedDocument(f"manifest: expected 'files' to hold {' or '.join(DEFINING)}")
    return {_check_file_name(name): _parse_file(name, entry) for name, entry in listed.items()}


def _check_file_name(name: object) -> str:
    if not isinstance(name, str) or names.FILE_PATTERN.fullmatch(name) is None or name == MANIFEST:
        raise DamagedDocument(f"manifest: file name {name!r} is not allowed")
    return name


def _parse_file(name: object, entry: object) -> FileEntry:
    match entry:
        case {"sha256": str(digest), "size": int(size)} if _DIGEST.fullmatch(digest) and size >= 0:
            return FileEntry(digest, size)
    raise DamagedDocument(f"manifest: file {name!r} needs 'sha256' (64 hexadecimal digits) and 'size'")


def _parse_signature(document: dict[str, Any]) -> Signature | None:
    if "inputs" not in document and "outputs" not in document:
        return None
    return Signature.of(_parse_specs(document, "inputs"), _parse_specs(document, "outputs"))


def _parse_specs(document: dict[str, Any], side: str) -> tuple[TensorSpec, ...]:
    listed = document.get(side)
    if not isinstance(listed, list):
        raise DamagedDocument(f"manifest: expected {side!r} to be a list")
    return tuple(_parse_spec(entry, side) for entry in listed)


def _spec_document(spec: TensorSpec) -> dict[str, object]:
    return spec.describe() | ({"any_rank": True} if spec.any_rank else {})


def _parse_spec(entry: object, side: str) -> TensorSpec:
    match entry:
        case {"name": str(name), "datatype": str(datatype), "shape": [*shape], **more} if all(
            type(d) is int for d in shape
        ):
            return TensorSpec(name, datatype, tuple(shape), more.get("any_rank") is True)
    raise DamagedDocument(f"manifest: an entry of {side!r} needs name, datatype and shape")


def read_manifest(folder: Path) -> Manifest:
    """Read a version's manifest; raises OSError (FileNotFoundError without one), DamagedDocument if it is invalid."""
    with open_plain(folder / MANIFEST) as file:
        raw = file.read()
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DamagedDocument(f"manifest: not JSON: {error}") from error
    return Manifest.from_json(document)


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptVersion if a file that the manifest names cannot be read, or has another size or sha256."""
    for name, expected in manifest.files.items():
        try:
            found = digest_file(folder / name)
        except OSError as error:
            raise CorruptVersion(f"file {name!r} cannot be read: {error.strerror}") from error
        if found != expected:
            raise CorruptVersion(
                f"file {name!r} has sha256 {found.sha256} and {found.size} bytes, "
                f"the manifest says {expected.sha256} and {expected.size}"
            )


def describe_folder(folder: Path) -> dict[str, FileEntry]:
    """Return digest and size of each file of a hand-copied version except the manifest, by name.

    Raises CorruptVersion unless the folder is a flat one of plain files with allowed names, which can be a version, and
    OSError if a file cannot be read.
    """
    entries = {}
    for entry in list(os.scandir(folder)):
        if entry.name == MANIFEST:
            continue
        if names.FILE_PATTERN.fullmatch(entry.name) is None or not entry.is_file(follow_symlinks=False):
            raise CorruptVersion(f"{entry.name!r}: a version holds plain files named {names.FILE_PATTERN.pattern} only")
        entries[entry.name] = digest_file(Path(entry.path))
    if not is_version_content(entries):
        raise CorruptVersion(f"expected {' or '.join(DEFINING)}, found {sorted(entries)}")
    return entries


def is_version_content(files: Collection[str]) -> bool:
    """Whether files of these names can be a version.

    Exactly one of `model.onnx` and `pipeline.toml` is among them, or of `model.gguf`, `config.json` and
    `genai_config.json`.
    """
    return defining_file(files) is not None


def defining_file(files: Collection[str]) -> str | None:
    """Return the file that says what the version is, None if there is none, or several."""
    for kind in _KINDS:
        if found := [name for name in kind if name in files]:
            return found[0] if len(found) == 1 else None
    return None


def language_model_path(folder: Path) -> Path | None:
    """Return what `TextGenerator.open` reads in a version's folder; None if it holds another kind of model."""
    found = defining_file({entry.name for entry in os.scandir(folder)})
    return {GGUF_FILE: folder / GGUF_FILE, CONFIG_FILE: folder, GENAI_FILE: folder}.get(found or "")


def content_digest(files: Mapping[str, FileEntry]) -> str:
    """Return the sha256 of the ONNX file if it is the only file, otherwise of the sorted list of digests and names."""
    if files.keys() == {MODEL_FILE}:
        return files[MODEL_FILE].sha256
    listed = "".join(f"{entry.sha256}  {name}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256(listed.encode()).hexdigest()


def digest_file(path: Path) -> FileEntry:
    """Return the sha256 and size of a plain file; raises OSError for links and devices."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
    with open(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(None, "not a plain file")
        digest, size = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(digest.hexdigest(), size)
