"""Training on a device: losses and parameters agree with the CPU, and state stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from lathe.core.errors import FeedError, LatheError, SessionClosed, UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Writer
from lathe.core.runtime.device.devices import open_device
from lathe.core.train import TrainStep, step
from lathe.core.train.data.dataset import Column
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.training_step import losses, optimizers, schedules
from lathe.core.train.training_step.live_model import LiveModel
from lathe.core.train.training_step.optimizers import Optimizer
from lathe.core.train.training_step.state_store import DeviceStateStore
from lathe.core.train.training_step.step_graph import Clip
from lathe.core.train.zoo import architecture
from lathe.core.train.zoo.lenet import LeNet5
from tests.core.train.models import batch, convolutional, perceptron, weight
from tests.core.train.small_trainings import asked, final_state, fit, quadrants

ON = "simulated"
SGD, ADAM = optimizers.SGD(0.05, momentum=0.9), optimizers.Adam(0.01, weight_decay=0.01)

Make: TypeAlias = Callable[..., TrainStep]


@pytest.fixture
def made() -> Iterator[Make]:
    """Creates steps, and frees their device memory afterwards."""
    steps: list[TrainStep] = []

    def make(model: Graph, optimizer: Optimizer, **options: Any) -> TrainStep:
        steps.append(step(model, losses.CrossEntropy(), optimizer, threads=1, **options))
        return steps[-1]

    yield make
    for each in steps:
        each.close()


def lenet() -> Graph:
    settings = LeNet5(architecture="lenet5", channels=(3, 4), hidden=(8,))
    return architecture(settings, {"x": Column("x", DType.FLOAT32, (1, 12, 12), "CHW")}, 3)


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, 1e-4, 1e-5 * max(np.abs(array).max(), 1e-3), err_msg=name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("model", [perceptron, lenet], ids=lambda model: model.__name__)
def test_a_step_on_a_device_agrees_with_the_cpu(made: Make, model: Callable[[], Graph], optimizer: Optimizer) -> None:
    graph = model()
    here, there = made(graph, optimizer), made(graph, optimizer, device=ON)
    for number, rows in enumerate((9, 9, 4, 9)):  # as an epoch ends; graphs are captured for the second of a size
        feeds = batch(graph, rows, seed=number)
        np.testing.assert_allclose(there.run(feeds)["loss"], here.run(feeds)["loss"], 1e-5)
        same(there.state(), here.state())
    first = {value.name: array for value, array in graph.constants.items()}
    assert all(not np.array_equal(array, first[name]) for name, array in there.parameters.items())


@pytest.mark.slow
def test_a_device_supports_all_features_of_a_step(made: Make) -> None:
    """Running statistics, several runs to an update, clipping, averages, a schedule, and outputs."""
    graph = convolutional()
    options: dict[str, Any] = {
        "schedule": schedules.OneCycle(0.05, 3),
        "accumulate": 2,
        "average": 0.9,
        "clip": Clip(norm=0.5),
        "keep_outputs": True,
    }
    here, there = made(graph, SGD, **options), made(graph, SGD, device=ON, **options)
    for number in range(5):
        feeds = batch(graph, 7, seed=number)
        same(there.run(feeds), here.run(feeds))
    assert there.updates == 2
    same(there.state(), here.state())
    same(there.weights(averaged=True), here.weights(averaged=True))


def test_dropout_masks_are_the_same(made: Make) -> None:
    settings = LeNet5(architecture="lenet5", channels=(3, 4), hidden=(8,), dropout=0.5)
    graph = architecture(settings, {"x": Column("x", DType.FLOAT32, (1, 12, 12), "CHW")}, 3)
    here, there = made(graph, SGD, seed=7), made(graph, SGD, seed=7, device=ON)
    for number in range(2):
        feeds = batch(graph, 9, seed=number)
        same(there.run(feeds), here.run(feeds))
    same(there.state(), here.state())


def test_states_are_updated_in_place_and_stay_on_the_device(made: Make) -> None:
    """Another batch size, the other graph of accumulated gradients, and evaluation use the same copy of the states."""
    graph, device = perceptron(), open_device(ON)
    learner = made(graph, ADAM, device=ON, accumulate=2, average=0.9)
    for number, rows in enumerate((8, 8, 3, 3)):
        learner.run(batch(graph, rows, seed=number))
    LiveModel(learner, averaged=True).run(batch(graph, 8))
    assert isinstance(learner._states, DeviceStateStore)
    *steps, evaluation = learner._states._executables
    assert len(steps) == 4 and {part.device for part in steps} == {device}
    assert {part.state_block("w1").address for part in steps} == {steps[0].state_block("w1").address}
    assert evaluation.state_block("w1").address == steps[1].state_block("w1.average").address
    for plan in (part.plan for part in steps):
        copied = {base for _, base in plan.copies}
        assert all("gradient_sum" in port.name for port in plan.states if port.base in copied), "zeros alone are copied"


def test_another_batch_size_never_copies_the_states(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No allocation is as large as the largest parameter."""
    graph, space = perceptron(), open_device(ON).space  # type: ignore[attr-defined]
    learner = made(graph, ADAM, device=ON)
    learner.run(batch(graph, 8))
    largest = max(array.nbytes for array in learner.state().values())
    asked_for: list[int] = []
    allocate = space.allocate
    monkeypatch.setattr(space, "allocate", lambda nbytes: (asked_for.append(nbytes), allocate(nbytes))[1])
    learner.run(batch(graph, 1))
    assert asked_for and largest not in asked_for


