"""Models with external data: read only if permitted, and only from the model's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

import lathe
from lathe.core.errors import ModelError
from lathe.server.archive import body_of
from tests.onnx_runtime import plain_session

WEIGHT = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
CODES = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
X = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)


def build() -> onnx.ModelProto:
    """A model of a product with a weight, plus a constant in an attribute, plus an INT4 initializer."""
    packed = helper.make_tensor("codes", TensorProto.INT4, (32,), np.tile(CODES.ravel(), 2).astype(int).tolist())
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(WEIGHT[0], "c")),
        helper.make_node("Add", ["p", "c"], ["s"]),
        helper.make_node("Cast", ["codes"], ["k"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["s", "k"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [numpy_helper.from_array(WEIGHT, "w"), packed],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with model.onnx and its weights in data/weights.bin, as onnx's own tool lays them out."""
    proto = build()
    inside = lathe.interpret(lathe.load(proto.SerializeToString()), {"x": X})["y"]
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "expected.npy", inside)
    for tensor in external_data_helper._get_all_tensors(proto):
        if not tensor.HasField("raw_data"):
            tensor.raw_data = bytes(np.uint8(tensor.int32_data))
            tensor.ClearField("int32_data")
    external_data_helper.convert_model_to_external_data(
        proto, location="data/weights.bin", size_threshold=0, convert_attribute=True
    )
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path


def test_weights_are_read_from_the_folder_when_permitted(folder: Path) -> None:
    graph = lathe.load(folder / "model.onnx")
    expected = np.load(folder / "expected.npy")
    np.testing.assert_array_equal(lathe.interpret(graph, {"x": X})["y"], expected)
    with lathe.compile(graph, threads=1) as session:
        np.testing.assert_allclose(session.run({"x": X})["y"], expected, 1e-5, 1e-5)


def test_names_may_be_those_of_tensors(folder: Path) -> None:
    """An older exporter of PyTorch writes one file for each tensor, under its name."""
    shutil.move(folder / "data" / "weights.bin", folder / "onnx::MatMul_3")
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in external_data_helper._get_all_tensors(proto):
        for entry in tensor.external_data:
            entry.value = "onnx::MatMul_3" if entry.key == "location" else entry.value
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    graph = lathe.load(folder / "model.onnx")
    np.testing.assert_array_equal(lathe.interpret(graph, {"x": X})["y"], np.load(folder / "expected.npy"))


def test_weights_are_views_of_the_file(folder: Path) -> None:
    graph = lathe.load(folder / "model.onnx")
    (weight,) = (array for value, array in graph.constants.items() if value.name == "w")
    assert not weight.flags.owndata
    assert not weight.flags.writeable


def test_weights_are_not_read_when_forbidden(folder: Path) -> None:
    with pytest.raises(ModelError, match="has external data, expected its data inside the file"):
        lathe.load(folder / "model.onnx", external_data=False)


def test_bytes_have_no_folder(folder: Path) -> None:
    data = (folder / "model.onnx").read_bytes()
    for read in (lathe.load, lathe.compile):
        with pytest.raises(ModelError, match="has external data, expected its data inside the file"):
            read(data)


