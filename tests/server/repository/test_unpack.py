"""Archives unpacked while they arrive, compared with Python's tar module."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.server import archive
from lathe.server.errors import BadRequest, TooLarge
from lathe.server.repository.tar_unpacker import TarUnpacker, is_archive

FILES = {"model.onnx": b"a model" * 300, "weights.bin": bytes(range(256)) * 20, "labels.txt": b""}


class Sink:
    """A fake of a staged file."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes | memoryview) -> None:
        self.data += bytes(data)


def unpack(data: bytes, piece: int = 1 << 20, limit: int = 1 << 20) -> dict[str, bytes]:
    """The files in an archive that arrives in pieces of this size."""
    sinks: dict[str, Sink] = {}

    def create(name: str) -> Any:
        return sinks.setdefault(name, Sink())

    unpacker = TarUnpacker(create, limit)
    for start in range(0, len(data), piece):
        unpacker.write(data[start : start + piece])
    unpacker.finish()
    return {name: sink.data for name, sink in sinks.items()}


def tar(
    members: list[tuple[str, bytes]], edit: Callable[[tarfile.TarInfo], Any] = id, form: int = tarfile.USTAR_FORMAT
) -> bytes:
    """An archive as Python writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            edit(info)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("piece", [1, 7, 511, 512, 513, 4096])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_files_are_unpacked_unchanged(piece: int, form: int) -> None:
    assert unpack(tar(list(FILES.items()), form=form), piece) == FILES


def test_the_clients_archive_is_a_tar_file(tmp_path: Path) -> None:
    data = np.frombuffer(FILES["weights.bin"], np.uint8)
    (tmp_path / "model.onnx").write_bytes(FILES["model.onnx"])
    body = archive.archive_of({"model.onnx": [tmp_path / "model.onnx"], "weights.bin": [data[:100], data[100:]]})
    content = b"".join(body.pieces())
    assert len(content) == body.size
    assert is_archive(content)
    with tarfile.open(fileobj=io.BytesIO(content)) as file:
        members = {info.name: file.extractfile(info).read() for info in file}  # type: ignore[union-attr]
    assert members == unpack(content) == {name: FILES[name] for name in ("model.onnx", "weights.bin")}


@pytest.mark.parametrize("name", ["n" * 101, "v\u00e9.txt"])
def test_names_that_do_not_fit_into_a_header_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="file name: expected at most 100 ASCII characters, got '"):
        archive.archive_of({name: [b"x"]})


@pytest.mark.parametrize("size", [8 << 30, 40 << 30])
def test_sizes_beyond_the_octal_limit_are_understood(size: int) -> None:
    header = archive._header("model.onnx", size)
    assert tarfile.TarInfo.frombuf(header, "utf-8", "strict").size == size
    with pytest.raises(TooLarge, match=f"'model.onnx' has {size} bytes"):
        unpack(header)


def kind(of: bytes) -> Callable[[tarfile.TarInfo], Any]:
    def edit(info: tarfile.TarInfo) -> None:
        info.type, info.linkname, info.size = of, "/etc/passwd", 0

    return edit


def damaged_archive(at: int) -> bytes:
    data = bytearray(tar([("model.onnx", b"x")]))
    data[at] ^= 1
    return bytes(data)


MODEL = ("model.onnx", b"x" * 600)
BAD = {
    "no model": (
        tar([("weights.bin", b"x")]),
        "expected model.onnx or pipeline.toml or model.gguf or config.json or genai_config.json among them",
    ),
    "a parent folder": (tar([("../model.onnx", b"x")]), "file name '../model.onnx'"),
    "a folder": (tar([("data/model.onnx", b"x")]), "file name 'data/model.onnx'"),
    "an absolute name": (tar([("/etc/passwd", b"x")]), "file name"),
    "a hidden name": (tar([(".model.onnx", b"x")]), "file name"),
    "a long name": (tar([("a/" * 60 + "b", b"x")]), "is not a regular file"),
    "no name": (tar([("", b"x")]), "file name"),
    "a file of the server": (tar([MODEL, ("manifest.json", b"{}")]), "manifest.json is written by the server"),
    "twice": (tar([MODEL, MODEL]), "'model.onnx' comes twice"),
    "too many": (tar([(f"f{index}", b"") for index in range(65)]), "after 64 files"),
    "symbolic link": (tar([MODEL], kind(tarfile.SYMTYPE)), "is not a regular file"),
    "hard link": (tar([MODEL], kind(tarfile.LNKTYPE)), "is not a regular file"),
    "device": (tar([MODEL], kind(tarfile.CHRTYPE)), "is not a regular file"),
    "pipe": (tar([MODEL], kind(tarfile.FIFOTYPE)), "is not a regular file"),
    "directory": (tar([MODEL], kind(tarfile.DIRTYPE)), "is not a regular file"),
    "pax header": (tar([("m" * 120, b"x")], form=tarfile.PAX_FORMAT), "is not a regular file"),
    "cut short": (tar([MODEL])[:700], "ends within a file"),
    "cut in a header": (tar([MODEL])[:100], "ends within a file"),
    "damaged name": (damaged_archive(2), "a header is damaged"),
    "damaged size": (damaged_archive(126), "a header is damaged"),
    "bytes after its end": (tar([MODEL]) + b"more", "data follow its end"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_other_entries_are_refused(name: str, piece: int) -> None:
    data, message = BAD[name]
    with pytest.raises(BadRequest, match=message):
        unpack(data, piece)


def test_a_large_file_is_refused_at_its_header() -> None:
    with pytest.raises(TooLarge, match=r"'model\.onnx' has 2000 bytes, the most that may be uploaded is 1000"):
        unpack(tar([("model.onnx", b"x" * 2000)]), limit=1000)
