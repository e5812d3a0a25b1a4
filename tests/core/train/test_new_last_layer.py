"""New last layers: preserved weights, new weights, and models that cannot have one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.errors import DataError, ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.train.recipe.parent_model import classes_of
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import result, work_folder
from lathe.core.train.run.work_folder import Sources
from lathe.core.train.training_step.output_heads import with_new_head
from tests.core.train.small_trainings import asked, quadrants

DIGITS = Path(__file__).parents[3] / "model_repo" / "digits" / "2" / "model.onnx"


def linear(*, bias: bool = True, swapped: bool = False, tied: bool = False) -> Graph:
    """A graph x: float32[n,4] -> Relu -> MatMul -> Add -> float32[n,4]; the flags vary it."""
    graph = Graph("linear")
    build = Builder(graph)
    x = build.input("x", TensorType(DType.FLOAT32, (symbol("n"), 4)))
    weight = build.constant(np.eye(4, dtype=np.float32), "w")
    hidden = build("Relu", build("MatMul", x, weight) if tied else x)
    y = build("MatMul", hidden, weight)
    if bias:
        b = build.constant(np.ones((1, 4), np.float32), "b")
        y = build("Add", b, y) if swapped else build("Add", y, b)
    graph.outputs = [y]
    infer_graph(graph)
    return graph


@pytest.mark.parametrize("flags", [{}, {"bias": False}, {"swapped": True}], ids=str)
def test_the_last_product_gets_new_weights(flags: dict[str, bool]) -> None:
    before = linear(**flags)
    after = with_new_head(before, 7, seed=3)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    arrays = {value.name: array for value, array in after.constants.items()}
    (found,) = lathe.interpret(after, {"x": x}).values()
    np.testing.assert_allclose(found, np.maximum(x, 0) @ arrays["w"] + arrays.get("b", 0), rtol=1e-6)
    assert arrays["w"].shape == (4, 7)
    assert 0.1 < np.abs(arrays["w"]).max() <= 0.5  # within 1 / sqrt(4)
    assert {value.name: array.shape for value, array in before.constants.items()}["w"] == (4, 4)
    for seed, same in ((3, True), (4, False)):
        again = {value.name: array for value, array in with_new_head(before, 7, seed).constants.items()}
        assert np.array_equal(again["w"], arrays["w"]) is same


def test_layers_before_the_last_one_stay() -> None:
    """A bundled model: convolutions, then Gemm and Softmax."""
    before = lathe.load(DIGITS)
    after = with_new_head(before, 3, seed=0)
    kept = {value.name: array for value, array in before.constants.items()}
    changed = {v.name for v, array in after.constants.items() if not np.array_equal(kept[v.name], array)}
    assert changed == {"dense2_weight", "dense2_bias"}
    assert after.outputs[0].shape[-1] == 3


def test_models_that_cannot_get_a_new_last_layer() -> None:
    with pytest.raises(ModelError, match="has weights 'w' that other layers use, too"):
        with_new_head(linear(tied=True), 2, 0)
    graph = Graph("pool")
    build = Builder(graph)
    x = build.input("x", TensorType(DType.FLOAT32, (symbol("n"), 4)))
    graph.outputs = [build("Softmax", build("Relu", x), axis=-1)]
    infer_graph(graph)
    with pytest.raises(ModelError, match="comes from Relu, expected a Gemm or MatMul with constant weights"):
        with_new_head(graph, 2, 0)


def test_finetuning_to_other_classes(tmp_path: Path) -> None:
    """From four quadrants to two halves: refused without a new last layer, learned with one and frozen other layers."""
    data = quadrants(tmp_path / "data")
    work_folder.prepare(tmp_path / "parent", asked())
    work_folder.run_training(tmp_path / "parent", Sources(data), Resources(threads=1))
    parent = tmp_path / "parent" / result.FOLDER / result.MODEL
    arrays = np.load(data)
    np.savez(tmp_path / "halves.npz", x=arrays["x"], y=np.where(arrays["x"][:, 0] > 0, "right", "left"))
    sources = Sources(tmp_path / "halves.npz", parent)

    work_folder.prepare(tmp_path / "kept", asked(model={"parent": True}))
    with pytest.raises(DataError, match=r"class '(right|left)' is not one of the model's classes"):
        work_folder.run_training(tmp_path / "kept", sources, Resources(threads=1))

    work_folder.prepare(tmp_path / "none", asked(model={"parent": True, "head": "replace", "trainable": ["last.*"]}))
    with pytest.raises(
        RecipeError, match=r"model.trainable: 'last.\*' matches none of the weights 1.weight, 1.bias, 4"
    ):
        work_folder.run_training(tmp_path / "none", sources, Resources(threads=1))

    model = {"parent": True, "head": "replace", "trainable": ["4.*"]}
    work_folder.prepare(tmp_path / "new", asked(model=model, epochs=15))
    work_folder.run_training(tmp_path / "new", sources, Resources(threads=1))
    trained = (tmp_path / "new" / result.FOLDER / result.MODEL).read_bytes()
    assert classes_of(trained) == ("left", "right")
    assert json.loads((tmp_path / "new" / "result" / "metrics.json").read_bytes())["metrics"]["accuracy"] > 0.8
    before, after = ({v.name: a for v, a in lathe.load(m).constants.items()} for m in (parent.read_bytes(), trained))
    moved = {name for name, array in after.items() if not np.array_equal(array, before.get(name))}
    assert len(moved) == 2
    assert {after[name].shape[0] for name in moved} == {2}
