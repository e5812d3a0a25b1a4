"""Rebuilds the bundled example models: `python -m tools.make_models [FOLDER]` (needs the `test` extra).

`digits` reads a handwritten digit: version 1 is tiny, version 2 is larger and was trained on shifted copies too. The
data are the 1,797 images of 8 x 8 pixels (0 to 16) that come with scikit-learn. The last 449 are held out: no version
is trained on them, and the accuracy in the manifest is measured on them. `docs/digit.json` is a request with one of
them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from threadpoolctl import threadpool_limits

from lathe.server.repository.aliases import Aliases
from lathe.server.repository.manifest import MANIFEST, MODEL_FILE, Manifest, Signature, describe_folder
from lathe.server.repository.names import LIVE_ALIAS
from lathe.server.types import TensorSpec
from tools.numpy_trainer import Adam, Array, Conv, Dense, Layer, MaxPool, Relu, forward, train_step

HELD_OUT = 449
PIXEL_MAX = 16.0
OPSET = 17
EXAMPLE = 13  # index of a held-out image: a five, which version 1 classifies as a six
CREATED = "2026-11-20T21:30:00Z"  # fixed, so that a rebuild changes nothing


@dataclass(frozen=True)
class Recipe:
    """The architecture and training settings of one version."""

    version: int
    filters: tuple[int, int]
    hidden: int
    epochs: int
    shift: bool  # also train on copies shifted by at most one pixel
    note: str


RECIPES = (
    Recipe(1, filters=(4, 8), hidden=24, epochs=20, shift=False, note="small: 4 and 8 filters"),
    Recipe(2, filters=(24, 48), hidden=64, epochs=60, shift=True, note="24 and 48 filters, trained on shifted copies"),
)


def load_digits() -> tuple[Array, NDArray[np.int64]]:
    """`(images float32 [1797,1,8,8] in 0..16, labels int64 [1797])`, in scikit-learn's order."""
    from sklearn.datasets import load_digits as bundled

    data = bundled()
    return data.images[:, None].astype(np.float32), data.target.astype(np.int64)


def held_out() -> tuple[Array, NDArray[np.int64]]:
    """The 449 images and labels that no version was trained on, in the types of `load_digits`."""
    images, labels = load_digits()
    return images[-HELD_OUT:], labels[-HELD_OUT:]


def network(rng: np.random.RandomState, recipe: Recipe) -> list[Layer]:
    """A LeNet for 8 x 8 pixels: two convolutions, each followed by pooling, and two dense layers."""
    first, second = recipe.filters
    return [
        Conv(rng, 1, first), Relu(), MaxPool(),
        Conv(rng, first, second), Relu(), MaxPool(),
        Dense(rng, second * 2 * 2, recipe.hidden), Relu(),
        Dense(rng, recipe.hidden, 10),
    ]  # fmt: skip


