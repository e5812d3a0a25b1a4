"""Proves by data-flow analysis that the rows of a batch are independent, from every input to every output.

Batching concatenates the requests of several callers along the leading axis. That is correct only if no output row
depends on another caller's rows, or on their number. The proof visits each node once and classifies every value. With
n rows, a value is one of these:

| value | its dimensions |
|---|---|
| the same for all callers | none contains n |
| a *count*: its elements are known expressions of n | none contains n |
| `k` steps for each row, row after row, along one axis | this axis has extent k*n, no other dimension contains n |

The proof rests on four checks. Every operator has a rule for rows (`OpDef.rows`). A count may be used only as the table
in `row_counts` allows. The dimensions of every value are checked, whatever the rule returned. All inputs of a node have
the same number of steps per row. An operator without a rule, a failed check or an unknown rank ends the proof, and the
reason names the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lathe.core.errors import ModelError
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Array, Graph, Node, Value, captures
from lathe.core.ir.types import MapType, SequenceType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.registry import MixesRows, RowAxis, describe
from lathe.core.passes.pipeline import canonical_passes, run_passes
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.proofs.row_counts import Counts, ProofFailed, depends, steps_per_row
from lathe.core.passes.rewrite.base import shape_of


def rows(graph: Graph, simplified: Graph | None = None) -> BatchInfo:
    """Whether the rows of a model are independent, and why or why not.

    If the proof fails for the graph as written, it is tried on a simplified copy, in which transposes and views are
    merged. The copy computes the same, so its proof holds for the graph as well. `simplified`: a graph that computes
    the same, from which the copy is made; this takes less time if passes ran on it.
    """
    found = _proof(graph)
    if found.batchable or not graph.inputs or graph.states:
        return found
    canonical, _ = run_passes(simplified or graph, canonical_passes())
    retried = _proof(canonical)
    return retried if retried.batchable else found


def leading(value: Value) -> str | None:
    """The name of an input's leading dimension; None if that is a number, an expression or not known."""
    shape = shape_of(value)
    return str(shape[0]) if shape and not isinstance(shape[0], int) and str(shape[0]).isidentifier() else None


def _proof(graph: Graph) -> BatchInfo:
    try:
        batch = _common_leading_symbol(graph)
        axes = _row_axes(graph, batch)
        _check_outputs(graph, axes, batch)
    except ProofFailed as mixed:
        return BatchInfo(False, str(mixed))
    return BatchInfo(True, f"every row of every output depends on its own row of the inputs along '{batch}'", batch)


def _common_leading_symbol(graph: Graph) -> str:
    """The symbol that is the leading dimension of every input. ProofFailed if there is none, or it occurs twice.

    ProofFailed also for a model without inputs, or with state.
    """
    if graph.states:
        raise ProofFailed(f"the model keeps state (%{graph.states[0].value.name}) from run to run")
    if not graph.inputs:
        raise ProofFailed("the model has no inputs")
    names = {_leading_symbol(value) for value in graph.inputs}
    if len(names) > 1:
        raise ProofFailed(f"the inputs have different leading dimensions: {', '.join(sorted(names))}")
    batch = names.pop()
    for value in graph.inputs:
        if any(depends(dim, batch) for dim in value.shape[1:]):
            raise ProofFailed(f"input '{value.name}' has dimension '{batch}' more than once")
    return batch


def _leading_symbol(value: Value) -> str:
    found = leading(value)
    if found is None:
        raise ProofFailed(f"input '{value.name}' ({value.type}) has no symbolic leading dimension")
    return found


def _row_axes(graph: Graph, batch: str) -> dict[Value, RowAxis]:
    """For every value the axis along which rows lie; None if it is the same for all rows. ProofFailed if rows mix."""
    known = infer_graph(graph)
    axes: dict[Value, RowAxis] = dict.fromkeys(graph.constants, None)
    axes.update(dict.fromkeys(graph.inputs, 0))
    _walk(graph, axes, known, batch)
    return axes


def _walk(graph: Graph, axes: dict[Value, RowAxis], known: dict[Value, Array], batch: str) -> None:
    """Adds to `axes` the row axis of each value that the nodes of a graph compute. ProofFailed if rows mix.

    `known`: the values that inference knows.
    """
    counts = Counts(known, batch)
    for node in graph.nodes:
        counts.check(node)
        _check_steps(node, axes)
        for value, axis in zip(node.outputs, _node_rows(node, axes, counts), strict=False):
            _check_dims(describe(node), value, axis, batch)
            axes[value] = axis