def test_a_path_is_compiled_with_its_external_data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The model is compiled again if the external file changes, even if its own file is the same."""
    path, weights, cache = folder / "model.onnx", folder / "data" / "weights.bin", tmp_path_factory.mktemp("cache")
    for factor in (1, 2):
        content = bytearray(weights.read_bytes())
        content[: WEIGHT.nbytes] = (factor * WEIGHT).tobytes()
        weights.write_bytes(content)
        (expected,) = plain_session(path).run(None, {"x": X})
        for _ in range(2):
            with lathe.compile(path, threads=1, tune="off", cache_dir=cache) as session:
                np.testing.assert_allclose(session.run({"x": X})["y"], expected, 1e-4, 1e-4)
    assert len(list(cache.glob("models/*.lathe"))) == 2


def changed(folder: Path, edit: Callable[[TensorProto, dict[str, str]], Any]) -> Path:
    """The model with the entries of its first weight edited."""
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = proto.graph.initializer[0]
    entries = {entry.key: entry.value for entry in tensor.external_data}
    edit(tensor, entries)
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder / "model.onnx"


LOCATIONS = {
    "absolute": "/etc/passwd",
    "above": "../weights.bin",
    "above, later": "data/../../weights.bin",
    "backslashes": "..\\weights.bin",
    "a drive": "C:weights.bin",
    "zero byte": "weights\0.bin",
    "empty": "",
    "the folder": ".",
}


@pytest.mark.parametrize("name", LOCATIONS)
def test_names_stay_inside_the_folder(name: str, folder: Path) -> None:
    path = changed(folder, lambda tensor, entries: entries.update(location=LOCATIONS[name]))
    with pytest.raises(ModelError, match="tensor 'w': its data lies outside the model's folder"):
        lathe.load(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "other.bin"}, "lies in 'other.bin', which cannot be read: No such file"),
        ({"location": "data"}, "cannot be read: not a plain file"),
        ({"offset": "-1"}, "offset or length of its data is '-1'"),
        ({"offset": "9" * 30}, "expected a number of bytes"),
        ({"offset": "99999999"}, r"its data ends at byte \d+ of 'data/weights.bin', which has \d+"),
        ({"length": "8"}, "has 8 bytes of data, expected 8192 for its type and shape"),
    ],
)
def test_entries_that_do_not_fit_are_refused(entries: dict[str, str], message: str, folder: Path) -> None:
    path = changed(folder, lambda tensor, found: found.update(entries))
    with pytest.raises(ModelError, match=message):
        lathe.load(path)


def test_data_may_not_be_both_inside_and_outside(folder: Path) -> None:
    path = changed(folder, lambda tensor, found: setattr(tensor, "raw_data", WEIGHT.tobytes()))
    with pytest.raises(ModelError, match="has data inside the file and outside"):
        lathe.load(path)


def test_a_shape_larger_than_its_file_is_refused_without_allocating(folder: Path) -> None:
    def grow(tensor: TensorProto, entries: dict[str, str]) -> None:
        tensor.dims[:] = [1 << 40, 1 << 20]
        entries.pop("length")

    with pytest.raises(ModelError, match="its data ends at byte"):
        lathe.load(changed(folder, grow))


def test_tensors_do_not_claim_the_same_bytes_over_and_over(folder: Path) -> None:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for index in range(5):
        proto.graph.initializer.append(proto.graph.initializer[0])
        proto.graph.initializer[-1].name = f"again{index}"
    onnx.save(proto, folder / "model.onnx")
    with pytest.raises(ModelError, match=r"tensors claim more bytes of 'data/weights.bin' than it has"):
        lathe.load(folder / "model.onnx")


@pytest.mark.parametrize("link", ["data", "data/weights.bin"])
def test_symbolic_links_are_not_followed(link: str, folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    shutil.move(folder / link, elsewhere)
    (folder / link).symlink_to(elsewhere)
    with pytest.raises(ModelError, match=r"which cannot be read: (Not a directory|symbolic links are not)"):
        lathe.load(folder / "model.onnx")


def as_in_a_hub_cache(folder: Path, blob: str) -> Path:
    """The model of a folder as Hugging Face's hub keeps it: a snapshot of links to blobs. The weights lie at `blob`."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "1"
    for made in (blobs / "deeper", snapshot / "data"):
        made.mkdir(parents=True)
    for name, target in (("model.onnx", blobs / "aa"), ("data/weights.bin", folder / blob)):
        shutil.move(folder / name, target)
        (snapshot / name).symlink_to(target)
    return snapshot / "model.onnx"


def test_links_of_a_hub_cache_lead_to_its_blobs(folder: Path) -> None:
    path = as_in_a_hub_cache(folder, "blobs/bb")
    np.testing.assert_array_equal(lathe.interpret(lathe.load(path), {"x": X})["y"], np.load(folder / "expected.npy"))
    assert body_of(path).size > WEIGHT.nbytes  # the body of a push contains the weights


@pytest.mark.parametrize("blob", ["bb", "blobs/deeper/bb"])
def test_links_of_a_hub_cache_lead_nowhere_else(blob: str, folder: Path) -> None:
    with pytest.raises(ModelError, match="symbolic links are not followed"):
        lathe.load(as_in_a_hub_cache(folder, blob))


def test_a_pipe_neither_blocks_nor_counts_as_a_file(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    path = changed(folder, lambda tensor, entries: entries.update(location="pipe"))
    with pytest.raises(ModelError, match="not a plain file"):
        lathe.load(path)
