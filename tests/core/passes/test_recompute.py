"""Recomputation (checkpointing of activations): less memory, the same numbers; random nodes run once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ir.verify import verify
from lathe.core.passes.lowering.recompute import Recompute
from lathe.core.reference import interpret
from lathe.core.train import TrainStep, step
from lathe.core.train.training_step import losses, optimizers
from tests.core.train.models import batch, convolutional

F32 = DType.FLOAT32
ROW = 4000  # bytes of a value in `chain`


def chain(length: int, op: str = "Exp") -> Graph:
    """x -> op -> ... -> op, then sums over all values from the last to the first: all are live after the last op."""
    b = Builder(Graph("chain"))
    values = [b.input("x", TensorType(F32, (ROW // 4,)))]
    for _ in range(length):
        values.append(b(op, values[-1]))
    total = values[-1]
    for value in reversed(values[1:-1]):
        total = b("Add", b("Sin", total), value)
    b.graph.outputs = [total]
    return b.graph


def least(graph: Graph) -> int:
    """The peak bytes without recomputation: the lowest limit at which the pass drops no value, by bisection."""
    low, high = 0, ROW * 100
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if Recompute(middle).run(graph.clone()).changed == 0 else (middle, high)
    return high


@pytest.mark.parametrize("rows", [4, 6, 9])
def test_a_chain_fits_its_memory_limit(rows: int) -> None:
    graph = chain(16, "Tanh")
    before = least(graph)
    assert before >= 15 * ROW
    changed = graph.clone()
    assert Recompute(rows * ROW).run(changed).changed > 0
    verify(changed, "recompute")
    assert least(changed) <= rows * ROW
    assert len(changed.nodes) < 3 * len(graph.nodes)
    x = {"x": np.linspace(-1, 1, ROW // 4, dtype=np.float32)}
    for expected, found in zip(interpret(graph, x).values(), interpret(changed, x).values(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_enough_memory_changes_nothing() -> None:
    graph = chain(8)
    assert Recompute(ROW * 100).run(graph).changed == 0


@pytest.mark.slow
def test_an_unreachable_limit_is_approached() -> None:
    graph = chain(12)
    Recompute(ROW).run(graph)
    assert least(graph) <= 5 * ROW


def test_random_numbers_are_drawn_once() -> None:
    graph = chain(8)
    for node in graph.nodes[:8]:
        node.op = "RandomUniformLike"
    assert Recompute(ROW).run(graph).changed == 0


def test_states_are_read_before_they_are_written() -> None:
    """y = w * x is needed before and after w's update: computing it again would read the new w."""
    b = Builder(Graph("update"))
    x = b.input("x", TensorType(F32, (ROW // 4,)))
    w = Value("w", TensorType(F32, (ROW // 4,)))
    b.graph.states.append(State(w, w, np.ones(ROW // 4, np.float32)))
    y = b("Mul", x, w)
    used = b("Tanh", b("Exp", b("Exp", y)))
    b.graph.states[0].update = b("Add", w, used)
    late = b("Add", b("Sin", b("Cos", b.graph.states[0].update)), y)
    b.graph.outputs = [late]
    Recompute(ROW).run(b.graph)
    order = {node: position for position, node in enumerate(b.graph.nodes)}
    update = b.graph.states[0].update.producer
    assert update is not None
    assert all(order[node] <= order[update] for node in b.graph.nodes if w in node.inputs)


def trained(memory: int | None, runs: int = 3) -> tuple[TrainStep, dict[str, Any]]:
    learner = step(convolutional(16), losses.CrossEntropy(), optimizers.Adam(0.01), memory=memory, threads=1)
    for i in range(runs):
        learner.run(batch(convolutional(16), 32, seed=i))
    return learner, learner.state()


def arena(learner: TrainStep) -> int:
    (ready,) = learner._executables.values()
    return ready.plan.arena.at(1)


def test_a_step_under_a_memory_limit_gives_the_same_bits() -> None:
    whole, expected = trained(None)
    limit = int(arena(whole) * 0.7)
    tight, found = trained(limit)
    assert arena(tight) <= limit and "recompute" in tight.explain()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_step_that_cannot_fit_its_limit_is_refused() -> None:
    with pytest.raises(ModelError, match="bytes even when values are computed again, 1000 are given"):
        trained(1000, runs=1)
