"""`trace`: from Python to a graph, by running `forward` once on tensors that have types but no elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.errors import ModelError
from core.ir.graph import Graph, Value
from core.ir.types import TensorType, ValueType, parse_type
from core.ir.verify import verify
from core.nn.mode import Tracing, entered
from core.nn.module import Module
from core.nn.tensor import Tensor


def trace(
    module: Callable[..., Any], inputs: Mapping[str, TensorType | str], outputs: Sequence[str] = (), name: str = ""
) -> Graph:
    """The graph of a module, or of any function of tensors.

    `inputs` go to `forward` in their order, under their names; types may be text, `float32[n,1,28,28]`, in which names
    are dimensions that a run decides, the batch size first of all. What `forward` returns, one tensor, several or a
    dictionary, becomes the outputs: `outputs` names them, by default `output`, or `output_0` and so on. Parameters
    become constants named by their paths, which `core.train.step` trains. TraceError for code that asks for numbers
    that only a run has; ModelError, naming the module, for shapes that do not fit.
    """
    graph = Graph(name or _name(module))
    states = module.named_state() if isinstance(module, Module) else ()
    mode = Tracing(graph, {parameter: path for path, parameter in states})
    with entered(mode):
        arguments = [Tensor(mode.writer.input(label, _type(given)).value) for label, given in inputs.items()]
        results = _named(module(*arguments), outputs)
        for label, result in results.items():
            graph.outputs.append(_output(mode, result.value, label))
    graph.remove_dead()
    verify(graph, "tracing")
    return graph


def _name(module: Callable[..., Any]) -> str:
    return type(module).__name__.lower() if isinstance(module, Module) else getattr(module, "__name__", "graph")


def _type(given: TensorType | str) -> TensorType:
    type_: ValueType = parse_type(given) if isinstance(given, str) else given
    if not isinstance(type_, TensorType):
        raise ModelError(f"is {type_}, expected the type of a tensor", where="trace")
    return type_


def _named(results: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """The outputs by name. ModelError for what is no tensor, or when their number is not that of the names."""
    if isinstance(results, Mapping) and not names:
        return {name: _tensor(each, name) for name, each in results.items()}
    several = list(results.values()) if isinstance(results, Mapping) else results
    several = [several] if isinstance(several, Tensor) else list(several)
    default = ["output"] if len(several) == 1 else [f"output_{i}" for i in range(len(several))]
    labels = list(names) or default
    if len(labels) != len(several):
        raise ModelError(f"has {len(several)} outputs, expected {len(labels)}: {', '.join(labels)}", where="trace")
    return {label: _tensor(each, label) for label, each in zip(labels, several, strict=True)}


def _tensor(result: Any, name: str) -> Tensor:
    if not isinstance(result, Tensor):
        raise ModelError(f"is {type(result).__name__}, expected a tensor", where=f"output '{name}'")
    return result


def _output(mode: Tracing, value: Value, name: str) -> Value:
    """A value under the name of an output; a copy where it has a name already."""
    graph = mode.writer.graph
    if value.producer is None or value in graph.outputs:
        (value,) = mode.writer.emit("Identity", [value])
    value.name = mode.writer.fresh(name)
    return value
