"""Type and shape inference over a graph, with the values of small integer tensors where they are known."""

from __future__ import annotations

import numpy as np

from lathe.core.errors import LatheError, ModelError
from lathe.core.ir.dim import SymDim, is_checked_at_run_time
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.ratio import has_ratios
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef import registry

# Shape arithmetic uses vectors as long as a rank. Larger tensors are data, which would only slow inference down.
_LARGEST_KNOWN = 256
_SHAPE_TYPES = (DType.INT64, DType.INT32, DType.BOOL, DType.FLOAT32)


def infer_graph(graph: Graph, known: dict[Value, Array] | None = None) -> dict[Value, Array]:
    """Sets the type of every node output. Returns the known elements of values.

    These are arrays of numbers, or object arrays with dimensions or ratios. `known` has the elements that are known
    beforehand; it is extended in place and returned. ModelError, naming the node, if the inputs of an operator do not
    fit; UnsupportedError for an unknown operator.
    """
    known = {} if known is None else known
    known.update(graph.constants)
    for node in graph.nodes:
        infer_node(node, known)
    return known


def infer_node(node: Node, known: dict[Value, Array]) -> None:
    """Sets the types of a node's outputs, and adds their elements to `known` if they are small and can be computed.

    ModelError, naming the node, if the inputs do not fit; UnsupportedError for an unknown operator.
    """
    op = registry.get(node.op)
    check_arity(node, op)
    view = registry.Infer(op, node, known)
    types = op.infer(view)
    if len(types) < len(node.outputs):
        message = f"has {len(node.outputs)} outputs, expected at most {len(types)}"
        raise ModelError(message, where=registry.describe(node))
    for index, (output, inferred) in enumerate(zip(node.outputs, types, strict=False)):
        output.type = _prefer_declared(output.type, _without_negative(view, index, inferred))
    if op.shape_arithmetic or _has_known_numbers(op, node, known):
        _infer_values(op, node, known)


def _without_negative(view: registry.Infer, index: int, inferred: ValueType) -> ValueType:
    """The inferred type of output `index`, with new symbols for extents that are or may be negative.

    These are negative numbers, and data-dependent extents that are not known to be 0 or more. An extent such as n - 2
    of an input's n stays: `assumptions` lists it. A node with a negative extent cannot run, but may be in a branch that
    is never taken. If it is reached, its reference raises an error, or computes what ONNX defines.
    """
    if not isinstance(inferred, TensorType) or inferred.shape is None:
        return inferred
    unknown = [dim < 0 if isinstance(dim, int) else is_checked_at_run_time(dim) for dim in inferred.shape]
    if not any(unknown):
        return inferred
    pairs = enumerate(zip(inferred.shape, unknown, strict=True))
    return TensorType(
        inferred.dtype, tuple(view.fresh_dim(f"{index}_d{axis}") if is_new else dim for axis, (dim, is_new) in pairs)
    )


def _prefer_declared(before: ValueType, inferred: ValueType) -> ValueType:
    """The inferred type, or the previous one (declared by the model) if only that has a rank, of equal element type."""
    if not isinstance(before, TensorType) or not isinstance(inferred, TensorType):
        return inferred
    return before if inferred.shape is None and inferred.dtype is before.dtype else inferred


def forget_types(graph: Graph) -> None:
    """Resets the shapes of all node outputs, also in bodies, to unknown, before the inputs get more general types."""
    for node in graph.nodes:
        for value in node.outputs:
            if isinstance(value.type, TensorType):
                value.type = TensorType(value.type.dtype, None)
        for body in node.subgraphs:
            forget_types(body)


def check_arity(node: Node, op: registry.OpDef) -> None:
    """ModelError if a node has too few or too many inputs. Parameters given as attributes count."""
    least, most = op.arity
    count = len(node.inputs)
    if least <= count and (most is None or count <= most) and None not in node.inputs:
        return  # nearly all nodes
    required = [value for value in node.inputs[:least] if value is not None]
    from_attrs = sum(1 for name, index in op.params.items() if index < least and node.attrs.get(name) is not None)
    if len(required) + from_attrs < least or (most is not None and count > most):
        expected = f"at least {least}" if most is None else (str(least) if least == most else f"{least} to {most}")
        raise ModelError(f"has {count} inputs, expected {expected}", where=registry.describe(node))


def _infer_values(op: registry.OpDef, node: Node, known: dict[Value, Array]) -> None:
    if not all(_is_small(output) for output in node.outputs):
        return
    view = registry.Infer(op, node, known)
    if any(map(is_checked_at_run_time, op.supposes(view))):
        return
    found = op.known(view)
    arrays = [found] if isinstance(found, np.ndarray) else list(found or ())
    if found is None and all(value is None or value in known for value in node.inputs):
        arrays = _evaluate(op, node, [known[value] if value is not None else None for value in node.inputs])
    known.update(zip(node.outputs, arrays, strict=False))


def _has_known_numbers(op: registry.OpDef, node: Node, known: dict[Value, Array]) -> bool:
    """Whether a pure node without bodies has inputs, and all of them are small known arrays of numbers.

    Then its reference can compute the outputs, although the operator does not support shape arithmetic.
    """
    if not op.pure or node.subgraphs or not node.inputs:
        return False
    given = [known.get(value) for value in node.inputs if value is not None]
    return all(array is not None and array.dtype != object and array.size <= _LARGEST_KNOWN for array in given)


def _is_small(output: Value) -> bool:
    """Whether a value may be part of shape arithmetic: it is small, and of a type that shapes are computed in."""
    if not isinstance(output.type, TensorType) or output.dtype not in _SHAPE_TYPES:
        return False
    size = output.type.size if output.type.shape is not None else None
    return isinstance(size, int) and size <= _LARGEST_KNOWN


def dims_array(dims: tuple[object, ...]) -> Array:
    """Dimensions as a vector: int64 if all of them are numbers, otherwise an object array."""
    if any(isinstance(dim, SymDim) for dim in dims):
        array = np.empty(len(dims), dtype=object)
        array[:] = dims
        return array
    return np.array(dims, dtype=np.int64)


def _evaluate(op: registry.OpDef, node: Node, inputs: list[Array | None]) -> list[Array]:
    """The outputs of the reference, or [] if it fails, as a comparison of symbols does.

    [] also if an output is not of its declared element type (`_normalize`).
    """
    try:
        with np.errstate(all="ignore"):
            result = op.reference(registry.Call(op, node, inputs), *inputs)
    except (LatheError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RuntimeError):
        return []  # the error belongs to the run, which may never reach this node
    results = result if isinstance(result, tuple) else (result,)
    arrays = [_normalize(np.asarray(item), output.dtype) for item, output in zip(results, node.outputs, strict=False)]
    known = [array for array in arrays if array is not None]
    return known if len(known) == len(arrays) else []


def _normalize(array: Array, declared: DType) -> Array | None:
    """An array of the declared type, or an object array if it contains symbols or ratios; None for anything else."""
    if array.dtype != object:
        return array if array.dtype == declared.numpy else None
    if declared is DType.FLOAT32 and has_ratios(array):
        return array
    if declared not in (DType.INT64, DType.INT32) or not _all_dims(array):
        return None
    return array if _any_symbol(array) else array.astype(declared.numpy)


def _all_dims(array: Array) -> bool:
    return all(isinstance(item, int | np.integer | SymDim) for item in array.ravel().tolist())


def _any_symbol(array: Array) -> bool:
    return any(isinstance(item, SymDim) for item in array.ravel().tolist())