def test_closing_frees_all_memory(made: Make) -> None:
    graph, device = perceptron(), open_device(ON)
    before = device.memory().free
    learner = made(graph, ADAM, device=ON)
    for rows in (8, 3):
        learner.run(batch(graph, rows))
    assert device.memory().free < before
    learner.close()
    assert device.memory().free == before
    for use in (lambda: learner.run(batch(graph, 8)), lambda: learner.run(batch(graph, 5)), learner.state):
        with pytest.raises(SessionClosed):
            use()


@pytest.mark.parametrize("averaged", [False, True])
def test_an_evaluation_follows_the_weights_on_the_device(made: Make, averaged: bool) -> None:
    graph = convolutional()
    here, there = made(graph, SGD, average=0.9), made(graph, SGD, device=ON, average=0.9)
    judges = LiveModel(here, averaged), LiveModel(there, averaged)
    for number in range(3):
        feeds = batch(graph, 6, seed=number)
        same(judges[1].run(feeds), judges[0].run(feeds))
        here.run(feeds)
        there.run(feeds)
    same(judges[1].weights, judges[0].weights)


def test_a_checkpoint_resumes_on_another_device(made: Make) -> None:
    """Before the first run there, and after some."""
    graph = perceptron()
    here, there, fresh = made(graph, ADAM), made(graph, ADAM, device=ON), made(graph, ADAM, device=ON)
    for number in range(2):
        here.run(batch(graph, 8, seed=number))
    there.run(batch(graph, 8, seed=9))
    for learner in (there, fresh):
        learner.load_state(here.state(), here.runs)
        same(learner.state(), here.state())
    here.run(batch(graph, 8, seed=2))
    for learner in (there, fresh):
        learner.run(batch(graph, 8, seed=2))
        same(learner.state(), here.state())


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", [None, 5])
def test_a_recipe_trains_and_resumes_on_a_device(tmp_path: Path, steps: int | None) -> None:
    """Results agree with the CPU, also after a stop in between; all memory is freed."""
    data, before = quadrants(tmp_path / "points.npz"), open_device(ON).memory().free
    left = iter(range(steps or 0))
    here = fit(tmp_path / "here", asked(epochs=2), data)
    there = asked(epochs=2, device=ON)
    assert here.run() is Outcome.DONE
    if steps is not None:
        stopped = fit(tmp_path / "there", there, data, stop=lambda: next(left, None) is None)
        assert stopped.run() is Outcome.STOPPED
    assert fit(tmp_path / "there", there, data).run() is Outcome.DONE
    assert open_device(ON).memory().free == before
    same(final_state(tmp_path / "there"), final_state(tmp_path / "here"))


