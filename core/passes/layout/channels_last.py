"""Converts images to channels-last: convolutions read and write N, D1.., C, and the nodes between them follow.

The pass walks forward. For each converted value it records the channels-last twin. A reader that can work on the twin
does so. Any other reader reads a Transpose back, which is emitted for each converted value and dies if nothing reads
it. So transposes remain only at the borders of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.operator_table import OperatorTable
from lathe.core.ir.types import DType
from lathe.core.ops.nn.conv import conv_pads
from lathe.core.ops.nn.narrow_products import padded_total
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult, has_ranks, is_elementwise, reshape_attrs, shape_of
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import Perm, inverse, is_view, perm_of, permute_constant


@dataclass(frozen=True)
class ChannelsLast:
    name: str = "layout"

    def run(self, graph: Graph) -> PassResult:
        walk = _Walk(Editor(graph))
        for node in walk.editor.nodes():
            walk.convert(node)
        return walk.editor.finish()


def last_perm(rank: int) -> Perm:
    """The Transpose permutation of a tensor of this rank from N, C, D1.. to N, D1.., C."""
    return (0, *range(2, rank), 1)


def first_perm(rank: int) -> Perm:
    """The Transpose permutation of a tensor of this rank from N, D1.., C to N, C, D1..."""
    return (0, rank - 1, *range(1, rank - 1))


@dataclass
class _Walk:
    """The state of one walk: `twins` maps a channels-first value to the same data channels-last."""

    editor: Editor
    twins: dict[Value, Value] = field(default_factory=dict)

    def convert(self, node: Node) -> None:
        if not has_ranks(node):
            return
        if node.op in ("Conv", "ConvInteger"):
            _convolution(self, node)
        elif any(self.twin(value) is not None for value in node.inputs if value is not None):
            self._follow(node)

    def _follow(self, node: Node) -> None:
        op = registry.get(node.op)
        if node.op in _CONVERTERS:
            _CONVERTERS[node.op](self, node)
        elif "layout" in op.attrs:
            _spatial(self, node)
        elif is_elementwise(node):
            _elementwise(self, node)

    def twin(self, value: Value) -> Value | None:
        """The value with the same data channels-last, if there is one already; otherwise None.

        It is recorded in `twins`, or the input of a Transpose from channels-last that computes the value. A Transpose
        counts for at least four axes only: a swap of two axes occurs with tokens as well as with images.
        """
        if value in self.twins:
            return self.twins[value]
        source = value.producer.inputs[0] if value.producer is not None and value.producer.inputs else None
        perm = perm_of(value.producer) if value.producer is not None else None
        return source if perm is not None and len(perm) > 3 and perm == first_perm(len(perm)) else None

    def last(self, value: Value, anchor: Node) -> Value:
        """The channels-last twin of a value; if there is none, the output of a new Transpose before `anchor`."""
        found = self.twin(value)
        if found is None:
            found = self.editor.emit(anchor, "Transpose", value, attrs={"perm": last_perm(len(value.shape))})
            self.twins[value] = found
        return found

    def replace(self, node: Node, results: Sequence[Value]) -> None:
        """Replaces each output of `node` with a Transpose of the channels-last result, which becomes its twin."""
        for old, new in zip(node.outputs, results, strict=True):
            back = self.editor.emit(node, "Transpose", new, attrs={"perm": first_perm(len(new.shape))})
            self.twins[back] = new
            self.editor.replace(old, back)


Converter = Callable[[_Walk, Node], None]
_CONVERTERS = OperatorTable[Converter]()


def _convolution(walk: _Walk, node: Node) -> None:
    """Rewrites a Conv, or a ConvInteger with a kernel, as FusedConv with explicit padding.

    Nothing is done if the weights are computed, or the padding is not known.
    """
    x, w = node.inputs[0], node.inputs[1]
    if x is None or walk.editor.array(w) is None:
        return
    pads = conv_pads(registry.Infer(registry.get(node.op), node, {}))
    if pads is None:
        return
    rank = len(x.shape) - 2
    attrs: dict[str, Attr] = {
        "strides": _ints(node, "strides", rank),
        "dilations": _ints(node, "dilations", rank),
        "pads": (*(before for before, _ in pads), *(after for _, after in pads)),
        "group": node.attrs.get("group", 1),
        "layout": "NHWC",
    }
    bias = node.input(2)
    if node.op == "ConvInteger":
        if not _has_integer_kernel(walk, node):
            return
        attrs["pad_value"], bias = _zero_point(walk, node)
    walk.replace(node, [walk.editor.emit(node, "FusedConv", walk.last(x, node), w, bias, attrs=attrs)])


def _has_integer_kernel(walk: _Walk, node: Node) -> bool:
    """Whether a ConvInteger has uint8 images with a constant zero point or none, and int8 weights without one."""
    x, w = node.inputs[:2]
    plain = x is not None and x.dtype is DType.UINT8 and w is not None and w.dtype is DType.INT8
    known = node.input(2) is None or walk.editor.array(node.input(2)) is not None
    return plain and known and node.input(3) is None


def _zero_point(walk: _Walk, node: Node) -> tuple[int, Value | None]:
    """The constant zero point of a ConvInteger's image, and the bias that subtracts its contribution to the sums.

    The zero point is also the padding value. The bias has one int32 per output channel; None for a zero point of 0.
    """
    weight, zero = walk.editor.array(node.inputs[1]), walk.editor.array(node.input(2))
    if weight is None or zero is None or int(zero.reshape(())) == 0:
        return 0, None
    total = padded_total(weight.astype(np.int32), -int(zero.reshape(())))
    return int(zero.reshape(())), walk.editor.constant(total.astype(np.int32), "offset")


def _ints(node: Node, name: str, rank: int) -> tuple[Attr, ...]:
    given = node.attrs.get(name)
    return tuple(given) if isinstance(given, tuple) and given else (1,) * rank


def _spatial(walk: _Walk, node: Node) -> None:
    """Rewrites a node whose operator has the attribute `layout`; only its first input and its output are images."""
    x = node.inputs[0]
    if x is None or walk.twin(x) is None or len(node.outputs) > 1 or node.attrs.get("layout", "NCHW") != "NCHW":
        return
    attrs = {**node.attrs, "layout": "NHWC"}
    walk.replace(node, [walk.editor.emit(node, node.op, walk.last(x, node), *node.inputs[1:], attrs=attrs)])


def _elementwise(walk: _Walk, node: Node) -> None:
    shape = shape_of(node.output)
    if shape is None or len(node.outputs) > 1:
        return
    inputs = [_operand(walk, node, value, len(shape)) for value in node.inputs]
    if all(new is not None or old is None for new, old in zip(inputs, node.inputs, strict=True)):
        walk.replace(node, [walk.editor.emit(node, node.op, *inputs, attrs=node.attrs)])


def _operand(walk: _Walk, node: Node, value: Value | None, rank: int) -> Value | None:
    """The operand of an elementwise node for its channels-last form: the twin, or a permuted constant.

    `rank` is that of the node's output. A number stays as it is. None if the operand is absent, or is computed and has
    neither this rank nor rank 0.
    """
    if value is None:
        return None
    array, shape = walk.editor.array(value), shape_of(value)
    if array is not None:
        return value if array.size == 1 else walk.editor.constant(permute_constant(array, last_perm(rank)), value.name)
    if shape is None or len(shape) not in (0, rank):
        return None
    return value if len(shape) == 0 else walk.last(value, node)


@_CONVERTERS.add("Softmax", "GuardedSoftmax", "LogSoftmax", "Hardmax", "LpNormalization", "Split")
def _along_axis(walk: _Walk, node: Node) -> None:
    x = node.inputs[0]
    if x is None or len(node.inputs) != 1:
        return
    rank, default = len(x.shape), 0 if node.op == "Split" else -1
    attrs = {**node.attrs, "axis": _last_axis(node.attrs.get("axis", default), rank)}
    inputs = [walk.last(x, node)]
    walk.replace(node, walk.editor.emit_many(node, node.op, inputs, len(node.outputs), attrs))


@_CONVERTERS.add("Concat")
def _concat(walk: _Walk, node: Node) -> None:
    values = [value for value in node.inputs if value is not None]
    attrs = {**node.attrs, "axis": _last_axis(node.attrs["axis"], len(node.output.shape))}
    inputs = [walk.last(value, node) for value in values]
    walk.replace(node, [walk.editor.emit(node, "Concat", *inputs, attrs=attrs)])


@_CONVERTERS.add("Slice")
def _slice(walk: _Walk, node: Node) -> None:
    starts = node.attrs.get("starts")
    if len(node.inputs) != 1 or not isinstance(starts, tuple) or node.inputs[0] is None:
        return
    axes = node.attrs.get("axes")
    given = axes if isinstance(axes, tuple) else tuple(range(len(starts)))
    _with_axes(walk, node, given)


@_CONVERTERS.add("Pad")
def _pad(walk: _Walk, node: Node) -> None:
    if node.inputs[0] is None or node.input(1) is not None or node.input(3) is not None:
        return
    axes = node.attrs.get("axes")
    _with_axes(walk, node, axes if isinstance(axes, tuple) else tuple(range(len(node.inputs[0].shape))))


def _with_axes(walk: _Walk, node: Node, axes: Sequence[Attr]) -> None:
    """Emits the same node on the channels-last twin, with its `axes` renumbered."""
    x = node.inputs[0]
    if x is not None:
        attrs = {**node.attrs, "axes": tuple(_last_axis(axis, len(x.shape)) for axis in axes)}
        walk.replace(node, [walk.editor.emit(node, node.op, walk.last(x, node), *node.inputs[1:], attrs=attrs)])


@_CONVERTERS.add(*(name for name in registry.names() if name.startswith("Reduce")))
def _reduce(walk: _Walk, node: Node) -> None:
    """Rewrites a reduction to read the channels-last twin.

    Without `keepdims` the remaining axes must be in the same order in both layouts.
    """
    x, axes = node.inputs[0], node.attrs.get("axes")
    if x is None or len(node.inputs) != 1 or not isinstance(axes, tuple) or not axes:
        return
    rank = len(x.shape)
    moved = tuple(sorted(_last_axis(axis, rank) for axis in axes))
    attrs = {**node.attrs, "axes": moved}
    remaining = [axis for position, axis in enumerate(last_perm(rank)) if position not in moved]
    if node.attrs.get("keepdims", 1):
        walk.replace(node, [walk.editor.emit(node, node.op, walk.last(x, node), attrs=attrs)])
    elif remaining == sorted(remaining):
        walk.editor.replace(node.output, walk.editor.emit(node, node.op, walk.last(x, node), attrs=attrs))


@_CONVERTERS.add("Reshape")
def _reshape(walk: _Walk, node: Node) -> None:
    if not _shuffle(walk, node) and not _pixels(walk, node):
        _flatten(walk, node)


def _pixels(walk: _Walk, node: Node) -> bool:
    """Rewrites a Reshape of images to lists of pixels, N, C, D1*D2, as a channels-last Reshape to N, D1*D2, C.

    Returns whether the node is such a Reshape.
    """
    x, shape = node.inputs[0], node.output.shape
    if x is None or len(node.inputs) != 1 or len(shape) != 3 or len(x.shape) < 4 or shape[:2] != x.shape[:2]:
        return False
    attrs = reshape_attrs((shape[0], shape[2], shape[1]))
    walk.replace(node, [walk.editor.emit(node, "Reshape", walk.last(x, node), attrs=attrs)])
    return True


def _shuffle(walk: _Walk, split: Node) -> bool:
    """Rewrites a channel shuffle (ShuffleNet: Reshape, Transpose, Reshape) that begins at `split`, channels-last.

    The three nodes then split, swap and merge the last axis. Returns whether `split` begins a channel shuffle.
    """
    x, swap = split.inputs[0], walk.editor.only_reader(split.output)
    merge = walk.editor.only_reader(swap.output) if swap is not None else None
    if x is None or swap is None or merge is None or len(split.inputs) != 1 or merge.op != "Reshape":
        return False
    parts, rank = split.output.shape, len(x.shape)
    spatial = x.shape[2:]
    if len(parts) != rank + 1 or (parts[0], parts[3:]) != (x.shape[0], spatial) or merge.output.type != x.type:
        return False
    if perm_of(swap) != (0, 2, 1, *range(3, rank + 1)):
        return False
    shape = reshape_attrs((x.shape[0], *spatial, parts[1], parts[2]))
    perm = (*range(rank - 1), rank, rank - 1)
    grouped = walk.editor.emit(split, "Reshape", walk.last(x, split), attrs=shape)
    swapped = walk.editor.emit(swap, "Transpose", grouped, attrs={"perm": perm})
    merged_shape = reshape_attrs((x.shape[0], *spatial, x.shape[1]))
    walk.replace(merge, [walk.editor.emit(merge, "Reshape", swapped, attrs=merged_shape)])
    return True


def _flatten(walk: _Walk, node: Node) -> None:
    """Makes a flattening of images read the channels-last twin, if all its readers multiply by constant weights.

    The rows of the weights are reordered to match.
    """
    x = node.inputs[0]
    if x is None or walk.twin(x) is None or len(node.inputs) != 1:
        return
    readers = walk.editor.readers(node.output)
    if not _is_flatten(x, node.output) or walk.editor.is_output(node.output):
        return
    if is_view(last_perm(len(x.shape)), x.shape) or not all(_has_weight(walk, node, reader) for reader in readers):
        return
    flat = walk.editor.emit(node, "Reshape", walk.last(x, node), attrs=dict(node.attrs))
    for reader in readers:
        weight = walk.editor.array(reader.inputs[1])
        if weight is not None and reader.inputs[1] is not None:
            reordered = walk.editor.constant(_reorder_rows(weight, x), reader.inputs[1].name)
            walk.editor.set_inputs(reader, [flat, reordered, *reader.inputs[2:]])


def _is_flatten(x: Value, y: Value) -> bool:
    known = all(isinstance(dim, int) for dim in x.shape[1:])
    return len(y.shape) == 2 and y.shape[0] == x.shape[0] and known and len(x.shape) > 2


def _has_weight(walk: _Walk, node: Node, reader: Node) -> bool:
    """Whether `reader` is a product of the output of `node`, the flattened images, with a constant matrix."""
    if reader.op != "FusedMatMul" or reader.inputs[0] is not node.output or node.output in reader.inputs[1:]:
        return False
    weight = walk.editor.array(reader.inputs[1])
    plain = reader.attrs.get("perm_a") is None and reader.attrs.get("perm_b") is None
    return plain and weight is not None and weight.ndim == 2


def _reorder_rows(weight: Array, image: Value) -> Array:
    """The weight matrix with its rows, one per element of `image`, moved from the order C, D1.. to D1.., C."""
    dims = tuple(int(dim) for dim in image.shape[1:] if isinstance(dim, int))
    if weight.flags.f_contiguous:  # the result stays column-major, so that contiguous runs are copied
        columns = np.moveaxis(weight.T.reshape(-1, *dims), 1, -1)
        return columns.reshape(weight.shape[::-1]).T
    return np.moveaxis(weight.reshape(*dims, -1), 0, -2).reshape(weight.shape)


def _last_axis(axis: Attr, rank: int) -> int:
    """The channels-last index of a channels-first axis."""
    return inverse(last_perm(rank))[int(axis) % rank]  # type: ignore[arg-type]
