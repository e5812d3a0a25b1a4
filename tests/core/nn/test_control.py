"""Choices and loops by data, eagerly and as graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.errors import ModelError
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers

POSITIVE, NEGATIVE = np.array([1.0, 2.0], np.float32), np.array([-3.0, 1.0], np.float32)


class Choosing(nn.Module):
    """One layer or another, by the sign of the sum; both see a tensor from around them."""

    def __init__(self) -> None:
        self.up, self.down_reason = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: nn.Tensor) -> Any:
        shift = x.mean()
        return nn.cond(x.sum() > 0, lambda y: self.up(y) + shift, lambda y: self.down_reason(y) - shift, (x,))


def halved(x: nn.Tensor) -> Any:
    """x, halved until the sum of squares is at most 1, and the number of halvings."""
    zero = nn.tensor(np.float32(0))
    return nn.while_loop(lambda y, _: (y * y).sum() > 1, lambda y, n: (y * 0.5, n + 1), (x, zero))


@pytest.mark.parametrize("x", [POSITIVE, NEGATIVE], ids=["positive", "negative"])
def test_a_choice(x: Any) -> None:
    model = Choosing()
    layer, sign = (model.up, 1) if x.sum() > 0 else (model.down_reason, -1)
    expected = x @ layer.weight.data.T + layer.bias.data + sign * x.mean()
    np.testing.assert_allclose(model(x).numpy(), expected, 1e-5, 1e-6)
    graph = nn.trace(model, {"x": "float32[2]"}, ["y"])
    for run in (lathe.interpret(graph, {"x": x}), lathe.compile(graph, threads=1).run({"x": x})):
        np.testing.assert_allclose(run["y"], expected, 1e-5, 1e-6)


@pytest.mark.parametrize("x", [POSITIVE, NEGATIVE, np.zeros(2, np.float32)], ids=["positive", "negative", "zero"])
def test_a_loop_and_its_gradient(x: Any) -> None:
    count = 0
    while (x * 0.5**count) @ (x * 0.5**count) > 1:
        count += 1
    y, number = halved(nn.tensor(x))
    np.testing.assert_array_equal(y.numpy(), x * 0.5**count)
    assert number.item() == count
    graph = nn.trace(halved, {"x": "float32[2]"}, ["y", "number"])
    found = lathe.compile(graph, threads=1).run({"x": x})
    np.testing.assert_array_equal(found["y"], x * 0.5**count)
    assert found["number"] == count
    back = lathe.interpret(lathe.gradients(graph, of="y", with_respect_to=["x"]), {"x": x})
    np.testing.assert_allclose(back["x.gradient"], np.full(2, 0.5**count), 1e-6)


def test_only_the_selected_branch_learns() -> None:
    model = Choosing()
    graph = nn.trace(model, {"x": "float32[2]"})
    learner = step(graph, losses.MeanSquaredError(), optimizers.SGD(0.1), threads=1)
    learner.run({"x": POSITIVE, "target": np.zeros(3, np.float32)})
    moved = {name for name, array in model.state_dict().items() if not np.array_equal(learner.parameters[name], array)}
    assert moved == {"up.weight", "up.bias"}


def test_branches_and_bodies_must_agree_in_types() -> None:
    with pytest.raises(ModelError, match="the branches return 1 and 2 tensors"):
        nn.trace(lambda x: nn.cond(x.sum() > 0, lambda: x, lambda: (x, x)), {"x": "float32[2]"})
    with pytest.raises(ModelError, match="the body returns 2 tensors, expected 1"):
        nn.trace(lambda x: nn.while_loop(lambda y: y.sum() > 0, lambda y: (y, y), (x,)), {"x": "float32[2]"})
