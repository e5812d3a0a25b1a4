"""The reader of GGUF files: types of tensors against the package `gguf`, metadata, damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.language import gguf_blocks
from lathe.core.language.gguf import GgufFile, read_gguf
from lathe.core.language.gguf_blocks import BLOCK_TYPES
from lathe.core.language.gguf_codes import block_codes
from tests.core.language.gguf_writer import floats, gguf_bytes

BLOCKS = np.load(Path(__file__).parent / "gguf_blocks.npz")
NUMBERS = {type_.name: number for number, type_ in BLOCK_TYPES.items()}
CODED = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"]
DECODED = [type_.name for type_ in BLOCK_TYPES.values() if type_.decode is not None]


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def written(content: bytes) -> GgufFile:
        (tmp_path / "model.gguf").write_bytes(content)
        return read_gguf(tmp_path / "model.gguf")

    return written


@pytest.mark.parametrize("at_once", [5, 1 << 14])
@pytest.mark.parametrize("name", DECODED)
def test_blocks_are_decoded_as_the_package_does(
    read: Any, name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, also for scales that are infinite or NaN."""
    monkeypatch.setattr(gguf_blocks, "_BLOCKS_AT_ONCE", at_once)
    blocks, expected = BLOCKS[f"{name}/blocks"], BLOCKS[f"{name}/elements"]
    tensor = read(gguf_bytes({}, {"x": (NUMBERS[name], expected.shape, blocks.tobytes())})).tensors["x"]
    found = tensor.array()
    assert (tensor.kind, found.dtype, found.shape) == (name, np.float32, expected.shape)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", CODED)
def test_codes_and_scales_give_the_elements(read: Any, name: str) -> None:
    """number(code) * scale + offset, bit by bit."""
    blocks, expected = BLOCKS[f"{name}/blocks"], BLOCKS[f"{name}/elements"]
    tensor = read(gguf_bytes({}, {"x": (NUMBERS[name], expected.shape, blocks.tobytes())})).tensors["x"]
    found = block_codes(tensor)
    assert found is not None
    assert found.codes.dtype == (np.uint8 if found.numbers else np.int8)
    numbers = np.float32(found.numbers)[found.codes] if found.numbers else found.codes.astype(np.float32)
    with np.errstate(all="ignore"):  # scales may be infinite or NaN
        elements = numbers * np.repeat(found.scales, found.block, 1)
        if found.offsets is not None:
            elements += np.repeat(found.offsets, found.block, 1)
    np.testing.assert_array_equal(elements, expected)


def test_floats_have_no_codes(read: Any) -> None:
    assert block_codes(read(gguf_bytes({}, {"x": floats(np.ones((2, 3)))})).tensors["x"]) is None


def test_all_types_are_recorded() -> None:
    assert {key.partition("/")[0] for key in BLOCKS} == set(DECODED)


def test_float32_is_a_view_of_the_file(read: Any) -> None:
    found = read(gguf_bytes({}, {"x": floats(np.ones((2, 3)))})).tensors["x"].array()
    assert not found.flags.owndata
    assert not found.flags.writeable


def test_metadata_and_shapes(read: Any) -> None:
    metadata = {
        "a": ("str", "tö"), "b": ("strs", ["x", "", "yz"]), "c": ("u32", 7), "d": ("f32", 0.5), "e": ("bool", True),
        "f": ("i32s", [1, -2, 3]), "g": ("u64", 1 << 40),
    }  # fmt: skip
    file = read(gguf_bytes(metadata, {"x": floats(np.arange(6).reshape(2, 3)), "y": floats(np.float32(4))}))
    assert file.metadata.pop("f").tolist() == [1, -2, 3]
    assert file.metadata == {"a": "tö", "b": ["x", "", "yz"], "c": 7, "d": 0.5, "e": True, "g": 1 << 40}
    assert file.tensors["x"].array().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensors["y"].array().shape == ()


def test_a_type_without_decoder_is_an_error_when_it_is_read(read: Any) -> None:
    tensor = read(gguf_bytes({}, {"x": (NUMBERS["Q5_K"], (256,), bytes(176))})).tensors["x"]
    with pytest.raises(UnsupportedError, match=r"tensor 'x': has type Q5_K, expected one of F32, F16, Q4_0"):
        tensor.array()


