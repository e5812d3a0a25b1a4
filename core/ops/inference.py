"""Type inference over a graph, together with the values of integer tensors as far as they are known."""

from __future__ import annotations

import numpy as np

from core.errors import LatheError, ModelError
from core.ir.dim import SymDim, may_break
from core.ir.graph import Array, Graph, Node, Value
from core.ir.ratio import has_ratios
from core.ir.types import DType, TensorType, ValueType
from core.ops import registry

# Shape arithmetic concerns vectors as long as a rank; larger tensors are data and would only slow the analysis down.
_LARGEST_KNOWN = 256
_SHAPE_TYPES = (DType.INT64, DType.INT32, DType.BOOL, DType.FLOAT32)


def infer_graph(graph: Graph, known: dict[Value, Array] | None = None) -> dict[Value, Array]:
    """Set the type of every node output. Returns values that are known: constants, and object arrays of dimensions.

    ModelError, naming the node, when an operator's inputs do not fit it.
    """
    known = {} if known is None else known
    known.update(graph.constants)
    for node in graph.nodes:
        infer_node(node, known)
    return known


def infer_node(node: Node, known: dict[Value, Array]) -> None:
    """Set the types of one node's outputs, and note their values in `known` where shape arithmetic gives them."""
    op = registry.get(node.op)
    check_arity(node, op)
    view = registry.Infer(op, node, known)
    types = op.infer(view)
    if len(types) < len(node.outputs):
        message = f"has {len(node.outputs)} outputs, expected at most {len(types)}"
        raise ModelError(message, where=registry.describe(node))
    for index, (output, inferred) in enumerate(zip(node.outputs, types, strict=False)):
        output.type = _declared(output.type, _possible(view, index, inferred))
    if op.shape_arithmetic or _is_of_numbers(op, node, known):
        _infer_values(op, node, known)


def _possible(view: registry.Infer, index: int, inferred: ValueType) -> ValueType:
    """The inferred type of output `index`; extents below 0, and those that only a run shows to be, become unknown ones.
    A node with an extent below 0 cannot run, but it may stand in a branch that is not taken. Where it is reached, its
    reference refuses its data, or gives what ONNX says."""
    if not isinstance(inferred, TensorType) or inferred.shape is None:
        return inferred
    unknown = [dim < 0 if isinstance(dim, int) else may_break(dim) for dim in inferred.shape]
    if not any(unknown):
        return inferred
    pairs = enumerate(zip(inferred.shape, unknown, strict=True))
    return TensorType(
        inferred.dtype, tuple(view.fresh_dim(f"{index}_d{axis}") if hidden else dim for axis, (dim, hidden) in pairs)
    )


def _declared(before: ValueType, inferred: ValueType) -> ValueType:
    """The inferred type; the one before where that knows a rank and inference does not: the model declares it."""
    if not isinstance(before, TensorType) or not isinstance(inferred, TensorType):
        return inferred
    return before if inferred == TensorType(before.dtype, None) else inferred


def forget_types(graph: Graph) -> None:
    """Drop what is known of the shapes that nodes compute, before their inputs get types that may be wider."""
    for node in graph.nodes:
        for value in node.outputs:
            if isinstance(value.type, TensorType):
                value.type = TensorType(value.type.dtype, None)
        for body in node.subgraphs:
            forget_types(body)


def check_arity(node: Node, op: registry.OpDef) -> None:
    least, most = op.arity
    required = [value for value in node.inputs[:least] if value is not None or node.op in ("Sequence",)]
    from_attrs = sum(1 for name, index in op.params.items() if index < least and node.attrs.get(name) is not None)
    if len(required) + from_attrs < least or (most is not None and len(node.inputs) > most):
        expected = f"at least {least}" if most is None else (str(least) if least == most else f"{least} to {most}")
        raise ModelError(f"has {len(node.inputs)} inputs, expected {expected}", where=registry.describe(node))


def _infer_values(op: registry.OpDef, node: Node, known: dict[Value, Array]) -> None:
    if not all(_is_small(output) for output in node.outputs):
        return
    view = registry.Infer(op, node, known)
    if any(map(may_break, op.supposes(view))):
        return
    found = op.known(view)
    arrays = [found] if isinstance(found, np.ndarray) else list(found or ())
    if found is None and all(value is None or value in known for value in node.inputs):
        arrays = _evaluate(op, node, [known[value] if value is not None else None for value in node.inputs])
    known.update(zip(node.outputs, arrays, strict=False))


def _is_of_numbers(op: registry.OpDef, node: Node, known: dict[Value, Array]) -> bool:
    """Whether an operator that knows nothing of dimensions may compute a value all the same: from few numbers, without
    symbols among them."""
    if not op.pure or node.subgraphs or not node.inputs:
        return False
    given = [known.get(value) for value in node.inputs if value is not None]
    return all(array is not None and array.dtype != object and array.size <= _LARGEST_KNOWN for array in given)


def _is_small(output: Value) -> bool:
    """Whether a value is worth knowing: small, and of a type that shapes are computed in."""
    if not isinstance(output.type, TensorType) or output.dtype not in _SHAPE_TYPES:
        return False
    size = output.type.size if output.type.shape is not None else None
    return isinstance(size, int) and size <= _LARGEST_KNOWN


def as_known(dims: tuple[object, ...]) -> Array:
    """An int64 array when every dimension is an integer, else an object array of dimensions."""
    if any(isinstance(dim, SymDim) for dim in dims):
        array = np.empty(len(dims), dtype=object)
        array[:] = dims
        return array
    return np.array(dims, dtype=np.int64)


def _evaluate(op: registry.OpDef, node: Node, inputs: list[Array | None]) -> list[Array]:
    """The outputs, or none of them when the operator cannot compute them: compare or divide symbols, say."""
    try:
        with np.errstate(all="ignore"):
            result = op.reference(registry.Call(op, node, inputs), *inputs)
    except (LatheError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RuntimeError):
        return []  # what fails here must fail when the model runs, not when it is read
    results = result if isinstance(result, tuple) else (result,)
    arrays = [_normalized(np.asarray(item), output.dtype) for item, output in zip(results, node.outputs, strict=False)]
    known = [array for array in arrays if array is not None]
    return known if len(known) == len(arrays) else []


def _normalized(array: Array, declared: DType) -> Array | None:
    """Dimensions as an object array only where there is a symbol; None for what is no value of the declared type."""
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
