"""The reference executor: every node through its NumPy reference, in order, with no optimization."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np

from lathe.core.errors import FeedError, ModelError
from lathe.core.feeds import check_feeds
from lathe.core.ir.dim import SymDim, affine, symbols
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value, node_reads
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.lowering.input_variants import with_default_inputs


def interpret(graph: Graph, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run `graph` on `feeds`, NumPy arrays by input name, and return the outputs by name.

    Sequences are lists, and absent optionals None. Outputs may be views of feeds or of constants. States have their
    initial values, and their next values are dropped. The feeds may also replace defaults (`Graph.defaults`).

    FeedError for a missing, unknown or ill-typed input, for inputs that give a symbol different values, and for inputs
    that a node refuses. ModelError for a node whose error does not depend on the feeds.
    """
    check_feeds(feeds, [value.name for value in graph.inputs])
    fed = {value.name for value in graph.defaults} & feeds.keys()
    graph = with_default_inputs(graph, fed) if fed else graph
    environment: dict[Value, Any] = {}
    for value in graph.inputs:
        if value.name not in feeds:
            raise FeedError(f"input '{value.name}' is missing; expected {value.type}")
        environment[value] = _check_feed(value, feeds[value.name])
    for name in feeds.keys() - {value.name for value in graph.inputs}:
        raise FeedError(f"unknown input '{name}'; the model has {', '.join(v.name for v in graph.inputs) or 'none'}")
    environment.update({state.value: state.initial for state in graph.states})
    sizes = bind_symbols(graph.inputs, environment)
    try:
        run_nodes(graph, environment, dict(sizes))
    except FeedError:
        fitted = _with_sizes(graph, sizes)
        if fitted is None:
            raise
        return interpret(fitted, feeds)
    return {value.name: environment[value] for value in graph.outputs}


def _with_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph | None:
    """A copy of the graph with numbers for the symbols of its inputs; None if there are none, or if it is not valid.

    Types of the graph may hold for some sizes only: `x[-3:]` of [n] has the type [3], which is wrong for n = 2.
    """
    if not sizes:
        return None
    copy = graph.clone(sizes)
    try:
        infer_graph(copy)
    except ModelError:
        return None
    return copy


# Runs a node instead of its reference: from its inputs, and the values of symbols, to its outputs.
RunCode: TypeAlias = Callable[[Sequence[Any], Mapping[str, int]], list[Any]]
_NO_CODE: Mapping[Node, RunCode] = {}


def run_nodes(
    graph: Graph,
    environment: dict[Value, Any],
    known: dict[str, int],
    check: Callable[[], object] = bool,
    code: Mapping[Node, RunCode] = _NO_CODE,
) -> None:
    """Run all nodes of a graph in order; its inputs, states and captured values are in `environment`.

    Adds constants and results to `environment`, and the symbols that the shapes of results determine to `known`.
    `check`, `code` and errors are those of `run_node`; functions in `code` also run instead of nodes of this graph.
    """
    environment.update(graph.constants)
    for node in graph.nodes:
        arguments = [environment[v] if v is not None else None for v in node.inputs]
        if node in code:
            results = code[node](arguments, known)
        else:
            is_fed = partial(depends_on_feeds, node, graph.constants)
            results = run_node(node, arguments, environment, known, check, is_fed, code)
        environment.update(zip(node.outputs, results, strict=False))
        bind_result_symbols(node, results, known)


def depends_on_feeds(node: Node, constants: Container[Value]) -> bool:
    """Whether results of a node may depend on the feeds.

    True if it reads a value that is not in `constants`, or if an attribute is a symbolic dimension or a tuple that
    contains one.
    """
    return any(value not in constants for value in node_reads(node)) or any(map(_has_size, node.attrs.values()))


def _has_size(attr: Attr) -> bool:
    return any(map(_has_size, attr)) if isinstance(attr, tuple) else isinstance(attr, SymDim)


