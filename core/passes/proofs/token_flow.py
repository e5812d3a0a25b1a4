"""Data-flow rules for tokens: `pack` uses them to prove that sequences may share a run, and to rewrite the graph.

The graph computes one sequence of `n` tokens. In a packed run, the tokens of many sequences lie one after the other
along the same axes. An operator that treats every token alone needs no change; its rule `OpDef.rows` says so, with
tokens as rows. An operator that reads other tokens of the sequence is rewritten so that it stays within sequences. If
no rewrite below applies, the proof fails.

| in the model | packed |
|---|---|
| Range(0, n), the first n rows of a table | the position of each token in its sequence, a Gather by it |
| softmax(products of pairs of tokens) times tokens | SegmentSoftmax: block-diagonal |
| a triangular mask of all pairs (Trilu) | a comparison of positions |
| sum, mean, maximum, minimum, first or last token | SegmentReduce: one row per sequence |
| the token at the position of the greatest number | the sum of the tokens with all others set to zero |
| cumulative sums of integers | the cumulative sum minus the sum before the sequence |
| a convolution along the tokens, the token before or after | windows that end at the ends of the sequence |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from lathe.core.ir.dim import symbol, symbols
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value, captures, node_reads
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.registry import MixesRows, describe
from lathe.core.ops.tensor.reduce import Reduce
from lathe.core.ops.tensor.slicing import Slice
from lathe.core.passes.proofs.row_counts import Counts, ProofFailed
from lathe.core.passes.proofs.token_windows import TokenIndices, packed_convolution, packed_shift, shift_of
from lathe.core.passes.rewrite.base import is_elementwise, reshape_attrs, shape_of, view_source
from lathe.core.passes.rewrite.editor import Editor

TOKENS = "n"
N = symbol(TOKENS)

# Inputs that a packed graph may have besides the model's own.
POSITIONS = "packed.positions"  # int64[n]: the position of each token in its sequence
STARTS = "packed.starts"  # int64[n]: the index of the first token of each token's sequence
ENDS = "packed.ends"  # int64[n]: the index of the last token of each token's sequence
SEQUENCES = "packed.sequences"  # int64[n]: the index of each token's sequence
OFFSETS = "packed.offsets"  # int64[n + 1]: see lathe.core.ops.nn.segments
LAYOUT_INPUTS = frozenset({POSITIONS, STARTS, ENDS, SEQUENCES, OFFSETS})

_POOLS = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max", "ReduceMin": "min"}
_ENDS = {0: "first", -1: "last"}


@dataclass(frozen=True, slots=True)
class Flow:
    """How a value depends on the tokens.

    `pooled`, without axes: it has one row per sequence. No axes otherwise: it is the same for all sequences. One axis:
    it has one row per token. Two axes: it has one number per pair of tokens, which is meaningful only if both are in
    one sequence; with `blocks` it is zero for all other pairs.
    """

    axes: tuple[int, ...] = ()
    blocks: bool = False
    pooled: bool = False


SAME, POOLED = Flow(), Flow(pooled=True)


class TokenFlow:
    """Visits each node once, records every value's flow, and rewrites nodes that read other tokens of a sequence.

    `run` edits the graph in place, and raises ProofFailed for a graph that cannot be packed.
    """

    def __init__(self, graph: Graph, inputs: dict[Value, Flow]) -> None:
        self.graph = graph
        self.editor = Editor(graph)
        self.known = infer_graph(graph)
        self.pools: dict[str, Value] = {}  # values with one row per sequence, by the name of the value they replace
        self._extremes: set[str] = set()  # names of pools that are positions of tokens, from ArgMax and ArgMin
        self._flows = {**dict.fromkeys(graph.constants, SAME), **inputs}
        self._counts = Counts(self.known, TOKENS, "tokens")

    def run(self) -> None:
        for node in self.editor.nodes():
            self._visit(node)

    def of(self, value: Value) -> Flow:
        return self._flows.get(value, SAME)

    # -- one node -----------------------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        if node.op in ("Shape", "Size"):
            self._counts.check(node)
            return
        given = [self.of(value) if value is not None else SAME for value in node.inputs]
        # Of these values nothing may depend on tokens. The body of a MapSelected reads rows one by one.
        reads = [value for body in node.subgraphs for value in captures(body)]
        reads += node_reads(node) if node.subgraphs and node.op != "MapSelected" else []
        if any(self.of(value) != SAME or value in self._counts for value in reads):
            refuse(node, "its nested graphs read tokens, or their number")
        if node.op == "GatherND" and self._pick_extreme(node, given):
            return
        if any(flow.pooled for flow in given):
            self._flows.update(dict.fromkeys(node.outputs, self._pooled_flow(node, given)))
            return
        rewritten = self._rewrite(node, given)
        if rewritten is not None:
            return
        self._counts.check(node)
        flows = self._output_flows(node, given)
        for value, flow in zip(node.outputs, flows, strict=False):
            self._record(node, value, flow)

    def _pooled_flow(self, node: Node, given: Sequence[Flow]) -> Flow:
        if any(flow.axes for flow in given):
            refuse(node, "combines a value of whole sequences with a value of tokens")
        return POOLED

    def _record(self, node: Node, value: Value, flow: Flow) -> None:
        """Records the flow of a value; ProofFailed unless its axes, and no others, have the extent n of the tokens."""
        shape = shape_of(value)
        if shape is None:
            refuse(node, "the shape of its output is not known")
        along = tuple(axis for axis, dim in enumerate(shape) if TOKENS in symbols(dim))
        if along != flow.axes or any(shape[axis] != N for axis in along):
            refuse(node, "its size depends on the length of the sequence")
        self._flows[value] = flow

    def _replace(self, node: Node, new: Value, flow: Flow) -> bool:
        """Ends a rewrite: `new`, with this flow, replaces the node's output; a pooled value is only recorded.

        Always true.
        """
        if flow.pooled:
            self.pools[node.output.name] = new
            self._flows[node.output] = POOLED
            return True
        self.editor.replace(node.output, new)
        self._record(node, new, flow)
        return True

    # -- nodes that stay as they are -----------------------------------------------------------------------------------

    def _output_flows(self, node: Node, given: Sequence[Flow]) -> list[Flow]:
        if not any(flow.axes for flow in given):
            return [self._constant_flow(node, value) for value in node.outputs]
        if is_elementwise(node):
            return [self._broadcast(node, given)] * len(node.outputs)
        if node.op == "MatMul" and (product := _pairs(node, given)) is not None:
            return [product]
        most = max(len(flow.axes) for flow in given)
        if most > 1 and sum(bool(flow.axes) for flow in given) > 1:
            refuse(node, "uses a value for pairs of tokens in a way that attention does not")
        expanded = self._expanded_axes(node)
        columns = [
            self._rule(node, [flow.axes[i] if len(flow.axes) > i else None for flow in given]) for i in range(most)
        ]
        blocks = any(flow.blocks for flow in given) and node.op in ("Transpose", "Reshape", "Identity")
        return [
            Flow(tuple(sorted({axis for axis in axes if axis is not None} | expanded)), blocks)
            for axes in zip(*columns, strict=True)
        ]

    def _rule(self, node: Node, axes: Sequence[int | None]) -> Sequence[int | None]:
        """The token axis of each output by the operator's rule for rows (`OpDef.rows`), given those of the inputs.

        ProofFailed if the operator mixes tokens.
        """
        op = registry.get(node.op)
        answer = op.rows(registry.Infer(op, node, self.known, TOKENS), axes)
        if isinstance(answer, MixesRows):
            refuse(node, answer.reason.replace("row", "token"))
        if len(answer) < len(node.outputs):
            refuse(node, f"its rule for rows covers {len(answer)} of {len(node.outputs)} outputs")
        return answer

    def _expanded_axes(self, node: Node) -> set[int]:
        """The axes of the output along which an Expand or ConstantOfShape repeats one element for each token."""
        source, target = shape_of(node.input(0)) if node.op == "Expand" else (), shape_of(node.output)
        if node.op not in ("Expand", "ConstantOfShape") or source is None or target is None:
            return set()
        padded = (1,) * (len(target) - len(source)) + source
        return {axis for axis, dim in enumerate(target) if dim == N and padded[axis] == 1}

    def _constant_flow(self, node: Node, value: Value) -> Flow:
        """The flow of a value that no token enters: the same for all sequences, or repeated for every token.

        ProofFailed if it depends on the length of the sequence in another way.
        """
        along = tuple(axis for axis, dim in enumerate(shape_of(value) or ()) if TOKENS in symbols(dim))
        if along and (node.op not in ("ConstantOfShape", "Expand") or not set(along) <= self._expanded_axes(node)):
            refuse(node, "depends on the length of the sequence")
        return Flow(along)

    def _broadcast(self, node: Node, given: Sequence[Flow]) -> Flow:
        rank = len(shape_of(node.output) or ())
        axes = {
            axis + rank - len(shape_of(value) or ())
            for value, flow in zip(node.inputs, given, strict=True)
            if value is not None
            for axis in flow.axes
        }
        if len(axes) > 2:
            refuse(node, "combines more than two tokens")
        for shape in (shape_of(value) for value in node.inputs if value is not None):
            if shape is None or any(shape[axis - rank] not in (1, N) for axis in axes if axis >= rank - len(shape)):
                refuse(node, "an input varies along the axis of the tokens, but has no tokens")
        return Flow(tuple(sorted(axes)), self._keeps_blocks(node, given))

    def _keeps_blocks(self, node: Node, given: Sequence[Flow]) -> bool:
        """Whether an elementwise output is zero for pairs of tokens of different sequences, because an input is."""
        if node.op == "Where":
            return all(self._is_zero(value) or self.of(value).blocks for value in node.inputs[1:] if value is not None)
        if node.op in ("Mul", "Div", "Cast", "Identity", "Neg"):
            others = given[1:] if node.op == "Div" or given[0].blocks else given[:1]
            return (given[0].blocks or (node.op == "Mul" and given[1].blocks)) and all(flow == SAME for flow in others)
        return False

    def _is_zero(self, value: Value) -> bool:
        array = self.editor.array(value)
        return array is not None and not array.any()

    # -- nodes that read other tokens of the sequence ------------------------------------------------------------------

    def _rewrite(self, node: Node, given: Sequence[Flow]) -> bool | None:
        """Rewrites a node that reads other tokens of its sequence: true; None if no rewrite applies."""
        if node.op == "Range" and node.output.type == TensorType(node.output.dtype, (N,)):
            return self._range(node)
        if not node.inputs or node.inputs[0] is None:
            return None
        flow = given[0]
        if node.op == "Slice" and flow == SAME:
            return self._leading_rows_of_table(node)
        if node.op in _POOLS and len(flow.axes) == 1:
            return self._reduction(node, flow.axes[0])
        if node.op == "Gather" and len(flow.axes) == 1 and given[1] == SAME:
            return self._first_or_last(node, flow.axes[0])
        if node.op in ("ArgMax", "ArgMin") and len(flow.axes) == 1:
            return self._position_of_extreme(node, flow.axes[0])
        if node.op == "CumSum" and len(flow.axes) == 1:
            return self._cumulative_sum(node, flow)
        if node.op in ("Slice", "Pad", "Conv") and len(flow.axes) == 1:
            return self._window(node, flow)
        if len(flow.axes) == 2 and node.op == "Softmax":
            return self._softmax(node, flow)
        if len(given) == 3 and given[2].blocks and node.op == "Where":
            return self._guard(node, given[2])
        if len(flow.axes) == 2 and node.op == "Trilu":
            return self._triangle(node, flow)
        return None

    def _softmax(self, node: Node, flow: Flow) -> bool | None:
        scores, rank = node.required_input(0), len(node.output.shape)
        axis = int(self._view(node).attr("axis")) % rank
        if flow.axes != (rank - 2, rank - 1) or axis != rank - 1:
            return None
        new = self.editor.emit(node, "SegmentSoftmax", scores, self._input(OFFSETS))
        return self._replace(node, new, Flow(flow.axes, blocks=True))

    def _guard(self, node: Node, flow: Flow) -> bool | None:
        """Merges Where(IsNaN(softmax), 0, softmax), which PyTorch writes for masks of -inf, into the softmax.

        Returns true; None, without a change, for any other Where.
        """
        condition, zero, weights = node.inputs
        softmax, test = (value.producer if value is not None else None for value in (weights, condition))
        if softmax is None or test is None or zero is None or test.op != "IsNaN" or test.inputs != [weights]:
            return None
        if softmax.op != "SegmentSoftmax" or not self._is_zero(zero):
            return None
        new = self.editor.emit(node, softmax.op, *softmax.inputs, attrs={"guarded": 1}, name=softmax.name)
        return self._replace(node, new, flow)

    def _reduction(self, node: Node, axis: int) -> bool | None:
        op, view = registry.get(node.op), self._view(node)
        assert isinstance(op, Reduce)
        axes = op.axes(view, len(node.required_input(0).shape))
        return self._pool(node, axis, _POOLS[node.op]) if axes == (axis,) else None

    def _first_or_last(self, node: Node, axis: int) -> bool | None:
        """Rewrites a Gather of the first or the last token, which every sequence has, as a SegmentReduce.

        True if it did; None, without a change, for any other Gather.
        """
        index, rank = self._known(node, 1), len(node.required_input(0).shape)
        if (
            index is None
            or index.dtype == object
            or index.size != 1
            or int(self._view(node).attr("axis")) % rank != axis
        ):
            return None
        return self._pool(node, axis, _ENDS[int(index.item())]) if int(index.item()) in _ENDS else None

    def _pool(self, node: Node, axis: int, mode: str) -> bool:
        return self._replace(node, self._segments(node, node.required_input(0), axis, mode), POOLED)

    def _position_of_extreme(self, node: Node, axis: int) -> bool | None:
        """Rewrites ArgMax or ArgMin of integers as the first (or last) position of each sequence's extreme number.

        True if it did; None, without a change, for other types, another axis, and more than one number per token.
        """
        x, view = node.required_input(0), self._view(node)
        alone = all(dim == 1 for i, dim in enumerate(x.shape) if i != axis)
        if not alone or x.dtype not in (DType.INT32, DType.INT64) or int(view.attr("axis")) % len(x.shape) != axis:
            return None
        last, emit, position = bool(view.attr("select_last_index")), self.editor.emit, self._input(POSITIONS)
        numbers = self.editor.reshaped(node, x, (N,))
        extreme = self._of_tokens(node, self._segments(node, numbers, 0, "max" if node.op == "ArgMax" else "min"))
        none = self.editor.constant(np.array(-1 if last else np.iinfo(np.int64).max))
        candidates = emit(node, "Where", emit(node, "Equal", numbers, extreme), position, none)
        self._extremes.add(node.output.name)
        return self._replace(node, self._segments(node, candidates, 0, "max" if last else "min"), POOLED)

    def _pick_extreme(self, node: Node, given: Sequence[Flow]) -> bool | None:
        """Rewrites a GatherND of the token at the position that ArgMax or ArgMin found in each sequence.

        It becomes the sum of the sequence's tokens with all others set to zero. True if it did, otherwise None.
        """
        x, index = node.inputs
        name = view_source(index).name if index is not None else ""
        if x is None or given[0] != Flow((1,)) or name not in self._extremes:
            return None
        if (
            self._view(node).attr("batch_dims") != 1
            or shape_of(index) != (1, 1)
            or x.dtype not in (DType.FLOAT32, DType.INT32, DType.INT64)
        ):
            return None
        emit, rest = self.editor.emit, (1 for _ in x.shape[2:])
        here = emit(node, "Equal", self._input(POSITIONS), self._of_tokens(node, self.pools[name]))
        zero = self.editor.constant(np.zeros((), x.dtype.numpy))
        masked = emit(node, "Where", self.editor.reshaped(node, here, (N, *rest)), x, zero)
        return self._replace(node, self._segments(node, masked, 1, "sum"), POOLED)

    def _of_tokens(self, node: Node, pool: Value) -> Value:
        """For each token, the row of `pool` (one row per sequence) that belongs to its sequence."""
        return self.editor.emit(node, "Gather", pool, self._input(SEQUENCES), attrs={"axis": 0})

    def _segments(self, node: Node, x: Value, axis: int, mode: str) -> Value:
        attrs: dict[str, Attr] = {"axis": axis, "mode": mode}
        return self.editor.emit(node, "SegmentReduce", x, self._input(OFFSETS), attrs=attrs)

    def _range(self, node: Node) -> bool | None:
        """Rewrites a Range over the tokens as start + step * the position of each token in its sequence.

        True if it did; None, without a change, if start or step is not known.
        """
        first, step = self._known(node, 0), self._known(node, 2)
        if first is None or first.dtype == object or step is None or step.dtype == object:
            return None
        count = self._positions(node, node.output.dtype)
        if step.item() != 1:
            count = self.editor.emit(node, "Mul", count, self.editor.constant(step.reshape(())))
        if first.item() != 0:
            count = self.editor.emit(node, "Add", count, self.editor.constant(first.reshape(())))
        return self._replace(node, count if count.producer else self.editor.emit(node, "Identity", count), Flow((0,)))

    def _leading_rows_of_table(self, node: Node) -> bool | None:
        """Rewrites a Slice of n rows of a table from a fixed row on (position embeddings) as a Gather by positions.

        True if it did; None, without a change, for any other Slice. ProofFailed if two axes are cut to n.
        """
        op, shape = registry.get("Slice"), shape_of(node.required_input(0))
        assert isinstance(op, Slice)
        ranges = op.ranges(self._view(node), len(shape)) if shape is not None else None
        cut = {axis: r for axis, r in (ranges or {}).items() if TOKENS in symbols(node.output.shape[axis])}
        if not cut:
            return None
        if len(cut) > 1:
            refuse(node, "takes pairs of positions from a table")
        axis, (start, _, step) = cut.popitem()
        if step != 1 or not isinstance(start, int) or start < 0 or len(ranges or {}) > 1:
            return None
        index = self._positions(node, DType.INT64)
        if start:
            index = self.editor.emit(node, "Add", index, self.editor.constant(np.array(start, np.int64)))
        new = self.editor.emit(node, "Gather", node.required_input(0), index, attrs={"axis": axis})
        return self._replace(node, new, Flow((axis,)))

    def _triangle(self, node: Node, flow: Flow) -> bool | None:
        """Rewrites a Trilu of pairs of tokens as a Where that compares the positions of the two tokens.

        True if it did; None, without a change, if the last two axes are not the tokens, or the diagonal is not known.
        """
        rank, view = len(node.output.shape), self._view(node)
        diagonal = view.param("k") if view.has_param("k") else (0,)
        if flow.axes != (rank - 2, rank - 1) or diagonal is None or not isinstance(diagonal[0], int):
            return None
        count, emit = self._positions(node, DType.INT64), self.editor.emit
        key = emit(node, "Reshape", count, attrs=reshape_attrs((1, N)))
        query = emit(node, "Reshape", count, attrs=reshape_attrs((N, 1)))
        distance, limit = emit(node, "Sub", key, query), self.editor.constant(np.array(diagonal[0], np.int64))
        mask = emit(node, "GreaterOrEqual" if view.attr("upper") else "LessOrEqual", distance, limit)
        zero = self.editor.constant(np.zeros((), node.output.dtype.numpy))
        return self._replace(node, emit(node, "Where", mask, node.required_input(0), zero), flow)

    def _cumulative_sum(self, node: Node, flow: Flow) -> bool | None:
        """Rewrites a CumSum of integers as the CumSum over all sequences, minus the sum before the token's sequence.

        The difference is exact for integers only. True if it did; None, without a change, for floats, reversed sums,
        and an axis that is unknown or not the tokens'.
        """
        view, axis, x = self._view(node), flow.axes[0], node.required_input(0)
        along = view.param("axis") if "axis" in view.op.params else view.value(1)
        known = None if along is None else np.asarray(along)
        if known is None or known.dtype == object or int(known.item()) % len(x.shape) != axis:
            return None
        if x.dtype.is_float or view.attr("reverse"):
            return None
        emit, inputs, attrs = self.editor.emit, node.inputs, node.attrs
        total = emit(node, "CumSum", *inputs, attrs=attrs)
        before = emit(node, "CumSum", *inputs, attrs={**attrs, "exclusive": 1})
        first = emit(node, "Gather", before, self._input(STARTS), attrs={"axis": axis})
        return self._replace(node, emit(node, "Sub", total, first), flow)

    def _window(self, node: Node, flow: Flow) -> bool | None:
        """Rewrites a convolution along the tokens, or a Slice and a Pad that together shift the tokens by one.

        The output of the Slice gets the flow of its input; the rewrite of the Pad replaces both nodes. True if `node`
        is one of these nodes, otherwise None.
        """
        axis, view = flow.axes[0], self._view(node)
        if node.op == "Slice":
            readers = self.editor.readers(node.output)
            shifts = [reader.op == "Pad" and shift_of(self._view(reader), axis) for reader in readers]
            if not all(shifts) or self.editor.is_output(node.output):
                return None
            self._flows[node.output] = flow
            return True
        if node.op == "Pad":
            shift = shift_of(view, axis)
            new = None if shift is None else packed_shift(self.editor, node, axis, shift, self._token_places(node))
        elif any(self.of(value) != SAME for value in node.inputs[1:] if value is not None):
            return None
        else:
            new = packed_convolution(self.editor, view, axis, lambda: self._token_places(node))
        return None if new is None else self._replace(node, new, flow)

    # -- inputs of the packed graph -----------------------------------------------------------------------------------

    def _positions(self, node: Node, dtype: DType) -> Value:
        value = self._input(POSITIONS)
        return value if dtype is DType.INT64 else self.editor.emit(node, "Cast", value, attrs={"to": dtype.onnx_code})

    def _token_places(self, node: Node) -> TokenIndices:
        first = self._input(STARTS)
        own = self.editor.emit(node, "Add", first, self._input(POSITIONS))
        return TokenIndices(own, first, self._input(ENDS))

    def _input(self, name: str) -> Value:
        """The input of this name, which describes the layout of the sequences; added to the graph at its first use."""
        found = next((value for value in self.graph.inputs if value.name == name), None)
        if found is None:
            found = Value(name, TensorType(DType.INT64, (N + 1 if name == OFFSETS else N,)))
            self.graph.inputs.append(found)
            self._flows[found] = SAME if name == OFFSETS else Flow((0,))
        return found

    def _known(self, node: Node, index: int) -> Array | None:
        """The elements of an input if inference knows them, otherwise None."""
        value = node.input(index)
        return None if value is None else self.known.get(value)

    def _view(self, node: Node) -> registry.Infer:
        return registry.Infer(registry.get(node.op), node, self.known, TOKENS)


def refuse(node: Node, reason: str) -> NoReturn:
    """Raises ProofFailed with the node and the reason."""
    raise ProofFailed(f"{describe(node)}: {reason}")


def _pairs(node: Node, given: Sequence[Flow]) -> Flow | None:
    """The flow of the output of a MatMul that is one of the two products of attention; None for any other MatMul.

    The two are tokens by tokens, and weights of pairs (zero between sequences) by tokens.
    """
    a, b = (_negative_axes(value, flow) for value, flow in zip(node.inputs, given, strict=True))
    rank = len(shape_of(node.output) or ())
    if (a, b) == ((-2,), (-1,)):
        return Flow((rank - 2, rank - 1))
    if (a, b) == ((-2, -1), (-2,)) and given[0].blocks:
        return Flow((rank - 2,))
    return None


def _negative_axes(value: Value | None, flow: Flow) -> tuple[int, ...]:
    """The token axes of a value, as negative numbers: -1 is the last axis."""
    return tuple(axis - len(shape_of(value) or ()) for axis in flow.axes)