def shifted(rng: np.random.RandomState, x: Array) -> Array:
    """The images [N,1,8,8], each shifted at random by -1, 0 or 1 pixel in both directions, filled with zeros."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    offsets = rng.randint(0, 3, size=(len(x), 2))
    return np.stack([p[:, i : i + 8, j : j + 8] for p, (i, j) in zip(padded, offsets, strict=True)])


def train(recipe: Recipe) -> list[Layer]:
    rng = np.random.RandomState(recipe.version)  # the legacy generator: NumPy never changes its streams
    images, labels = load_digits()
    x, y = images[:-HELD_OUT] / np.float32(PIXEL_MAX), labels[:-HELD_OUT]
    layers = network(rng, recipe)
    adam = Adam(layers)
    for epoch in range(recipe.epochs):
        rate = 3e-3 * 0.5 * (1 + np.cos(np.pi * epoch / recipe.epochs))
        for batch in np.array_split(rng.permutation(len(x)), len(x) // 32):
            train_step(layers, adam, shifted(rng, x[batch]) if recipe.shift else x[batch], y[batch], rate)
    return layers


def accuracy(layers: Sequence[Layer]) -> float:
    images, labels = held_out()
    predicted = forward(layers, images / np.float32(PIXEL_MAX)).argmax(axis=1)
    return float((predicted == labels).mean())


def to_onnx(layers: Sequence[Layer], recipe: Recipe) -> onnx.ModelProto:
    """`image [batch,1,8,8] float32 in 0..16 -> probabilities [batch,10]`; the scaling is part of the graph."""
    conv1, _, _, conv2, _, _, dense1, _, dense2 = layers
    weights: dict[str, Array] = {"pixel_scale": np.array(1 / PIXEL_MAX, np.float32)}
    for name, layer in (("conv1", conv1), ("conv2", conv2), ("dense1", dense1), ("dense2", dense2)):
        weights |= {f"{name}_{key}": value for key, value in layer.parameters().items()}

    conv: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    pool: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("Mul", ["image", "pixel_scale"], ["scaled"]),
        helper.make_node("Conv", ["scaled", "conv1_weight", "conv1_bias"], ["c1"], **conv),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], **pool),
        helper.make_node("Conv", ["p1", "conv2_weight", "conv2_bias"], ["c2"], **conv),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("MaxPool", ["r2"], ["p2"], **pool),
        helper.make_node("Flatten", ["p2"], ["flat"]),
        helper.make_node("Gemm", ["flat", "dense1_weight", "dense1_bias"], ["d1"], transB=1),
        helper.make_node("Relu", ["d1"], ["r3"]),
        helper.make_node("Gemm", ["r3", "dense2_weight", "dense2_bias"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        f"digits_{recipe.version}",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8, producer_name="lathe-example"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def manifest(folder: Path, layers: Sequence[Layer], recipe: Recipe) -> Manifest:
    """The manifest of a version, with the accuracy measured on the held-out images."""
    metadata = {
        "description": f"Handwritten digits, LeNet-style; {recipe.note}",
        "accuracy": round(accuracy(layers), 4),
        "accuracy_on": f"the last {HELD_OUT} of the {len(load_digits()[1])} images of sklearn.datasets.load_digits",
        "input": "image: 8 x 8 grey values from 0 to 16",
        "output": "probabilities: of the digits 0 to 9",
        "made_by": "python -m tools.make_models",
    }
    signature = Signature.of(
        (TensorSpec("image", "FP32", (-1, 1, 8, 8)),), (TensorSpec("probabilities", "FP32", (-1, 10)),)
    )
    return Manifest(describe_folder(folder), CREATED, signature, metadata)


def aliases() -> Aliases:
    """Aliases with the newest version live, and the version before it as rollback target."""
    made = Aliases()
    for recipe in RECIPES:
        made = made.moved(LIVE_ALIAS, recipe.version).with_high_water(recipe.version).with_next_generation()
    return made


def write_json(path: Path, document: object) -> None:
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def write_version(folder: Path, recipe: Recipe) -> None:
    with threadpool_limits(1):  # one thread, so that sums have the same order on every machine
        layers = train(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx(layers, recipe), str(folder / MODEL_FILE))
    described = manifest(folder, layers, recipe)
    (folder / MANIFEST).write_bytes(described.dump())
    print(f"{folder}: {described.files[MODEL_FILE].size} bytes, accuracy {described.metadata['accuracy']}")


def example_request(number: int) -> str:
    """An infer request in JSON for one held-out image, with one line per row of pixels."""
    rows = [", ".join(f"{pixel:2.0f}" for pixel in row) for row in held_out()[0][number, 0]]
    head = '"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8]'
    return '{"inputs": [{' + head + ', "data": [\n  ' + ",\n  ".join(rows) + "\n]}]}\n"


def main(folder: str = "model_repo") -> None:
    model = Path(folder) / "digits"
    for recipe in RECIPES:
        write_version(model / str(recipe.version), recipe)
    write_json(model / "aliases.json", aliases().to_json())
    Path("docs/digit.json").write_text(example_request(EXAMPLE))


if __name__ == "__main__":
    main(*sys.argv[1:])
