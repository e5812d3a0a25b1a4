"""Every layer against PyTorch's: the same parameters, results and gradients (torch_layers.npz)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import lathe
from lathe import nn
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from tests.core.nn.layers import LAYERS, Layer

TORCH = np.load(Path(__file__).parent / "torch_layers.npz")
BY_NAME = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)


class Wrapped(nn.Module):
    """The layer, with its named inputs given by name; all results as a flat tuple."""

    def __init__(self, layer: Layer) -> None:
        self.layer = getattr(nn, layer.kind)(**layer.settings)
        self.named = list(layer.named)
        shapes = {name: each.data.shape for name, each in self.layer.named_state()}
        self.layer.load_state_dict({name: layer.weight(name, shape) for name, shape in shapes.items()})

    def forward(self, *inputs: nn.Tensor) -> tuple[nn.Tensor, ...]:
        positional = inputs[: len(inputs) - len(self.named)]
        named = dict(zip(self.named, inputs[len(positional) :], strict=True))
        return tuple(flat(self.layer(*positional, **named)))


def flat(results: Any) -> Iterator[nn.Tensor]:
    if isinstance(results, nn.Tensor):
        yield results
    elif results is not None:
        for each in results:
            yield from flat(each)


def expected(layer: Layer, key: str) -> Any:
    return TORCH[f"{layer.name}/{key}"]


def traced(layer: Layer) -> Graph:
    feeds = layer.feeds()
    types = {name: TensorType(DType.from_numpy(array.dtype), array.shape) for name, array in feeds.items()}
    return nn.trace(Wrapped(layer).eval(), types)


def results(layer: Layer, outputs: dict[str, Any]) -> None:
    for i, found in enumerate(outputs.values()):
        np.testing.assert_allclose(found, expected(layer, f"output {i}"), 1e-4, 2e-6)


def test_every_result_is_used() -> None:
    assert {key.rsplit("/", 1)[0] for key in TORCH} == {layer.name for layer in LAYERS}


@BY_NAME
def test_parameters_have_pytorchs_names(layer: Layer) -> None:
    assert list(getattr(nn, layer.kind)(**layer.settings).state_dict()) == list(expected(layer, "names"))


@BY_NAME
def test_results_eagerly_and_traced(layer: Layer) -> None:
    eager = Wrapped(layer).eval()(*layer.feeds().values())
    results(layer, {str(i): each.numpy() for i, each in enumerate(eager)})
    results(layer, lathe.interpret(traced(layer), layer.feeds()))


@BY_NAME
def test_gradients(layer: Layer) -> None:
    graph = traced(layer)
    weights = graph.add_constant(layer.weight("weigh", graph.outputs[0].tensor.evaluate({})), "weigh")
    (first,) = lathe.core.ir.build.Builder(graph).emit("Mul", graph.outputs[0], weights)
    graph.outputs = [first]
    of_torch = [key for key in TORCH if key.startswith(f"{layer.name}/gradient ")]
    names = [key.rsplit("gradient ", 1)[1] for key in of_torch]
    if not names:
        assert layer.kind == "Embedding"
        return
    back = lathe.gradients(graph, of=first.name, with_respect_to=names)
    found = lathe.interpret(back, layer.feeds())
    for name in names:
        want = expected(layer, f"gradient {name}")
        np.testing.assert_allclose(found[f"{name}.gradient"], want, 1e-3, 1e-5, err_msg=name)


@BY_NAME
def test_results_as_exported(layer: Layer) -> None:
    data = lathe.export(traced(layer))
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    given = {each.name for each in session.get_inputs()}
    feeds = {name: array for name, array in layer.feeds().items() if name in given}
    results(layer, dict(enumerate(session.run(None, feeds))))


@pytest.mark.sample(3)
@BY_NAME
def test_results_compiled(layer: Layer) -> None:
    results(layer, lathe.compile(traced(layer), threads=1).run(layer.feeds()))
