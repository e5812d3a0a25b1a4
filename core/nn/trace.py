"""`trace`: turns a module into a graph by running `forward` once on tensors that have types but no elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import TensorType, ValueType, parse_type
from lathe.core.ir.verify import verify
from lathe.core.nn.mode import Tracing, use_mode
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor


def trace(
    module: Callable[..., Any], inputs: Mapping[str, TensorType | str], outputs: Sequence[str] = (), name: str = ""
) -> Graph:
    """The graph of a module, or of any function of tensors.

    `inputs` maps names of inputs to types, and is passed to `forward` in its order. A type may be text such as
    `float32[n,1,28,28]`, in which names are symbolic dimensions, usually the batch size. The results of `forward`, a
    tensor, several, or a dictionary, become the outputs. `outputs` names them; defaults are the keys of the dictionary,
    `output` for a single tensor, or `output_0`, `output_1` and so on. Parameters become constants named by their paths,
    which `lathe.core.train.step` trains.

    TraceError for code that needs the elements of a tensor. ModelError for shapes that do not fit, which names the
    module, for results that are no tensors, or if their number differs from that of `outputs`.
    """
    graph = Graph(name or _name(module))
    states = module.named_state() if isinstance(module, Module) else ()
    mode = Tracing(graph, {parameter: path for path, parameter in states})
    with use_mode(mode):
        arguments = [Tensor(mode.writer.input(label, _type(type_)).value) for label, type_ in inputs.items()]
        results = _named_results(module(*arguments), outputs)
        for label, result in results.items():
            graph.outputs.append(_output(mode, result.value, label))
    graph.remove_dead()
    verify(graph, "tracing")
    return graph


def _name(module: Callable[..., Any]) -> str:
    return type(module).__name__.lower() if isinstance(module, Module) else getattr(module, "__name__", "graph")


def _type(declared: TensorType | str) -> TensorType:
    type_: ValueType = parse_type(declared) if isinstance(declared, str) else declared
    if not isinstance(type_, TensorType):
        raise ModelError(f"is {type_}, expected the type of a tensor", where="trace")
    return type_


def _named_results(results: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """The results of `forward` by output name, as `trace` names them.

    ModelError for a result that is not a tensor, or if the number of `names`, when there are any, differs.
    """
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
    """The value for a graph output, renamed to `name`; a copy (Identity) of an input, a constant, or another output."""
    graph = mode.writer.graph
    if value.producer is None or value in graph.outputs:
        (value,) = mode.writer.emit("Identity", [value])
    value.name = mode.writer.fresh(name)
    return value
