"""Loss scaling: PyTorch's arithmetic, updates that overflow are skipped, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.train import TrainStep, step
from lathe.core.train.training_step import losses, optimizers
from lathe.core.train.training_step.loss_scaling import LossScaling
from lathe.core.train.training_step.step_graph import Clip
from tests.core.train.mixed import SCALING, scaled_gradients, scaled_start
from tests.core.train.models import batch, convolutional, perceptron, weight

F32 = DType.FLOAT32
MSE, SGD = losses.MeanSquaredError(), optimizers.SGD(0.1)
TORCH: dict[str, Any] = json.loads((Path(__file__).parent / "torch_results.json").read_text())["scaling"]


@dataclass(frozen=True)
class Total:
    """A loss: the sum of all outputs, times the target."""

    def target(self, output: TensorType) -> TensorType:
        return TensorType(F32, ())

    def __call__(self, output: Term, target: Term) -> Term:
        return output.sum(keepdims=False) * target


@dataclass(frozen=True)
class Weighed(losses.MeanSquaredError):
    """A loss: `size` times the mean squared error."""

    size: float = 1.0

    def __call__(self, output: Term, target: Term) -> Term:
        return super().__call__(output, target) * self.size


def factors(start: Array) -> Graph:
    """The graph y = x * w, in which the input is the gradient of w."""
    graph = Graph("factors")
    writer = Writer(graph)
    x = writer.input("x", TensorType(F32, (symbol("n"), start.size)))
    graph.outputs = [(x * writer.array(start, name="w")).value]
    return graph


def layers(width: int = 8) -> Graph:
    """Two layers of this width."""
    graph = Graph("layers")
    writer = Writer(graph)
    x = writer.input("x", TensorType(F32, (symbol("n"), width)))
    hidden = (x @ weight(writer, "a", width, width)).op("Tanh")
    graph.outputs = [(hidden @ weight(writer, "b", width, width)).value]
    return graph


def rows(seed: int, size: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    x, target = rng.normal(0, 1, (2, 64, 8)).astype(np.float32)
    return {"x": x, "target": (target * size).astype(np.float32)}


def learner(model: Graph, loss: Any = MSE, optimizer: Any = SGD, **options: Any) -> TrainStep:
    return step(model, loss, optimizer, precision="float16", threads=1, **options)


def equal(found: dict[str, Array], expected: dict[str, Array]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("SGD momentum", optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01)),
        ("AdamW", optimizers.AdamW(0.02, weight_decay=0.05)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_factors_and_parameters_are_those_of_pytorch(name: str, optimizer: Any, device: str) -> None:
    """Adam counts the updates that were made, not the skipped ones."""
    scaling = LossScaling(SCALING["init_scale"], interval=int(SCALING["growth_interval"]))
    one = learner(factors(scaled_start()), Total(), optimizer, scaling=scaling, device=device)
    for gradient, (scale, *parameters) in zip(scaled_gradients(), TORCH[name], strict=True):
        one.run({"x": gradient[None], "target": np.float32(1)})
        assert one.loss_scale == scale
        np.testing.assert_allclose(one.parameters["w"], parameters, 1e-5, 1e-6)
    assert (one.skipped, one.updates) == (3, 16)
    one.close()


def test_an_overflow_changes_no_state() -> None:
    """Gradients overflow float16 until the loss scale has become small enough."""
    one = learner(layers(), optimizer=optimizers.Adam(0.1), average=0.9)
    before, given = one.state(), rows(0, 1e5)
    scales = []
    while not scales or one.skipped == len(scales):
        assert np.isfinite(one.run(given)["loss"])
        scales.append(one.loss_scale)
        if one.skipped == len(scales):
            assert equal({name: one.state()[name] for name in before if "scale" not in name},
                         {name: array for name, array in before.items() if "scale" not in name})  # fmt: skip
    assert len(scales) > 3 and scales[:-1] == [65536 / 2**i for i in range(1, len(scales))]
    exact = step(layers(), losses.MeanSquaredError(), optimizers.Adam(0.1), threads=1)
    exact.run(given)
    for name, array in exact.parameters.items():
        np.testing.assert_allclose(one.parameters[name], array, atol=2e-3, err_msg=name)  # updates are 0.1


def test_running_statistics_skip_overflows() -> None:
    model = convolutional()
    one = learner(model, losses.CrossEntropy())
    given, before = batch(model, 6), one.state()
    given["x"][0, 0, 0, 0] = np.inf
    one.run(given)
    assert one.skipped == 1 and all(np.array_equal(one.state()[name], before[name]) for name in ("mean", "variance"))
    one.run(batch(model, 6))
    assert one.skipped == 1 and not np.array_equal(one.state()["mean"], before["mean"])


@pytest.mark.parametrize("size", [1.0, 2.0**-20])
def test_gradients_agree_with_central_differences(size: float) -> None:
    """Also tiny ones, which without the factor are zeros in float16."""
    given, error = rows(1), {}
    for scale in (65536.0, 1.0):
        one = learner(layers(), Weighed(size), optimizers.SGD(1 / size), scaling=LossScaling(scale))
        before = {name: array.astype(np.float64) for name, array in one.parameters.items()}
        one.run(given)
        moved = {name: array - one.parameters[name] for name, array in before.items()}
        slopes = {name: central_differences(before, name, given) for name in before}
        error[scale] = max(np.abs(moved[name] - slopes[name]).max() / np.abs(slopes[name]).max() for name in before)
    assert error[65536.0] < 5e-3
    assert bool(error[1.0] > 0.9) is (size < 1)


def central_differences(weights: dict[str, Array], name: str, given: dict[str, Array]) -> Array:
    """The central differences of the mean squared error of `layers` with respect to a weight, in float64."""

    def loss() -> float:
        return float(np.mean((np.tanh(given["x"] @ weights["a"]) @ weights["b"] - given["target"]) ** 2))

    found, array = np.empty_like(weights[name]), weights[name]
    for index, value in np.ndenumerate(array):
        sides = []
        for array[index] in (value + 1e-5, value - 1e-5):
            sides.append(loss())
        array[index] = value
        found[index] = (sides[0] - sides[1]) / 2e-5
    return found


def test_resuming_from_a_state_gives_the_same_bits() -> None:
    def made() -> TrainStep:
        scaling = LossScaling(2.0**24, interval=3)
        return learner(layers(), optimizer=optimizers.AdamW(0.01), scaling=scaling, average=0.9)

    whole, first, second = made(), made(), made()
    for seed in range(16):
        whole.run(rows(seed))
    for seed in range(9):
        first.run(rows(seed))
    second.load_state(first.state(), first.runs)
    assert (second.loss_scale, second.skipped) == (first.loss_scale, first.skipped)
    for seed in range(9, 16):
        second.run(rows(seed))
    assert 0 < second.skipped == whole.skipped and second.loss_scale == whole.loss_scale
    assert equal(second.state(), whole.state())


def test_accumulated_gradients_are_skipped_together() -> None:
    """One run of three overflows: the update is skipped, its sum forgotten."""
    one = learner(factors(scaled_start()), Total(), optimizers.SGD(1.0), accumulate=3)

    def run(*gradients: float) -> None:
        for gradient in gradients:
            one.run({"x": np.full((1, 4), gradient, np.float32), "target": np.float32(1)})

    run(1, np.inf, 1)
    assert (one.skipped, one.loss_scale) == (1, 32768) and np.array_equal(one.parameters["w"], scaled_start())
    run(1, 2, 3)
    np.testing.assert_allclose(one.parameters["w"], scaled_start() - 2, 1e-6)
    assert one.skipped == 1


def test_clipping_uses_unscaled_gradients() -> None:
    one = learner(factors(np.zeros(4, np.float32)), Total(), optimizers.SGD(1.0), clip=Clip(norm=1.0))
    one.run({"x": np.full((1, 4), 3, np.float32), "target": np.float32(1)})
    np.testing.assert_allclose(one.parameters["w"], -0.5, 1e-5)


def test_a_device_skips_as_the_cpu_does() -> None:
    given, found = [rows(seed, size) for seed, size in enumerate((1, 1e5, 1, 1e5, 1))], []
    for device in ("cpu", "simulated"):
        one = learner(layers(), optimizer=optimizers.Adam(0.01), device=device)
        for each in given:
            one.run(each)
        found.append((one.skipped, one.loss_scale, one.parameters))
        one.close()
    assert found[0][:2] == found[1][:2] and found[0][0] == 2
    for name, array in found[0][2].items():
        np.testing.assert_allclose(found[1][2][name], array, atol=2e-3, err_msg=name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LossScaling(0.0),
        lambda: LossScaling(growth=1.0),
        lambda: LossScaling(backoff=1.5),
        lambda: LossScaling(interval=0),
    ],
)
def test_invalid_scale_factors_are_refused(make: Callable[[], LossScaling]) -> None:
    with pytest.raises(ValueError, match="expected initial > 0, growth > 1"):
        make()


def test_other_precisions_have_no_loss_scale() -> None:
    one = step(perceptron(), losses.CrossEntropy(), optimizers.SGD(0.1), threads=1)
    one.run(batch(perceptron(), 3))
    assert (one.loss_scale, one.skipped) == (1.0, 0) and not any("scale" in name for name in one.state())
