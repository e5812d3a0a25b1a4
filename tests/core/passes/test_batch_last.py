"""A training step with batch-last images computes the same, and transposes only at the borders."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.graph import Graph
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.layout.batch_last import BatchLast
from lathe.core.passes.pipeline import optimize
from lathe.core.reference import interpret
from lathe.core.train.training_step import losses, optimizers
from lathe.core.train.training_step.step_graph import StepSettings, is_weight, training_step_graph
from tests.core.train.models import batch, convolutional

SETTINGS = StepSettings(losses.CrossEntropy(), optimizers.SGD(0.1))


def learning(rows: int) -> Graph:
    """A training step of `rows` rows, whose outputs are the loss and all new states."""
    step = training_step_graph(convolutional(), SETTINGS, is_weight, updates=True, keep_outputs=False)
    bound = step.clone({"n": rows})
    infer_graph(bound)
    bound.outputs += [state.update for state in bound.states]
    return bound


@pytest.mark.parametrize("rows", [1, 13])
def test_batch_last_gives_the_same_results(rows: int) -> None:
    before = learning(rows)
    after = before.clone()
    assert BatchLast().run(after).changed > 0
    verify(after)
    feeds = {**batch(convolutional(), rows), "optimizer.rate": np.float32(0.1)}
    pairs = zip(interpret(before, feeds).values(), interpret(after, feeds).values(), strict=True)
    for expected, found in pairs:
        np.testing.assert_allclose(found, expected, 1e-4, 1e-5)
    assert BatchLast().run(after).changed == 0, "running again changes nothing"


def test_transposes_stay_at_the_borders() -> None:
    optimized, _ = optimize(learning(16))
    moved = [node for node in optimized.nodes if node.op == "Transpose"]
    assert len(moved) <= 2, [str(node.output) for node in moved]
    layouts = {node.attrs["layout"] for node in optimized.nodes if "layout" in node.attrs}
    assert layouts == {"CHWN"}
