"""The reference executor: every node through its NumPy reference, in order, with no optimization."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from core.errors import FeedError, ModelError
from core.feeds import check_feeds
from core.ir.dim import SymDim, affine, symbols
from core.ir.graph import Array, Attr, Graph, Node, Value, node_reads
from core.ir.types import TensorType, ValueType
from core.ops import registry
from core.passes.feed_defaults import with_fed


def interpret(graph: Graph, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run `graph` on NumPy arrays by name; returns outputs by name. State starts at its initial value.

    A default may be fed, too. FeedError for a missing, unknown or ill-typed input.
    """
    check_feeds(feeds, [value.name for value in graph.inputs])
    fed = {value.name for value in graph.defaults} & feeds.keys()
    graph = with_fed(graph, fed) if fed else graph
    environment: dict[Value, Any] = {}
    for value in graph.inputs:
        if value.name not in feeds:
            raise FeedError(f"input '{value.name}' is missing; expected {value.type}")
        environment[value] = _checked(value, feeds[value.name])
    for name in feeds.keys() - {value.name for value in graph.inputs}:
        raise FeedError(f"unknown input '{name}'; the model has {', '.join(v.name for v in graph.inputs) or 'none'}")
    environment.update({state.value: state.initial for state in graph.states})
    run_nodes(graph, environment, bind_symbols(graph.inputs, environment))
    return {value.name: environment[value] for value in graph.outputs}


# Runs a node in the place of its reference: arguments, and the sizes that symbols stand for, to the node's outputs.
RunCode: TypeAlias = Callable[[Sequence[Any], Mapping[str, int]], list[Any]]
_NO_CODE: Mapping[Node, RunCode] = {}


def run_nodes(
    graph: Graph,
    environment: dict[Value, Any],
    known: dict[str, int],
    check: Callable[[], object] = bool,
    code: Mapping[Node, RunCode] = _NO_CODE,
) -> None:
    """Execute all nodes of a graph whose inputs are bound in `environment`, binding the values they define, and the
    symbols that their shapes show in `known`. `check` and `code` as in `run_node`."""
    environment.update(graph.constants)
    for node in graph.nodes:
        arguments = [environment[v] if v is not None else None for v in node.inputs]
        if node in code:
            results = code[node](arguments, known)
        else:
            results = run_node(node, arguments, environment, known, check, is_fed(node, graph.constants), code)
        environment.update(zip(node.outputs, results, strict=False))
        learn_symbols(node, results, known)


def is_fed(node: Node, constants: Container[Value]) -> bool:
    """Whether what a node computes may depend on what is fed: on a value that is no constant, or on a size."""
    return any(value not in constants for value in node_reads(node)) or any(map(_has_size, node.attrs.values()))


def _has_size(attr: Attr) -> bool:
    return any(map(_has_size, attr)) if isinstance(attr, tuple) else isinstance(attr, SymDim)


