"""The compiled training step against the reference executor, and the contract of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.errors import FeedError, LatheError, ModelError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.terms import Writer
from lathe.core.reference import interpret
from lathe.core.train import TrainStep, step
from lathe.core.train.training_step import losses, optimizers, schedules
from lathe.core.train.training_step.optimizers import Optimizer
from lathe.core.train.training_step.step_graph import Clip, StepSettings, is_weight, training_step_graph
from tests.core.train.models import batch, convolutional, perceptron

CROSS_ENTROPY = losses.CrossEntropy()


def trained(model: Graph, optimizer: Optimizer, **options: Any) -> TrainStep:
    return step(model, CROSS_ENTROPY, optimizer, threads=options.pop("threads", 1), **options)


def reference(model: Graph, optimizer: Optimizer, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """All states after some runs of the reference executor on the training-step graph."""
    graph = training_step_graph(
        model, StepSettings(CROSS_ENTROPY, optimizer), is_weight, updates=True, keep_outputs=False
    )
    names = [state.value.name for state in graph.states]
    graph.outputs = [state.update for state in graph.states]
    for number, feeds in enumerate(batches, start=1):
        scalars = optimizer.scalars(number, optimizer.rate)
        numbers = {f"optimizer.{name}": np.float32(value) for name, value in scalars.items()}
        results = interpret(graph, {**feeds, **numbers})
        for state in graph.states:
            state.initial = results[state.update.name]
    return dict(zip(names, (state.initial for state in graph.states), strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("rows", "threads"), [(3, 1), (19, 2), (70, 1)])
@pytest.mark.parametrize("model", [perceptron, convolutional], ids=lambda model: model.__name__)
def test_a_step_agrees_with_the_reference(model: Any, rows: int, threads: int) -> None:
    graph, optimizer = model(), optimizers.Adam(0.01, weight_decay=0.01)
    batches = [batch(graph, rows, seed=i) for i in range(3)]
    learner = trained(graph, optimizer, threads=threads)
    for feeds in batches:
        learner.run(feeds)
    expected = reference(graph, optimizer, batches)
    found = learner.state()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = np.abs(array).max()
        # Adam divides by the root of a mean square: if that is near 0, rounding errors become errors of a whole step
        np.testing.assert_allclose(found[name], array, 2e-3, 2e-4 * scale, err_msg=name)


def test_the_loss_decreases() -> None:
    graph = convolutional()
    learner = trained(graph, optimizers.Adam(), schedule=schedules.OneCycle(0.02, 60), keep_outputs=True)
    first = learner.run(batch(graph, 32))["loss"]
    for i in range(1, 60):
        results = learner.run(batch(graph, 32, seed=i))
    output = results[graph.outputs[0].name]
    assert results["loss"] < 0.1 * first
    assert (output.argmax(1) == batch(graph, 32, seed=59)["target"]).mean() > 0.95


def test_everything_is_compiled_and_in_place() -> None:
    graph = convolutional()
    learner = trained(graph, optimizers.Adam())
    learner.run(batch(graph, 16))
    assert "FALLBACK" not in learner.explain()
    (ready,) = learner._executables.values()
    assert ready.plan.copies == (), "a state is copied instead of being updated in place"


def test_batch_sizes_share_the_state() -> None:
    graph, optimizer = perceptron(), optimizers.SGD(0.1, momentum=0.9)
    batches = [batch(graph, rows, seed=rows) for rows in (8, 3, 8, 5)]
    learner = trained(graph, optimizer)
    for feeds in batches:
        learner.run(feeds)
    for name, array in reference(graph, optimizer, batches).items():
        np.testing.assert_allclose(learner.state()[name], array, 1e-4, 1e-6, err_msg=name)


def test_accumulated_runs_are_one_update() -> None:
    graph, optimizer = perceptron(), optimizers.SGD(0.1)
    whole = batch(graph, 12)
    halves = [{name: array[part] for name, array in whole.items()} for part in (slice(0, 6), slice(6, 12))]
    once, twice = trained(graph, optimizer), trained(graph, optimizer, accumulate=2)
    once.run(whole)
    twice.run(halves[0])
    assert twice.updates == 0
    np.testing.assert_array_equal(twice.parameters["w1"], graph_constant(graph, "w1"))
    twice.run(halves[1])
    assert twice.updates == 1
    for name, array in once.parameters.items():
        np.testing.assert_allclose(twice.parameters[name], array, 1e-5, 1e-6)
    np.testing.assert_array_equal(twice.state()["w1.gradient_sum"], 0)


def graph_constant(graph: Graph, name: str) -> Any:
    return next(array for value, array in graph.constants.items() if value.name == name)


def test_clipping_bounds_the_step() -> None:
    graph = perceptron()
    before = {value.name: array for value, array in graph.constants.items()}
    free, short = trained(graph, optimizers.SGD(1.0)), trained(graph, optimizers.SGD(1.0), clip=Clip(norm=0.01))
    for learner in (free, short):
        learner.run(batch(graph, 8))
    moves = [np.sqrt(sum(np.sum((p - before[n]) ** 2) for n, p in s.parameters.items())) for s in (free, short)]
    assert moves[0] > 0.1
    np.testing.assert_allclose(moves[1], 0.01, 1e-3)
    tight = trained(graph, optimizers.SGD(1.0), clip=Clip(value=1e-3))
    tight.run(batch(graph, 8))
    assert max(np.abs(p - before[n]).max() for n, p in tight.parameters.items()) <= 1e-3 * (1 + 1e-4)


def test_running_averages() -> None:
    graph = perceptron()
    learner = trained(graph, optimizers.SGD(0.1), average=0.9)
    expected = graph_constant(graph, "w1")
    for i in range(3):
        learner.run(batch(graph, 8, seed=i))
        expected = 0.9 * expected + 0.1 * learner.parameters["w1"]
    np.testing.assert_allclose(graph_constant(learner.graph(averaged=True), "w1"), expected, 1e-5, 1e-6)
    np.testing.assert_array_equal(graph_constant(learner.graph(), "w1"), learner.parameters["w1"])


def test_a_resumed_checkpoint_gives_the_same_bits() -> None:
    graph = convolutional()
    learner = trained(graph, optimizers.NAdam(), schedule=schedules.WarmUp(schedules.Constant(0.01), 3))
    for i in range(3):
        learner.run(batch(graph, 8, seed=i))
    saved, runs = learner.state(), learner.runs
    other = trained(graph, optimizers.NAdam(), schedule=schedules.WarmUp(schedules.Constant(0.01), 3))
    other.load_state(saved, runs)
    for i in range(3, 6):
        learner.run(batch(graph, 8, seed=i))
        other.run(batch(graph, 8, seed=i))
    for name, array in learner.state().items():
        np.testing.assert_array_equal(other.state()[name], array)
    with pytest.raises(LatheError, match=r"state 'w1': expected float32\[7,5\], got nothing"):
        trained(perceptron(), optimizers.Adam()).load_state({}, 0)


def test_only_trainable_parameters_change() -> None:
    graph = perceptron()
    learner = trained(graph, optimizers.SGD(0.1), trainable=lambda name, _: name == "w2")
    learner.run(batch(graph, 8))
    assert learner.parameters.keys() == {"w2"}
    np.testing.assert_array_equal(graph_constant(learner.graph(), "w1"), graph_constant(graph, "w1"))


def test_the_gradient_of_dropout_uses_the_same_mask() -> None:
    graph = Graph("dropout")
    writer = Writer(graph)
    x = writer.input("x", TensorType(DType.FLOAT32, (64, 4)))
    w = writer.array(np.ones((4,), np.float32), name="w")
    graph.outputs = [(x * w).op("Dropout", seed=3).value]
    learner = step(graph, losses.MeanSquaredError(), optimizers.SGD(1.0), threads=1, keep_outputs=True)
    feeds = {"x": np.ones((64, 4), np.float32), "target": np.zeros((64, 4), np.float32)}
    output = learner.run(feeds)[graph.outputs[0].name]
    assert set(np.unique(output)) == {0.0, 2.0}
    np.testing.assert_allclose(learner.parameters["w"], 1 - 2 * (output * 2).sum(0) / output.size, 1e-5)


def test_feeds_are_checked() -> None:
    graph = perceptron()
    learner = trained(graph, optimizers.SGD(0.1))
    feeds = batch(graph, 4)
    for wrong, message in (
        ({"x": feeds["x"]}, "input 'target' is missing; expected int64"),
        ({**feeds, "z": 1}, "unknown input 'z'"),
        ({**feeds, "x": feeds["x"].astype(np.float64)}, "input 'x' has dtype float64, expected float32"),
        ({**feeds, "x": feeds["x"][:, :2]}, r"input 'x' has shape \[4, 2\]"),
        ({**feeds, "target": feeds["target"][:3]}, "dimension n: expected 4 as in 'x', got 3 in 'target'"),
    ):
        with pytest.raises(FeedError, match=message):
            learner.run(wrong)
    assert learner.runs == 0
    np.testing.assert_array_equal(learner.parameters["w1"], graph_constant(graph, "w1"))


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="has no parameters to train"):
        trained(perceptron(), optimizers.SGD(0.1), trainable=lambda name, array: False)
