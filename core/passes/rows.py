"""Are the rows of a batch independent? A proof by data flow, from every input to every output.

Batching puts the requests of several callers one after the other along the leading axis. That is right only if no
output row depends on another caller's rows, nor on how many there are. The proof goes through the graph once and notes
for every value that it is one of these, n being the number of rows:

| | its dimensions |
|---|---|
| the same for all callers | none holds n |
| a *count*: elements that are known, as dimensions | none holds n |
| `k` steps for each row, one row after the other, along one axis | this axis has k*n, no other dimension holds n |

It rests on four things. Every operator has a rule for rows (`OpDef.rows`). A count may be used only as the table of
`row_counts` says. The dimensions are checked of every value, whatever a rule said. Rows of several inputs of a node
have as many steps in each. What has no rule, breaks one, or has no known rank makes the answer no, and the reason
names the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.errors import ModelError
from core.ir.dim import symbol
from core.ir.graph import Array, Graph, Node, Value, captures
from core.ir.types import MapType, SequenceType, TensorType
from core.ops import registry
from core.ops.inference import infer_graph
from core.ops.registry import Mixes, RowAxis, describe
from core.passes.base import shape_of
from core.passes.pipeline import for_proofs, run_passes
from core.passes.row_counts import Counts, Mixed, depends, steps_per_row


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Whether rows may be batched across callers. `symbol` names the leading dimension; `reason` says why (not)."""

    batchable: bool
    reason: str
    symbol: str | None = None


def rows(graph: Graph) -> BatchInfo:
    """The analysis of a whole model.

    What fails as the model is written (rows interleaved with positions for a product, say) may be plain after its
    transposes and views have been brought together; that computes the same, so a proof of it is as good.
    """
    found = _proof(graph)
    if found.batchable or not graph.inputs or graph.states:
        return found
    simplified, _ = run_passes(graph, for_proofs())
    again = _proof(simplified)
    return again if again.batchable else found


def leading(value: Value) -> str | None:
    """The symbol that an input leads with."""
    shape = shape_of(value)
    return str(shape[0]) if shape and not isinstance(shape[0], int) and str(shape[0]).isidentifier() else None


def _proof(graph: Graph) -> BatchInfo:
    try:
        batch = _leading_symbol(graph)
        axes = _flow(graph, batch)
        _check_outputs(graph, axes, batch)
    except Mixed as mixed:
        return BatchInfo(False, str(mixed))
    return BatchInfo(True, f"every row of every output depends on its own row of the inputs along '{batch}'", batch)


def _leading_symbol(graph: Graph) -> str:
    """The one symbol that every input leads with."""
    if graph.states:
        raise Mixed(f"the model keeps state (%{graph.states[0].value.name}) from run to run")
    if not graph.inputs:
        raise Mixed("the model has no inputs")
    names = {_leading(value) for value in graph.inputs}
    if len(names) > 1:
        raise Mixed(f"the inputs lead with different dimensions: {', '.join(sorted(names))}")
    batch = names.pop()
    for value in graph.inputs:
        if any(depends(dim, batch) for dim in value.shape[1:]):
            raise Mixed(f"input '{value.name}' has dimension '{batch}' more than once")
    return batch


def _leading(value: Value) -> str:
    found = leading(value)
    if found is None:
        raise Mixed(f"input '{value.name}' ({value.type}) has no symbolic leading dimension")
    return found


def _flow(graph: Graph, batch: str) -> dict[Value, RowAxis]:
    """The axis along which rows lie, for every value; None where the value has none."""
    known = infer_graph(graph)
    axes: dict[Value, RowAxis] = dict.fromkeys(graph.constants, None)
    axes.update(dict.fromkeys(graph.inputs, 0))
    _walk(graph, axes, known, batch)
    return axes


def _walk(graph: Graph, axes: dict[Value, RowAxis], known: dict[Value, Array], batch: str) -> None:
    """Note the axes of what the nodes of a graph compute."""
    counts = Counts(known, batch)
    for node in graph.nodes:
        counts.check(node)
        _check_steps(node, axes)
        for value, axis in zip(node.outputs, _node_rows(node, axes, counts), strict=False):
            _check_dims(describe(node), value, axis, batch)
            axes[value] = axis


def _check_steps(node: Node, axes: dict[Value, RowAxis]) -> None:
    """A row must be as many steps in one input as in another: 1 and 2 would broadcast where there is one row."""
    given = [(value, axes.get(value)) for value in node.inputs if value is not None and not is_maps(value)]
    extents = {value.shape[axis] for value, axis in given if axis is not None}
    if len(extents) > 1 and not node.subgraphs:
        raise Mixed(f"{describe(node)}: its inputs have {' and '.join(sorted(map(str, extents)))} steps for their rows")


def _check_dims(where: str, value: Value, axis: RowAxis, batch: str) -> None:
    """The number of rows stands in no dimension but that of the row axis, and there as a whole number of steps each.
    Among what is no tensor, only a sequence of maps may have rows: one each."""
    if is_maps(value):
        if axis not in (0, None):
            raise Mixed(f"{where}: '{value.name}' is {value.type}, its rows lie along axis {axis}")
        return
    if not isinstance(value.type, TensorType):
        if axis is not None:
            raise Mixed(f"{where}: '{value.name}' has rows, but is {value.type}")
        return
    shape = value.type.shape
    if shape is None:
        raise Mixed(f"{where}: the rank of '{value.name}' is not known")
    along = [i for i, dim in enumerate(shape) if depends(dim, batch)]
    if along != ([] if axis is None else [axis]):
        raise Mixed(f"{where}: its size depends on the number of rows ('{value.name}' is {value.type})")
    if axis is not None and steps_per_row(shape[axis], batch) is None:
        raise Mixed(f"{where}: '{value.name}' ({value.type}) has no whole number of steps for each row")