def _check_steps(node: Node, axes: dict[Value, RowAxis]) -> None:
    """ProofFailed unless all inputs have the same number of steps per row: n and 2*n would broadcast for n = 1.

    Nodes with bodies are not checked: the nodes in the bodies are.
    """
    given = [(value, axes.get(value)) for value in node.inputs if value is not None and not is_maps(value)]
    extents = {value.shape[axis] for value, axis in given if axis is not None}
    if len(extents) > 1 and not node.subgraphs:
        raise ProofFailed(
            f"{describe(node)}: its inputs have {' and '.join(sorted(map(str, extents)))} steps for their rows"
        )


def _check_dims(where: str, value: Value, axis: RowAxis, batch: str) -> None:
    """ProofFailed unless only the row axis depends on the number of rows, n, and has an extent k*n with k >= 1.

    Of the values that are not tensors, only a sequence of maps may have rows: one map per row.
    """
    if is_maps(value):
        if axis not in (0, None):
            raise ProofFailed(f"{where}: '{value.name}' is {value.type}, its rows lie along axis {axis}")
        return
    if not isinstance(value.type, TensorType):
        if axis is not None:
            raise ProofFailed(f"{where}: '{value.name}' has rows, but is {value.type}")
        return
    shape = value.type.shape
    if shape is None:
        raise ProofFailed(f"{where}: the rank of '{value.name}' is not known")
    along = [i for i, dim in enumerate(shape) if depends(dim, batch)]
    if along != ([] if axis is None else [axis]):
        raise ProofFailed(f"{where}: its size depends on the number of rows ('{value.name}' is {value.type})")
    if axis is not None and steps_per_row(shape[axis], batch) is None:
        raise ProofFailed(f"{where}: '{value.name}' ({value.type}) has no whole number of steps per row")


def _node_rows(node: Node, axes: dict[Value, RowAxis], counts: Counts) -> Sequence[RowAxis]:
    op = registry.get(node.op)
    given = [axes.get(value) if value is not None else None for value in node.inputs]
    if node.op in ("Shape", "Size"):
        return [None]
    if node.op in _CONTROL:
        return _CONTROL[node.op](node, given, lambda body, inputs: _body_rows(node, body, inputs, axes, counts))
    if any(axes.get(value) is not None or value in counts for body in node.subgraphs for value in captures(body)):
        raise ProofFailed(
            f"{describe(node)}: its nested graph reads values that differ from row to row, or their number"
        )
    if all(axis is None for axis in given):
        return [_repeated_axis(node, value, counts.rows) for value in node.outputs]
    answer = op.rows(registry.Infer(op, node, counts.known, counts.rows), given)
    if isinstance(answer, MixesRows):
        raise ProofFailed(f"{describe(node)}: {answer.reason}")
    if len(answer) < len(node.outputs):
        raise ProofFailed(f"{describe(node)}: its rule for rows covers {len(answer)} of {len(node.outputs)} outputs")
    return answer


BodyRows = Callable[[Graph, Sequence[RowAxis]], list[RowAxis]]  # the row axes of a body's outputs from its inputs'


def _body_rows(
    node: Node, body: Graph, inputs: Sequence[RowAxis], axes: dict[Value, RowAxis], outside: Counts
) -> list[RowAxis]:
    inner = {**axes, **dict.fromkeys(body.constants, None), **dict(zip(body.inputs, inputs, strict=True))}
    try:
        known = infer_graph(body, dict(outside.known))
    except ModelError as error:  # exporters leave branches for other ranks, which are never taken
        raise ProofFailed(f"{describe(node)}: its nested graph does not fit: {error}") from error
    for value in body.inputs:
        _check_dims(describe(node), value, inner[value], outside.rows)
    _walk(body, inner, known, outside.rows)
    Counts(known, outside.rows).check_body(body, node)
    return [inner.get(value) for value in body.outputs]