def run_node(
    node: Node,
    inputs: Sequence[Any],
    environment: Mapping[Value, Any],
    known: Mapping[str, int],
    check: Callable[[], object] = bool,
    is_fed: Callable[[], bool] = lambda: True,
    code: Mapping[Node, RunCode] = _NO_CODE,
) -> list[Any]:
    """The outputs of one node, computed by its reference: arrays, lists for sequences, None for absent optionals.

    `environment` has the values that the node's bodies capture. `known`: the values of the symbols of dimensions.
    `check` is called before each run of a body, and by operators that may run for long: it ends the node by an
    exception, such as Interrupted. `code` maps some nodes of the bodies to functions that run instead of their
    references.

    FeedError if the node cannot process its inputs, for example if extents do not fit each other. If `is_fed` returns
    false (see `depends_on_feeds`), that error is a ModelError. Whatever it returns: FeedError if a result does not fit
    its declared shape, ModelError if it has another dtype than is declared.
    """

    def run_body(body: Graph, arguments: Sequence[Any]) -> list[Any]:
        check()
        inner = dict(environment)
        inner.update(zip(body.inputs, arguments, strict=True))
        body_symbols = dict(known)  # a copy: the symbols of a body may have other values in each iteration
        _bind_new_symbols(body.inputs, arguments, body_symbols)
        run_nodes(body, inner, body_symbols, check, code)
        return [inner[value] for value in body.outputs]

    op = registry.get(node.op)
    try:
        registry.check_run_inputs(op, node, inputs)
        with np.errstate(all="ignore"):  # infinities and NaN are valid results
            result = op.reference(registry.Call(op, node, inputs, run_body, known, check, is_fed), *inputs)
    except (ArithmeticError, IndexError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        message = f"{registry.describe(node)}: {error}"
        raise (FeedError(message) if is_fed() else ModelError(message)) from error
    results = list(result) if isinstance(result, tuple) else [result]
    return [_check_result(node, value, array) for value, array in zip(node.outputs, results, strict=False)]


def bind_symbols(values: Sequence[Value], environment: Mapping[Value, Any]) -> dict[str, int]:
    """The values of the symbols in the declared shapes of `values`, found from their arrays in `environment`.

    Only dimensions that are linear in a single symbol are used (see `_solutions`). FeedError when two of them give a
    symbol different values, and for an extent that no value of the symbol gives, such as 5 for `2*k`.
    """
    bound: dict[str, int] = {}
    sources: dict[str, str] = {}  # the value that gave each symbol its size, for errors
    for value in values:
        for name, size, rest in _solutions(value, environment[value]):
            if rest or size < 0:
                found = list(np.shape(environment[value]))
                raise FeedError(f"input '{value.name}' has shape {found}, expected {value.type}")
            first = sources.setdefault(name, value.name)
            if bound.setdefault(name, size) != size:
                raise FeedError(
                    f"dimension {name}: expected {bound[name]} as in '{first}', got {size} in '{value.name}'"
                )
    return bound


def bind_result_symbols(node: Node, results: Sequence[Any], known: dict[str, int]) -> None:
    """Add to `known` the symbols that the shapes of a node's results determine, unless `known` has them already.

    Some symbols, such as the number of nonzero elements, are known only when the node has run.
    """
    _bind_new_symbols(node.outputs, results, known)


def _bind_new_symbols(values: Sequence[Value], results: Sequence[Any], known: dict[str, int]) -> None:
    for value, result in zip(values, results, strict=False):
        for name, size, _ in _solutions(value, result):
            known.setdefault(name, size)


def determined_symbols(type_: ValueType) -> frozenset[str]:
    """The symbols whose values follow from the shape of an array of this type.

    These are the symbols of dimensions with a single symbol, in which the dimension is linear.
    """
    dims = type_.shape or () if isinstance(type_, TensorType) else ()
    return frozenset(name for _, name, _, _ in _linear_dims(dims))


def _solutions(value: Value, array: Any) -> list[tuple[str, int, int]]:
    """The symbols of a tensor's declared shape, with their values and remainders, from dimensions of a single symbol.

    The dimensions are linear in the symbol. The remainder is not 0 if the extent does not solve the dimension exactly,
    such as 5 for `2*k`; the value is then rounded down. Empty if `value` is no tensor, or if the rank of `array` is not
    the declared one.
    """
    if not isinstance(value.type, TensorType) or value.type.shape is None or np.ndim(array) != len(value.type.shape):
        return []  # the values in bodies of fused nodes, for example, are declared with rank 0
    sizes = np.shape(array)
    return [(name, *divmod(sizes[axis] - rest, factor)) for axis, name, factor, rest in _linear_dims(value.type.shape)]


@lru_cache(maxsize=8192)
def _linear_dims(shape: tuple[Dim, ...]) -> tuple[tuple[int, str, int, int], ...]:
    """The dimensions factor * symbol + rest of a single symbol: (axis, symbol, factor, rest) of each."""
    found = []
    for axis, dim in enumerate(shape):
        names = tuple(symbols(dim))
        parts = affine(dim, names[0]) if len(names) == 1 else None
        if parts is not None:
            found.append((axis, names[0], *parts))
    return tuple(found)


def _check_feed(value: Value, feed: Any) -> Any:
    """The feed of a tensor input as an array; feeds of other types are returned unchecked.

    FeedError if its dtype or shape does not fit.
    """
    if not isinstance(value.type, TensorType):
        return feed
    array = np.asarray(feed)
    if not value.type.dtype.holds(array.dtype):
        raise FeedError(f"input '{value.name}' has dtype {array.dtype}, expected {value.type.dtype}")
    if value.type.shape is not None and not _fits(array.shape, value.type):
        raise FeedError(f"input '{value.name}' has shape {list(array.shape)}, expected {value.type}")
    return array


def _fits(shape: tuple[int, ...], type_: TensorType) -> bool:
    return len(shape) == type_.rank and all(
        isinstance(dim, SymDim) or dim == size for dim, size in zip(type_.dims, shape, strict=True)
    )


def _check_result(node: Node, value: Value, result: Any) -> Any:
    """The result of a reference as an array, text as an array of objects; sequences and None are returned as they are.

    ModelError if the dtype is not the declared one. FeedError if the shape does not fit the declared shape; a value
    that is declared with rank 0 or unknown rank may have any shape.
    """
    if not isinstance(value.type, TensorType) or result is None:
        return result
    array: Array = np.asarray(result)
    expected = value.type.dtype.numpy
    if value.type.dtype is DType.STRING and (array.dtype.kind in "USO" or not array.size):
        array = array.astype(object)
    if array.dtype != expected:
        message = f"reference returned {array.dtype}, declared {value.type.dtype}"
        raise ModelError(message, where=registry.describe(node))
    if value.type.shape and not _fits(array.shape, value.type):  # bodies of fused nodes declare rank 0
        found = f"its output '{value.name}' has shape {list(array.shape)}"
        raise FeedError(f"{registry.describe(node)}: {found}, expected {value.type}")
    return array
