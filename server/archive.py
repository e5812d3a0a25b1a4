"""The body of a model upload: the model file unchanged, or a tar archive of a model with its weights or a pipeline.

The archive is a POSIX tar of `model.onnx` and `weights.bin`, with the model rewritten so that all external tensors lie
in the one weights file; of `pipeline.toml` and the files that its steps read; or of the files of a language model. It
is never stored as a whole: the upload streams it in chunks from the files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the command line reads this module, and need not wait for NumPy
    from lathe.server.types import Array

MODEL, WEIGHTS, PIPELINE = "model.onnx", "weights.bin", "pipeline.toml"
DRAFT = "draft.gguf"  # the draft model of a language model
GGUF_MAGIC = b"GGUF"
_BLOCK = 512
_CHUNK = 1 << 18  # bytes
_MAX_NAME = 100  # characters: the field of a POSIX ustar header
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of `names.FILE_PATTERN` those that fit into a header
_LARGEST_OCTAL = 8 << 30  # bytes: 11 octal digits; from here on the size is written in base 256 (GNU tar)
_FOREIGN = {  # first bytes of formats that are no models
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"\x1f\x8b": "a gzip stream",
    b"BZh": "a bzip2 stream",
    b"\xfd7zXZ": "an xz stream",
    b"\x28\xb5\x2f\xfd": "a zstandard stream",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x89HDF": "an HDF5 file",
    b"\x7fELF": "a program",
    b"--": "a multipart form",
    b"{": "JSON",
}

Part: TypeAlias = "bytes | Path | Array"  # bytes, a file, or an array of bytes


@dataclass(frozen=True)
class UploadBody:
    """The content of an upload: its parts, bytes or files, one after the other."""

    parts: tuple[Part, ...]
    content_type: str = "application/octet-stream"

    @property
    def size(self) -> int:
        """The size of all parts in bytes."""
        return sum(map(_size, self.parts))

    def pieces(self) -> Iterator[bytes]:
        """Yield the content in order, in chunks of at most 256 KiB."""
        for part in self.parts:
            yield from _chunks(part)

    def sha256(self) -> bytes:
        """Return the SHA-256 digest; reads all parts."""
        digest = hashlib.sha256()
        for chunk in self.pieces():
            digest.update(chunk)
        return digest.digest()


def foreign_format(start: bytes) -> str:
    """Return the kind of a file that begins with `start`, such as "a zip archive"; empty if it may be a model."""
    return next((what for magic, what in _FOREIGN.items() if start.startswith(magic)), "")


def body_of(content: Path | bytes, adapters: Mapping[str, Path] | None = None, draft: Path | None = None) -> UploadBody:
    """Return the upload of a model, given as bytes, as a file, or as the Hugging Face folder of a language model.

    `adapters` are folders by name, and `draft` a GGUF file, for a language model: a GGUF file or a folder.

    Bytes and GGUF files are uploaded unchanged. A `pipeline.toml` is archived with the files that its steps read, an
    ONNX file with its external weights if it has any. Raises OSError if a file cannot be read,
    lathe.core.errors.ModelError if the model refers to weights outside its folder, through links, or beyond the end of
    their file, or the pipeline to a file whose name a version cannot have. A file that does not parse as a model is
    uploaded unchanged: the server reports what is wrong with it.
    """
    if isinstance(content, bytes):
        return UploadBody((content,))
    if is_language_model(content):
        return _language_model(content, adapters or {}, draft)
    if content.name == PIPELINE:
        return _pipeline(content)
    from lathe.core.errors import ModelError, UnsupportedError
    from lathe.core.frontends.merge_external_data import merge_external_data
    from lathe.core.frontends.proto import parse_model

    try:
        model = parse_model(content.read_bytes(), external=True)
    except (ModelError, UnsupportedError):
        return UploadBody((content,))
    folded = merge_external_data(model, content, WEIGHTS)
    return UploadBody((content,)) if folded is None else archive_of({MODEL: [folded.model], WEIGHTS: folded.weights})


def _pipeline(path: Path) -> UploadBody:
    """Return the tar archive of a `pipeline.toml` and the files of its steps.

    Raises OSError if one cannot be read, ModelError for a name that a file of a version or archive cannot have. A
    definition that cannot be parsed is archived alone: the server reports what is wrong with it.
    """
    from lathe.core.errors import ModelError
    from lathe.server.pipelines.definition import BadPipeline, parse_definition

    content = path.read_bytes()
    try:
        files = parse_definition(content).files
    except BadPipeline:
        files = frozenset()
    for name in sorted(files):
        if _FILE_NAME.fullmatch(name) is None:
            expected = f"expected the name of a file beside {PIPELINE}: letters, digits, '.', '_' and '-', at most 100"
            raise ModelError(f"options.file: {expected}, got {name[:120]!r}", where=PIPELINE)
    return archive_of({PIPELINE: [content], **{name: [path.with_name(name)] for name in sorted(files)}})


# What `lathe.load_language_model` reads of a folder.
_LANGUAGE_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|chat_template\.jinja"
    r"|model\.safetensors|model\.safetensors\.index\.json|model-\d+-of-\d+\.safetensors"
)
_ONNX_DATA = re.compile(r"[\w.-]+\.onnx[._]data")


def is_language_model(path: Path) -> bool:
    """Whether a path is a GGUF file or a folder, as which `body_of` takes language models."""
    return path.is_dir() or _starts_with(path, GGUF_MAGIC)


def _language_model(path: Path, adapters: Mapping[str, Path], draft: Path | None) -> UploadBody:
    """Return a GGUF file unchanged, or the tar archive of a language model, its adapters and its draft model.

    ModelError if a folder has no `config.json` and no `genai_config.json`, an adapter has no such files or a bad
    name, or the draft model is no GGUF file.
    """
    from lathe.core.errors import ModelError

    if path.is_file() and not adapters and draft is None:
        return UploadBody((path,))
    files = {"model.gguf": path} if path.is_file() else _folder_files(path)
    if draft is not None:
        if not _starts_with(draft, GGUF_MAGIC):
            raise ModelError("draft model: expected a GGUF file", where=draft.name)
        files[DRAFT] = draft
    return archive_of({name: [file] for name, file in (files | _adapter_files(adapters)).items()})


def _adapter_files(adapters: Mapping[str, Path]) -> dict[str, Path]:
    if not adapters:
        return {}
    from lathe.core.errors import ModelError
    from lathe.core.language.adapters import adapter_files

    files: dict[str, Path] = {}
    for name, folder in adapters.items():
        if _ADAPTER_NAME.fullmatch(name) is None:
            raise ModelError(f"name of an adapter: expected {_ADAPTER_NAME.pattern}, got {name[:80]!r}")
        files |= zip(adapter_file_names(name), adapter_files(folder), strict=True)
    return files


def _folder_files(folder: Path) -> dict[str, Path]:
    """Return the files of a language model in a folder, by their names in an upload.

    ModelError if the folder has no `config.json` and no `genai_config.json`.
    """
    from lathe.core.errors import ModelError
    from lathe.core.language.onnx_decoder import DECODER_FILE, GENAI_FILE, onnx_decoder_file

    present = sorted(path.name for path in folder.iterdir())
    names = [name for name in present if _LANGUAGE_FILES.fullmatch(name)]
    if GENAI_FILE in present:  # a version has one file that says what it is
        names = [GENAI_FILE, *(name for name in names if name != "config.json")]
    elif "config.json" not in names:
        raise ModelError("expected the folder of a language model, with a file 'config.json'", where=folder.name)
    files = {name: folder / name for name in names}
    if not any(name.endswith(".safetensors") for name in names) and (decoder := onnx_decoder_file(folder)) is not None:
        files[DECODER_FILE] = decoder
        files |= {name: folder / name for name in present if _ONNX_DATA.fullmatch(name)}
    return files


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADAPTER_SETTINGS = re.compile(rf"adapter\.({_ADAPTER_NAME.pattern})\.json")


def adapter_file_names(name: str) -> tuple[str, str]:
    """Return the names of the settings and the weights of an adapter beside its model."""
    return f"adapter.{name}.json", f"adapter.{name}.safetensors"


def stored_adapters(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return the files of the adapters in the folder of a version, by name in ascending order."""
    matches = (_ADAPTER_SETTINGS.fullmatch(path.name) for path in folder.iterdir())
    names = sorted(match[1] for match in matches if match is not None)
    found = ((name, adapter_file_names(name)) for name in names)
    return {name: (folder / settings, folder / weights) for name, (settings, weights) in found}


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def archive_of(files: Mapping[str, Sequence[Part]]) -> UploadBody:
    """Return the tar archive of these files, by name; each file's content is a sequence of parts (bytes or files).

    Raises ValueError for a name that is not ASCII or has more than 100 characters.
    """
    parts: list[Part] = []
    for name, content in files.items():
        size = sum(map(_size, content))
        parts += [_header(name, size), *content, bytes(-size % _BLOCK)]
    return UploadBody((*parts, bytes(2 * _BLOCK)), "application/x-tar")


def _header(name: str, size: int) -> bytes:
    """Return the header block of a file: POSIX ustar, a regular file with mode 644, owner 0 and time 0."""
    if not name.isascii() or len(name) > _MAX_NAME:
        raise ValueError(f"file name: expected at most {_MAX_NAME} ASCII characters, got {name[:120]!r}")
    header = bytearray(_BLOCK)
    header[: len(name)] = name.encode()
    header[100:108], header[108:124] = b"0000644\0", b"0000000\0" * 2
    header[124:136] = f"{size:011o}\0".encode() if size < _LARGEST_OCTAL else (size | 1 << 95).to_bytes(12, "big")
    header[136:148], header[148:156] = b"00000000000\0", b" " * 8
    header[156:157], header[257:265] = b"0", b"ustar\x0000"
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


def _size(part: Part) -> int:
    return part.stat().st_size if isinstance(part, Path) else len(part)


def _chunks(part: Part) -> Iterator[bytes]:
    if isinstance(part, Path):
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
        return
    for start in range(0, len(part), _CHUNK):
        yield bytes(part[start : start + _CHUNK])
