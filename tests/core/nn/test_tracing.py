"""The same code runs eagerly and traced; code that cannot be traced raises an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
import lathe.nn.functional as F
from lathe import nn
from lathe.core.errors import ModelError, TraceError
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers


class Gate(nn.Module):
    """A module with a child, a parameter of its own, and a constant."""

    def __init__(self) -> None:
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.scale = nn.Parameter(np.full(4, 0.5))
        self.shift = nn.Buffer(np.arange(4.0))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.inner(x) * self.scale + x * self.shift + np.ones(4)


def rows(*shape: int) -> Any:
    return np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)


def test_eager_and_traced_agree() -> None:
    model, x = Gate(), rows(3, 4)
    eager = model(x).numpy()
    graph = nn.trace(model, {"x": "float32[n,4]"}, ["y"])
    np.testing.assert_array_equal(lathe.interpret(graph, {"x": x})["y"], eager)
    np.testing.assert_allclose(lathe.compile(graph).run({"x": x})["y"], eager, 1e-5, 1e-6)


def test_only_parameters_are_trained_and_by_their_names() -> None:
    model = Gate()
    model.inner[0].requires_grad_(False)
    learner = step(nn.trace(model, {"x": "float32[n,4]"}), losses.MeanSquaredError(), optimizers.SGD(0.1), threads=1)
    before = model.state_dict()
    learner.run({"x": rows(5, 4), "target": np.zeros((5, 4), np.float32)})
    trained = {value.name: array for value, array in learner.graph().constants.items()}
    moved = {name for name, array in before.items() if not np.array_equal(trained[name], array)}
    assert moved == {"scale", "inner.2.weight", "inner.2.bias"}
    model.load_state_dict(learner.parameters, strict=False)
    np.testing.assert_array_equal(model.scale.data, trained["scale"])


def test_control_flow_by_data_runs_eagerly_and_is_refused_when_traced() -> None:
    def doubled(x: nn.Tensor) -> nn.Tensor:
        return x * 2 if x.sum() > 0 else x

    assert doubled(nn.tensor(np.ones(2))).numpy().tolist() == [2, 2]
    with pytest.raises(TraceError, match=r"tensor %greater: bool\[\]: Python code needs a truth value, but elements"):
        nn.trace(doubled, {"x": "float32[n]"})


def test_errors_name_the_module_expected_and_given() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 3)))
    message = r"module '1\.1' \(Conv2d\(4, 2, kernel_size=\(3, 3\), stride=\(1, 1\)\)\): expected \[N, 4, H, W\], got "
    with pytest.raises(ModelError, match=message + r"float32\[5,2,6,6\]"):
        model(rows(5, 1, 8, 8))
    with pytest.raises(ModelError, match=message + r"float32\[n,2,6,6\]"):
        nn.trace(model, {"x": "float32[n,1,8,8]"})
    with pytest.raises(ModelError, match=r"module '0' .* window of extent 3 is larger than spatial axis 0 \(2"):
        model(rows(5, 1, 2, 8))


def test_a_graph_keeps_the_weights_that_it_was_traced_with() -> None:
    """Weights that may change are copied; a read-only array, such as a page of a file, is shared."""
    model = nn.Linear(3, 2)
    before = model.weight.data.copy()
    graph = nn.trace(model, {"x": "float32[n,3]"})
    model.weight.data[:] = 0
    constants = {value.name: array for value, array in graph.constants.items()}
    np.testing.assert_array_equal(constants["weight"], before)
    model.weight.data.setflags(write=False)
    shared = nn.trace(model, {"x": "float32[n,3]"})
    assert any(array is model.weight.data for array in shared.constants.values())


class Scaled(nn.Module):
    """A module whose parameter has the default name of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Parameter(np.full(4, 2, np.float32))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x * self.output


def test_outputs_have_the_names_that_the_caller_chose() -> None:
    """An intermediate value with such a name, of a body too, gets another one."""
    traced = nn.trace(lambda x: {"relu": F.relu(x) + 1.0, "add": F.relu(x)}, {"x": "float32[n,4]"})
    assert [value.name for value in traced.outputs] == ["relu", "add"]
    x = np.array([[-1, 0, 1, 2]], np.float32)
    with lathe.compile(traced) as session:
        got = session.run({"x": x})
    np.testing.assert_array_equal(got["relu"], np.maximum(x, 0) + 1)
    np.testing.assert_array_equal(got["add"], np.maximum(x, 0))
    default = nn.trace(Scaled(), {"x": "float32[n,4]"})
    assert ([value.name for value in default.constants], default.outputs[0].name) == (["output"], "output_2")


@pytest.mark.parametrize(
    ("module", "outputs", "message"),
    [
        (Scaled(), ["output"], "output 'output': expected another name than that of a parameter or constant"),
        (Scaled(), ["x"], "output 'x': expected another name than that of an input"),
        (lambda x: {"x": x + 1.0}, [], "output 'x': expected another name than that of an input"),
        (lambda x: (x + 1.0, x), ["y", "y"], "outputs of trace: expected different names, got y, y"),
    ],
)
def test_a_name_that_is_taken_is_refused(module: Any, outputs: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        nn.trace(module, {"x": "float32[n,4]"}, outputs)
