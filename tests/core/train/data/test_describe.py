"""The description of an uploaded dataset, made in a child process, also for hostile files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from lathe.core.errors import DataError
from lathe.core.train.data.__main__ import main
from lathe.core.train.data.describe import describe

LIMIT = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29))
os.execv(sys.executable, [sys.executable, "-m", "lathe.core.train.data", *sys.argv[1:]])
"""


def child(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON line of a process with a memory limit of 512 MiB."""
    command = [sys.executable, "-c", LIMIT, "describe", str(path), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert len(result.stdout.splitlines()) == 1, result.stderr
    return result.returncode, json.loads(result.stdout)


def npz(path: Path, **arrays: Any) -> Path:
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return path


def test_digits(tmp_path: Path) -> None:
    digits = load_digits()
    path = npz(tmp_path / "data", x=digits.images, y=digits.target)
    status, found = child(path, "--name", "digits")
    assert status == 0
    assert found == {
        "rows": 1797,
        "format": "npz",
        "columns": [
            {"name": "x", "dtype": "float64", "shape": [8, 8], "layout": "HW"},
            {"name": "y", "dtype": "int64", "shape": []},
        ],
        "parts": {},
        "target": "y",
        "classes": list("0123456789"),
        "digest": hashlib.sha256(path.read_bytes()).hexdigest(),
        "problems": [],
    }


def test_problems_are_listed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a,b,y\n1,x,0\n,2,3\n3,,1\ninf,4,0\n" + "0,0,0\n" * 6)
    found = describe(tmp_path / "data", name="t")
    assert found["problems"] == [
        "column 'a': 2 rows have missing or infinite numbers, line 3 is the first",
        "column 'b': 1 rows have missing text, line 4 is the first",
        "column 'y': class '2' has no rows",
    ]
    assert found["columns"][1] == {"name": "b", "dtype": "string", "shape": [], "note": "line 2: 'x' is not a number"}


def test_numbers_are_not_taken_for_classes(tmp_path: Path) -> None:
    assert describe(npz(tmp_path / "data", x=np.zeros((4, 2)), y=np.array([0.5, 1, 2, 3])))["classes"] is None
    assert describe(npz(tmp_path / "data", x=np.zeros((4, 2)), y=np.array([10, 2000, 3, 7])))["classes"] is None


def test_digest_of_a_folder_depends_on_names_and_content_alone(tmp_path: Path) -> None:
    digests = []
    for folder, text in (("a", "x,y\n1,0\n"), ("b", "x,y\n1,0\n"), ("c", "x,y\n1,1\n")):
        (tmp_path / folder).mkdir()
        for name in ("train.csv", "test.csv")[:: 1 if folder == "a" else -1]:
            (tmp_path / folder / name).write_text(text)
        digests.append(describe(tmp_path / folder)["digest"])
    assert digests[0] == digests[1] != digests[2]


def _zip(path: Path, name: str, pieces: Any) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w", force_zip64=True) as file:
        for piece in pieces:
            file.write(piece)
    return path


def _zip_bomb(path: Path) -> Path:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 26,)})
    return _zip(path, "x.npy", [header.getvalue(), *[bytes(1 << 24)] * 16])


def _long_line(path: Path) -> Path:
    with path.open("wb") as file:
        file.write(b"a,b\n" + b"1" * (1 << 17))
        file.truncate(1 << 30)
    return path


def _image_bomb(path: Path) -> Path:
    file = io.BytesIO()
    Image.new("1", (6, 6)).save(file, "png")
    data = file.getvalue()
    header = b"IHDR" + struct.pack(">II", 60000, 60000) + data[24:29]
    return _zip(path, "a/1.png", [data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]])


def _huge_shape(path: Path) -> Path:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 60,)})
    return _zip(path, "x.npy", [header.getvalue(), bytes(100)])


def _deep_header(path: Path) -> Path:
    return _zip(path, "x.npy", [b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535])


def _gzip_of_idx(path: Path) -> Path:
    data = gzip.compress(b"\0\0\x08\x01\x7f\xff\xff\xff" + bytes(1 << 20))
    return _zip(path, "train-labels-idx1-ubyte.gz", [data[:-100]])


def _nothing(path: Path) -> Path:
    path.touch()
    return path


HOSTILE = {
    "image bomb": (_image_bomb, "'a/1.png' cannot be read: "),
    "huge shape": (_huge_shape, "but 100 follow"),
    "deep header": (_deep_header, "column 'x': invalid .npy file"),
    "truncated gzip": (_gzip_of_idx, "2147483647 bytes of memory, more than the 67108864 bytes left"),
    "nothing": (_nothing, "unknown format, expected"),
}
BOMBS = {
    "zip bomb": (_zip_bomb, "column 'x': needs 268435456 bytes of memory, more than the 67108864 bytes left"),
    "a line of a gigabyte": (_long_line, "a line is longer than 8388608 bytes"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = HOSTILE[kind]
    status = main(["describe", str(make(tmp_path / "data")), "--name", "bad", "--memory", str(1 << 26)])
    found = json.loads(capsys.readouterr().out)
    assert status == 2 and found["error"].startswith("bad: ") and message in found["error"]


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_stay_in_bounded_memory(tmp_path: Path, kind: str) -> None:
    make, message = BOMBS[kind]
    status, found = child(make(tmp_path / "data"), "--name", "bad", "--memory", str(1 << 26))
    assert status == 2 and found["error"].startswith("bad: ") and message in found["error"]


@pytest.mark.parametrize(("module", "name", "what"), [("pyarrow", "a.csv", "CSV"), ("PIL", "cat/1.png", "images")])
def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, what: str
) -> None:
    for loaded in [each for each in sys.modules if each.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"{what}.* need a package that is not installed: pip install '\.\[train\]'"):
        describe(_zip(tmp_path / "data", name, [b"a,y\n1,2\n"]))