def header(tensors: int, entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def described(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


HUGE = (1 << 64) - 1
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "another format": (b"PK\3\4", "whose first four bytes are 'GGUF'"),
    "no header": (b"GGUF\3\0", "ends too early"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "expected GGUF version 2 or 3, little-endian"),
    "version 1": (header(0, 0, 1), "expected GGUF version 2 or 3"),
    "too many tensors": (header(HUGE, 0), "tensors: expected a count of at most 65536"),
    "too much metadata": (header(0, HUGE), "metadata: expected a count of at most 65536"),
    "a missing entry": (header(0, 1), "ends too early"),
    "a huge key": (header(0, 1) + struct.pack("<Q", HUGE), "a key of metadata: expected at most 65535 bytes"),
    "a huge string": (header(0, 1) + entry(b"a", 8, struct.pack("<Q", HUGE)), "'a': expected at most 67108864 bytes"),
    "a string past the end": (header(0, 1) + entry(b"a", 8, struct.pack("<Q", 1 << 25)), "ends too early"),
    "a key that is not UTF-8": (header(0, 1) + entry(b"\xff", 0, b"1"), "a key of metadata: expected UTF-8"),
    "an unknown type": (header(0, 1) + entry(b"a", 13, b""), "metadata 'a': value type 13"),
    "a nested array": (header(0, 1) + entry(b"a", 9, struct.pack("<IQ", 9, 1)), "metadata 'a': value type 9"),
    "a huge array": (header(0, 1) + entry(b"a", 9, struct.pack("<IQ", 5, HUGE)), "ends too early"),
    "many strings": (header(0, 1) + entry(b"a", 9, struct.pack("<IQ", 8, HUGE)), "'a': expected a count of at most"),
    "a key twice": (header(0, 2) + entry(b"a", 0, b"1") * 2, "metadata 'a' occurs twice"),
    "an odd alignment": (
        header(0, 1) + entry(b"general.alignment", 4, struct.pack("<I", 12)), "general.alignment: expected a power"
    ),
    "no alignment": (header(0, 1) + entry(b"general.alignment", 4, bytes(4)), "general.alignment: expected a power"),
    "a tensor twice": (header(2, 0) + described(b"x", (1,)) + described(b"x", (1,), offset=32) + bytes(99), "twice"),
    "too many axes": (header(1, 0) + described(b"x", (1,) * 5), "tensor 'x': expected at most 4 axes, got 5"),
    "a huge shape": (header(1, 0) + described(b"x", (HUGE, HUGE)), "tensor 'x': shape .* is too large"),
    "a huge empty shape": (header(1, 0) + described(b"x", (HUGE, 0)), "tensor 'x': shape .* is too large"),
    "an unknown tensor type": (header(1, 0) + described(b"x", (1,), 99), "tensor 'x' has type 99, which is unknown"),
    "half a block": (header(1, 0) + described(b"x", (16, 2), 2), "'x': expected rows of a multiple of 32 elements"),
    "a block of no axes": (header(1, 0) + described(b"x", (), 2), "'x': expected rows of a multiple of 32 elements"),
    "data past the end": (header(1, 0) + described(b"x", (9,)) + bytes(32), r"tensor 'x': bytes 0 to 36 of"),
    "a huge offset": (header(1, 0) + described(b"x", (1,), offset=HUGE) + bytes(64), r"tensor 'x': bytes 18446744"),
    "no data": (header(1, 0) + described(b"x", (1,)), r"tensor 'x': bytes 0 to 4 of 0 bytes"),
    "an overlap": (
        header(2, 0) + described(b"x", (8,)) + described(b"y", (8,), offset=4) + bytes(99), "'y' overlaps tensor 'x'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(read: Any, name: str) -> None:
    content, message = DAMAGED[name]
    with pytest.raises(ModelError, match=message) as error:
        read(content)
    assert str(error.value).startswith("model.gguf: ")


def test_a_folder_or_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path)
    with pytest.raises(ModelError, match=r"model\.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "model.gguf")