def _node_rows(node: Node, axes: dict[Value, RowAxis], counts: Counts) -> Sequence[RowAxis]:
    op = registry.get(node.op)
    given = [axes.get(value) if value is not None else None for value in node.inputs]
    if node.op in ("Shape", "Size"):
        return [None]
    if node.op in _CONTROL:
        return _CONTROL[node.op](node, given, lambda body, inputs: _body_rows(node, body, inputs, axes, counts))
    if any(axes.get(value) is not None or value in counts for body in node.subgraphs for value in captures(body)):
        raise Mixed(f"{describe(node)}: its nested graph reads values that differ from row to row, or their number")
    if all(axis is None for axis in given):
        return [_repeated(node, value, counts.rows) for value in node.outputs]
    answer = op.rows(registry.Infer(op, node, counts.known, counts.rows), given)
    if isinstance(answer, Mixes):
        raise Mixed(f"{describe(node)}: {answer.reason}")
    if len(answer) < len(node.outputs):
        raise Mixed(f"{describe(node)}: its rule knows {len(answer)} of {len(node.outputs)} outputs")
    return answer


Inside = Callable[[Graph, Sequence[RowAxis]], list[RowAxis]]  # the axes of a body's outputs, given those of its inputs


def _body_rows(
    node: Node, body: Graph, inputs: Sequence[RowAxis], axes: dict[Value, RowAxis], outside: Counts
) -> list[RowAxis]:
    inner = {**axes, **dict.fromkeys(body.constants, None), **dict(zip(body.inputs, inputs, strict=True))}
    try:
        known = infer_graph(body, dict(outside.known))
    except ModelError as error:  # a branch for values of another rank is never taken, and need not fit
        raise Mixed(f"{describe(node)}: its nested graph does not fit: {error}") from error
    for value in body.inputs:
        _check_dims(describe(node), value, inner[value], outside.rows)
    _walk(body, inner, known, outside.rows)
    Counts(known, outside.rows).check_body(body, node)
    return [inner.get(value) for value in body.outputs]


def _if_rows(node: Node, given: Sequence[RowAxis], inside: Inside) -> Sequence[RowAxis]:
    then, other = (inside(branch, []) for branch in node.subgraphs)
    if given[0] is not None:
        raise Mixed(f"{describe(node)}: its condition differs from row to row")
    if then != other:
        raise Mixed(f"{describe(node)}: rows lie along other axes in one branch than in the other")
    return then


def _loop_rows(node: Node, given: Sequence[RowAxis], inside: Inside) -> Sequence[RowAxis]:
    """Every iteration must leave the rows of what is carried where it finds them, and all rows end together."""
    carried = list(given[2:])
    going, *results = inside(node.subgraphs[0], [None, None, *carried])
    if going is not None or any(axis is not None for axis in given[:2]):
        raise Mixed(f"{describe(node)}: how often it runs differs from row to row")
    stacked = [None if axis is None else axis + 1 for axis in results[len(carried) :]]
    return [*_kept(node, carried, results), *stacked]


def _scan_rows(node: Node, given: Sequence[RowAxis], inside: Inside) -> Sequence[RowAxis]:
    """Slices are taken along other axes than that of the rows."""
    view = registry.NodeView(registry.get(node.op), node)
    states = len(given) - view.attr("num_scan_inputs")
    slices = []
    for index, (value, axis) in enumerate(zip(node.inputs[states:], given[states:], strict=True)):
        along = _scan_axis(view, "scan_input_axes", index, len(shape_of(value) or ()))
        if axis == along:
            raise Mixed(f"{describe(node)}: its steps are rows")
        slices.append(None if axis is None else axis - (axis > along))
    results = inside(node.subgraphs[0], [*given[:states], *slices])
    stacked = []
    for index, (value, axis) in enumerate(zip(node.outputs[states:], results[states:], strict=False)):
        along = _scan_axis(view, "scan_output_axes", index, len(shape_of(value) or ()))
        stacked.append(None if axis is None else axis + (axis >= along))
    return [*_kept(node, given[:states], results), *stacked]


def _scan_axis(view: registry.NodeView, name: str, index: int, rank: int) -> int:
    axes = view.attr(name)
    return int(axes[index]) % rank if axes and rank else 0


def _kept(node: Node, before: Sequence[RowAxis], after: Sequence[RowAxis]) -> Sequence[RowAxis]:
    if list(before) != list(after[: len(before)]):
        raise Mixed(f"{describe(node)}: an iteration moves the rows of what it carries")
    return before


_CONTROL: dict[str, Callable[[Node, Sequence[RowAxis], Inside], Sequence[RowAxis]]] = {
    "If": _if_rows,
    "Loop": _loop_rows,
    "Scan": _scan_rows,
}


def _repeated(node: Node, value: Value, batch: str) -> RowAxis:
    """The axis of a value that is one constant row for each of the callers' rows; None where it has none."""
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
    """Whether a value is a sequence of maps, as ZipMap gives one for each row of its scores."""
    return isinstance(value.type, SequenceType) and isinstance(value.type.element, MapType)


def _check_outputs(graph: Graph, axes: dict[Value, RowAxis], batch: str) -> None:
    for value in graph.outputs:
        zipped = is_maps(value) and value.producer is not None and value.producer.op == "ZipMap"
        shape = shape_of(value.producer.inputs[0]) if zipped and value.producer is not None else shape_of(value)
        if axes.get(value) != 0 or not shape or shape[0] != symbol(batch):
            raise Mixed(f"output '{value.name}' ({value.type}) does not hold one row per row of the inputs")
