"""The reader of safetensors files against the library `safetensors`, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lathe.core.errors import ModelError
from lathe.core.language.safetensors import read_checkpoint, read_safetensors

TYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
]


def test_tensors_of_each_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    arrays: dict[str, Any] = {name: rng.integers(0, 2, (3, 4)).astype(name) for name in TYPES}
    arrays |= {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 2), np.float32)}
    arrays["bfloat16"] = np.arange(5).astype(ml_dtypes.bfloat16)
    save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        read = found[name].array()
        assert (read.dtype, read.flags.writeable) == (array.dtype, False)
        np.testing.assert_array_equal(read, array)


def test_several_files_with_an_index(tmp_path: Path) -> None:
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in places.items():
        save_file({name: np.full(2, ord(name), np.float32)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert {name: each.array().tolist() for name, each in read_checkpoint(tmp_path).items()} == {
        "a": [97, 97],
        "b": [98, 98],
    }
    for broken, message in [
        ({"a": "../model-1.safetensors"}, r"expected names of files in this folder, got '\.\./model-1"),
        ({"c": "model-1.safetensors"}, r"'model-1\.safetensors' has no tensor 'c'"),
        ({"a": "model-3.safetensors"}, r"model-3\.safetensors: cannot be read: No such file"),
        ({"a": 3}, "expected an object of file names"),
        ([], "expected an object of file names"),
    ]:
        index.write_text(json.dumps({"weight_map": broken}))
        with pytest.raises(ModelError, match=message):
            read_checkpoint(tmp_path)


def content(header: Any, body: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def tensor(start: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "no header": (b"1234", "expected at least 8 bytes, got 4"),
    "a lying header": (b"\xff" * 8 + b"{}", r"its header has 18446744073709551615 bytes, expected at most 2"),
    "a header past the end": ((9).to_bytes(8, "little") + b"{}", "its header has 9 bytes, expected at most 2"),
    "no JSON": (content(b"{'x'}"), "expected JSON"),
    "no UTF-8": (content(b'{"\xff": 1}'), "expected JSON"),
    "no object": (content([1]), "expected a JSON object, got list"),
    "deep JSON": (content(b"[" * 100_000), "expected JSON"),
    "a name twice": (content(b'{"x": 1, "x": 2}'), "key 'x' occurs twice"),
    "no entry": (content({"x": 3}), "tensor 'x': expected dtype, shape and data_offsets, got 3"),
    "no shape": (content({"x": {"dtype": "F32", "data_offsets": [0, 8]}}), "tensor 'x': expected dtype, shape"),
    "a negative size": (content({"x": tensor(shape=[-2])}), "tensor 'x': expected dtype, shape"),
    "a fraction": (content({"x": tensor(shape=[2.0])}), "tensor 'x': expected dtype, shape"),
    "a truth value": (content({"x": tensor(shape=[True, 2])}), "tensor 'x': expected dtype, shape"),
    "three offsets": (content({"x": {**tensor(), "data_offsets": [0, 8, 9]}}), "tensor 'x': expected dtype, shape"),
    "an unknown type": (content({"x": tensor(dtype="F8_E4M3")}), "tensor 'x' has type F8_E4M3, expected one of F64"),
    "a lying size": (content({"x": tensor(shape=[3])}), r"tensor 'x': F32\[3\] needs 12 bytes, but its range has 8"),
    "a huge shape": (content({"x": tensor(shape=[1 << 62, 1 << 62])}), "tensor 'x': shape .* is too large"),
    "a huge empty shape": (content({"x": tensor(0, 0, [1 << 62, 0])}), "tensor 'x': shape .* is too large"),
    "many axes": (content({"x": tensor(0, 4, [1] * 99)}), "tensor 'x': shape .* is too large"),
    "reversed offsets": (content({"x": tensor(8, 0)}), "but its range has -8"),
    "data past the end": (content({"x": tensor(12, 20)}), "tensor 'x': bytes 12 to 20 of 16 bytes of data"),
    "an overlap": (content({"x": tensor(), "y": tensor(4, 12)}), "tensor 'y' overlaps tensor 'x'"),
    "an overlap inside": (content({"x": tensor(0, 16, [4]), "y": tensor(4, 12)}), "tensor 'y' overlaps tensor 'x'"),
    "truncated": (content({"x": tensor(0, 16, [4])}, bytes(15)), "tensor 'x': bytes 0 to 16 of 15 bytes of data"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    damaged, message = DAMAGED[name]
    (tmp_path / "x.safetensors").write_bytes(damaged)
    with pytest.raises(ModelError, match=message) as error:
        read_safetensors(tmp_path / "x.safetensors")
    assert str(error.value).startswith("x.safetensors: ")