def test_a_recipe_with_an_unknown_device_is_refused() -> None:
    with pytest.raises(RecipeError, match="device"):
        asked(device="tpu")
    with pytest.raises(RecipeError, match="`memory` bounds steps on the CPU only, got `device` cuda:1"):
        asked(device="cuda:1", memory=1 << 20)


def test_bfloat16_products_on_a_device(made: Make) -> None:
    graph = perceptron(features=8)
    wide, narrow = made(graph, SGD), made(graph, SGD, device=ON, precision="bfloat16")
    curves = [[float(learner.run(batch(graph, 16, seed=i))["loss"]) for i in range(6)] for learner in (wide, narrow)]
    np.testing.assert_allclose(curves[1], curves[0], 0.05)
    assert curves[1] != curves[0]
    assert {array.dtype for array in narrow.state().values()} == {np.dtype(np.float32)}


def embedded() -> Graph:
    graph = Graph("embedded")
    writer = Writer(graph)
    x = writer.input("x", TensorType(DType.INT64, (symbol("n"),)))
    graph.outputs = [weight(writer, "table", 5, 3).op("Gather", x).value]
    return graph


def test_after_a_failed_run_the_state_must_be_loaded(made: Make) -> None:
    graph, target = embedded(), np.zeros(2, np.int64)
    learner = made(graph, SGD, device=ON)
    learner.run({"x": np.array([1, 4]), "target": target})
    saved = learner.state()
    with pytest.raises(FeedError):
        learner.run({"x": np.array([1, 5]), "target": target})
    for use in (lambda: learner.run({"x": np.array([1, 4]), "target": target}), learner.state, learner.graph):
        with pytest.raises(LatheError, match="a failed run on simulated:0 may have changed the state"):
            use()
    learner.load_state(saved, 1)
    learner.run({"x": np.array([1, 4]), "target": target})
    assert learner.runs == 2


def test_a_batch_that_does_not_fit_changes_no_state(made: Make) -> None:
    learner, feeds = made(perceptron(), SGD, device=ON), batch(perceptron(), 4)
    learner.run(feeds)
    before = learner.state()
    with pytest.raises(FeedError, match="input 'target' is missing"):
        learner.run({"x": feeds["x"]})
    same(learner.state(), before)


def test_a_model_that_the_device_lacks_kernels_for_is_refused(made: Make) -> None:
    """The refused model leaves no memory allocated on the device."""
    graph = Graph("sums")
    writer = Writer(graph)
    x = writer.input("x", TensorType(DType.FLOAT32, (symbol("n"), 5)))
    graph.outputs = [x.op("CumProd", writer.array(np.array(1))).op("MatMul", weight(writer, "w", 5, 3)).value]
    learner, before = made(graph, SGD, device=ON), open_device(ON).memory().free
    message = r"runs on one device only, and simulated:0 has no kernel for 'cumprod' \(CumProd\)"
    with pytest.raises(UnsupportedError, match=message):
        learner.run({"x": np.ones((2, 5), np.float32), "target": np.zeros(2, np.int64)})
    assert open_device(ON).memory().free == before


def test_cpu_only_features_are_refused(made: Make) -> None:
    graph = perceptron()
    here, there = made(graph, SGD), made(graph, SGD, device=ON)
    for mine, shared, device in (("cpu", there, "simulated:0"), (ON, here, "simulated:0")):
        with pytest.raises(UnsupportedError, match=f"steps can share arrays on the CPU only, got a step on {device}"):
            made(graph, SGD, device=mine, shares=[shared])
    with pytest.raises(UnsupportedError, match="memory: activations can be recomputed on the CPU only"):
        made(graph, SGD, device=ON, memory=1 << 20)
    with pytest.raises(UnsupportedError, match="device 'abacus' is not supported"):
        made(graph, SGD, device="abacus")
