"""`trace`: turns a module into a graph by running `forward` once on tensors that have types but no elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    `output` for a single tensor, or `output_0`, `output_1` and so on (with a suffix such as `_2` if a parameter or an
    input has that name). Parameters become constants named by their paths, which `lathe.core.train.step` trains.

    TraceError for code that needs the elements of a tensor. ModelError for shapes that do not fit, which names the
    module, for results that are no tensors, if their number differs from that of `outputs`, or if `outputs` or a key of
    the dictionary is the name of an input, of a parameter or of another output.
    """
    graph = Graph(name or _name(module))
    states = module.named_state() if isinstance(module, Module) else ()
    mode = Tracing(graph, {parameter: path for path, parameter in states})
    with use_mode(mode):
        arguments = [Tensor(mode.writer.input(label, _type(type_)).value) for label, type_ in inputs.items()]
        made = module(*arguments)
        results = _named_results(made, outputs)
        is_chosen = bool(outputs) or isinstance(made, Mapping)
        for label, result in results.items():
            value = _output(mode, result.value)
            value.name = _take_name(mode, value, label) if is_chosen else mode.writer.fresh(label)
            graph.outputs.append(value)
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

    ModelError for a result that is not a tensor, or if `names`, when there are any, differ in number or are not unique.
    """
    if isinstance(results, Mapping) and not names:
        return {name: _tensor(each, name) for name, each in results.items()}
    several = list(results.values()) if isinstance(results, Mapping) else results
    several = [several] if isinstance(several, Tensor) else list(several)
    default = ["output"] if len(several) == 1 else [f"output_{i}" for i in range(len(several))]
    labels = list(names) or default
    if len(labels) != len(several):
        raise ModelError(f"has {len(several)} outputs, expected {len(labels)}: {', '.join(labels)}", where="trace")
    if len(set(labels)) < len(labels):
        raise ModelError(f"expected different names, got {', '.join(labels)}", where="outputs of trace")
    return {label: _tensor(each, label) for label, each in zip(labels, several, strict=True)}


def _tensor(result: Any, name: str) -> Tensor:
    if not isinstance(result, Tensor):
        raise ModelError(f"is {type(result).__name__}, expected a tensor", where=f"output '{name}'")
    return result


def _output(mode: Tracing, value: Value) -> Value:
    """The value for a graph output: `value`, or a copy (Identity) of an input, a constant, or another output."""
    if value.producer is None or value in mode.writer.graph.outputs:
        (value,) = mode.writer.emit("Identity", [value])
    return value


def _take_name(mode: Tracing, output: Value, name: str) -> str:
    """`name`, for an output: an intermediate value that has it gets another one. ModelError if it is not free then."""
    graph = mode.writer.graph
    for kind, values in (
        ("an input", graph.inputs),
        ("a parameter or constant", graph.constants),
        ("another output", graph.outputs),
    ):
        if any(value.name == name for value in values):
            raise ModelError(f"expected another name than that of {kind}", where=f"output '{name}'")
    mode.writer.fresh(name)  # nothing that is written later gets it
    for value in _all_values(graph):
        if value.name == name and value is not output:
            value.name = mode.writer.fresh(name)
    return name


def _all_values(graph: Graph) -> Iterator[Value]:
    """Yield the values of a graph and of all bodies in it."""
    yield from graph.values()
    for node in graph.nodes:
        for body in node.subgraphs:
            yield from _all_values(body)
