"""Training in bfloat16 and float16: near float32 and near PyTorch's autocast, with parameters in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Writer
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from tests.core.train.mixed import FEATURES, MOMENTUM, RATE, SHAPES, STEPS, batch, weight

TORCH: dict[str, Any] = json.loads((Path(__file__).parent / "torch_results.json").read_text())


def model() -> Graph:
    graph = Graph("perceptron")
    writer = Writer(graph)
    x = writer.input("x", TensorType(DType.FLOAT32, (symbol("n"), FEATURES)))
    w0, b0, w1, b1, w2 = (writer.array(weight(name), name=name) for name in SHAPES)
    hidden = ((x @ w0 + b0).op("Relu") @ w1 + b1).op("Relu")
    graph.outputs = [(hidden @ w2).value]
    return graph


def curve(precision: Any) -> tuple[list[float], Any]:
    learner = step(model(), losses.CrossEntropy(), optimizers.SGD(RATE, MOMENTUM), precision=precision, threads=2)
    return [float(learner.run(batch(i))["loss"]) for i in range(STEPS)], learner


@pytest.mark.sample(2)
@pytest.mark.parametrize(("precision", "error"), [("bfloat16", 0.02), ("float16", 0.003)])
def test_losses_follow_float32_and_autocast(precision: str, error: float) -> None:
    """All eight products of three layers are narrow; the gradient with respect to the data is not computed."""
    narrow, learner = curve(precision)
    wide, _ = curve("float32")
    np.testing.assert_allclose(wide, TORCH["mixed"]["float32"], 1e-4)
    np.testing.assert_allclose(narrow, TORCH["mixed"][precision], error)
    np.testing.assert_allclose(narrow, wide, error)
    assert narrow != wide and narrow[-1] < 0.6 * narrow[0]
    assert {learner.state()[name].dtype for name in learner.parameters} == {np.dtype(np.float32)}
    products = [line for line in learner.explain().splitlines() if "FusedMatMul" in line]
    assert len(products) == 8 and all(f"gemm {precision}" in line for line in products)
    assert "FALLBACK" not in learner.explain()


def test_odd_numbers_of_rows_train_too() -> None:
    """A product over an odd number of rows cannot use pairs, and stays float32."""
    learner = step(model(), losses.CrossEntropy(), optimizers.SGD(0.1), precision="bfloat16", threads=1)
    for rows in (1, 33):
        learner.run({name: array[:rows] for name, array in batch(0).items()})
    assert "FALLBACK" not in learner.explain() and "gemm bfloat16" in learner.explain()


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="precision 'float8' is not supported"):
        step(model(), losses.CrossEntropy(), optimizers.SGD(0.1), precision="float8")  # type: ignore[arg-type]