def run_node(
    node: Node,
    inputs: Sequence[Any],
    environment: Mapping[Value, Any],
    known: Mapping[str, int],
    check: Callable[[], object] = bool,
    fed: bool = True,
    code: Mapping[Node, RunCode] = _NO_CODE,
) -> list[Any]:
    """The outputs of one node; `environment` supplies what its bodies capture. `check` is called whenever a body is
    about to run, and by what is open-ended: its error ends the node. `fed`: see `is_fed`. `code` runs some of the nodes
    of its bodies.

    FeedError for data that the node cannot take, such as extents that do not fit each other; ModelError where they are
    all the model's own.
    """

    def run_body(body: Graph, arguments: Sequence[Any]) -> list[Any]:
        check()
        inner = dict(environment)
        inner.update(zip(body.inputs, arguments, strict=True))
        shown = dict(known)  # what a symbol of the body means may change with every iteration
        _learn(body.inputs, arguments, shown)
        run_nodes(body, inner, shown, check, code)
        return [inner[value] for value in body.outputs]

    op = registry.get(node.op)
    try:
        registry.check_shown(op, node, inputs)
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            result = op.reference(registry.Call(op, node, inputs, run_body, known, check, fed), *inputs)
    except (ArithmeticError, IndexError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        message = f"{registry.describe(node)}: {error}"
        raise (FeedError(message) if fed else ModelError(message)) from error
    results = list(result) if isinstance(result, tuple) else [result]
    return [_as_declared(node, value, array) for value, array in zip(node.outputs, results, strict=False)]


def bind_symbols(values: Sequence[Value], environment: Mapping[Value, Any]) -> dict[str, int]:
    """Values of the symbols in the shapes of the given tensors. FeedError when two dimensions disagree."""
    bound: dict[str, int] = {}
    for value in values:
        for name, size in _solutions(value, environment[value]):
            if bound.setdefault(name, size) != size:
                raise FeedError(f"dimension {name} is {bound[name]} in one input and {size} in '{value.name}'")
    return bound


def learn_symbols(node: Node, results: Sequence[Any], known: dict[str, int]) -> None:
    """Note what a node's results say of symbols that no input shows, such as how many elements are not zero."""
    _learn(node.outputs, results, known)


def _learn(values: Sequence[Value], results: Sequence[Any], known: dict[str, int]) -> None:
    for value, result in zip(values, results, strict=False):
        for name, size in _solutions(value, result):
            known.setdefault(name, size)


def shown_by(type_: ValueType) -> frozenset[str]:
    """The symbols that an array of this type shows the values of."""
    dims = type_.shape or () if isinstance(type_, TensorType) else ()
    alone = [(min(symbols(dim)), dim) for dim in dims if len(symbols(dim)) == 1]
    return frozenset(name for name, dim in alone if affine(dim, name) is not None)


def _solutions(value: Value, array: Any) -> list[tuple[str, int]]:
    """The extents of a tensor solved for the symbols of its declared shape, where a dimension has just one."""
    if not isinstance(value.type, TensorType) or value.type.shape is None or np.ndim(array) != len(value.type.shape):
        return []  # among others the values of fused bodies, which are declared of rank 0
    found = []
    for dim, size in zip(value.type.shape, np.shape(array), strict=True):
        names = tuple(symbols(dim))
        parts = affine(dim, names[0]) if len(names) == 1 else None
        if parts is not None:
            found.append((names[0], (size - parts[1]) // parts[0]))
    return found


def _checked(value: Value, feed: Any) -> Any:
    if not isinstance(value.type, TensorType):
        return feed
    array = np.asarray(feed)
    if array.dtype != value.type.dtype.numpy and array.dtype.kind not in "USO":
        raise FeedError(f"input '{value.name}' has dtype {array.dtype}, expected {value.type.dtype}")
    if value.type.shape is not None and not _fits(array.shape, value.type):
        raise FeedError(f"input '{value.name}' has shape {array.shape}, expected {value.type}")
    return array


def _fits(shape: tuple[int, ...], type_: TensorType) -> bool:
    return len(shape) == type_.rank and all(
        isinstance(dim, SymDim) or dim == size for dim, size in zip(type_.dims, shape, strict=True)
    )


def _as_declared(node: Node, value: Value, result: Any) -> Any:
    """References may compute in a wider type or return NumPy scalars; what they return must have the declared type."""
    if not isinstance(value.type, TensorType) or result is None:
        return result
    array: Array = np.asarray(result)
    expected = value.type.dtype.numpy
    if array.dtype != expected:
        if array.dtype.kind in "USO" or expected.kind == "O":
            return array.astype(object)
        message = f"reference returned {array.dtype}, declared {value.type.dtype}"
        raise ModelError(message, where=registry.describe(node))
    if value.type.shape and not _fits(array.shape, value.type):  # rank 0 is what fused bodies declare of any tensor
        found = f"its output '{value.name}' has shape {list(array.shape)}"
        raise FeedError(f"{registry.describe(node)}: {found}, expected {value.type}")
    return array