def _if_rows(node: Node, given: Sequence[RowAxis], body_rows: BodyRows) -> Sequence[RowAxis]:
    then, other = (body_rows(branch, []) for branch in node.subgraphs)
    if given[0] is not None:
        raise ProofFailed(f"{describe(node)}: its condition differs from row to row")
    if then != other:
        raise ProofFailed(f"{describe(node)}: the rows lie along different axes in its two branches")
    return then


def _loop_rows(node: Node, given: Sequence[RowAxis], body_rows: BodyRows) -> Sequence[RowAxis]:
    """The row axes of a Loop's outputs; ProofFailed unless all rows iterate equally often.

    Each iteration must keep the row axes of the carried values. Scan outputs get a new leading axis, so their row axes
    move by one.
    """
    carried = list(given[2:])
    condition, *results = body_rows(node.subgraphs[0], [None, None, *carried])
    if condition is not None or any(axis is not None for axis in given[:2]):
        raise ProofFailed(f"{describe(node)}: the number of iterations differs from row to row")
    stacked = [None if axis is None else axis + 1 for axis in results[len(carried) :]]
    return [*_check_carried(node, carried, results), *stacked]


def _scan_rows(node: Node, given: Sequence[RowAxis], body_rows: BodyRows) -> Sequence[RowAxis]:
    """The row axes of a Scan's outputs.

    ProofFailed if an input is sliced along its row axis, or an iteration moves the row axis of a state.
    """
    view = registry.NodeView(registry.get(node.op), node)
    states = len(given) - view.attr("num_scan_inputs")
    slices = []
    for index, (value, axis) in enumerate(zip(node.inputs[states:], given[states:], strict=True)):
        along = _scan_axis(view, "scan_input_axes", index, len(shape_of(value) or ()))
        if axis == along:
            raise ProofFailed(f"{describe(node)}: it iterates over the rows")
        slices.append(None if axis is None else axis - (axis > along))
    results = body_rows(node.subgraphs[0], [*given[:states], *slices])
    stacked = []
    for index, (value, axis) in enumerate(zip(node.outputs[states:], results[states:], strict=False)):
        along = _scan_axis(view, "scan_output_axes", index, len(shape_of(value) or ()))
        stacked.append(None if axis is None else axis + (axis >= along))
    return [*_check_carried(node, given[:states], results), *stacked]


def _scan_axis(view: registry.NodeView, name: str, index: int, rank: int) -> int:
    axes = view.attr(name)
    return int(axes[index]) % rank if axes and rank else 0


def _check_carried(node: Node, before: Sequence[RowAxis], after: Sequence[RowAxis]) -> Sequence[RowAxis]:
    if list(before) != list(after[: len(before)]):
        raise ProofFailed(f"{describe(node)}: an iteration moves the rows of its carried values to another axis")
    return before


_CONTROL: dict[str, Callable[[Node, Sequence[RowAxis], BodyRows], Sequence[RowAxis]]] = {
    "If": _if_rows,
    "Loop": _loop_rows,
    "Scan": _scan_rows,
}


def _repeated_axis(node: Node, value: Value, batch: str) -> RowAxis:
    """The axis along which ConstantOfShape, Expand or Tile repeats one constant row for all n rows; otherwise None."""
    dims = shape_of(value) or ()
    along = [axis for axis, dim in enumerate(dims) if depends(dim, batch)]
    if len(along) != 1 or node.op not in ("ConstantOfShape", "Expand", "Tile"):
        return None
    if node.op == "Tile":
        return along[0]
    source = shape_of(node.inputs[0]) if node.op == "Expand" else ()
    back = along[0] - len(dims)
    repeats = source is not None and (len(source) < -back or source[back] == 1)
    return along[0] if repeats else None


def is_maps(value: Value) -> bool:
    """Whether a value is a sequence of maps, as ZipMap returns: one map for each row of scores."""
    return isinstance(value.type, SequenceType) and isinstance(value.type.element, MapType)


def _check_outputs(graph: Graph, axes: dict[Value, RowAxis], batch: str) -> None:
    for value in graph.outputs:
        zipped = is_maps(value) and value.producer is not None and value.producer.op == "ZipMap"
        shape = shape_of(value.producer.inputs[0]) if zipped and value.producer is not None else shape_of(value)
        if axes.get(value) != 0 or not shape or shape[0] != symbol(batch):
            raise ProofFailed(f"output '{value.name}' ({value.type}) does not hold one row per row of the inputs")
