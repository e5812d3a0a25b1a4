"""Operators that only passes and gradients make, in terms of the ONNX operators they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from core.frontends.writer import Writer
from core.ir.dim import SymDim
from core.ir.graph import Graph, Node, Value
from core.ir.types import DType
from core.ops import registry
from core.ops.spatial import window_of
from core.passes.permutation import inverse

_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})  # they may have parameters wider than their input

Unfolding: TypeAlias = Callable[[Writer, Node], Sequence[Value]]
_UNFOLDINGS: dict[str, Unfolding] = {}


def unfolding(node: Node) -> Unfolding | None:
    """What writes the node's outputs with operators of ONNX; None for a node that is one already."""
    if node.op in _UNFOLDINGS:
        return _UNFOLDINGS[node.op]
    if _to_first(node, 2) is not None:
        return _laid_out
    return _of_one_type if node.op in _NORMS and len({value.dtype for value in _given(node)}) > 1 else None


def has_unfolding(op: str) -> bool:
    return op in _UNFOLDINGS


def _unfolds(op: str) -> Callable[[Unfolding], Unfolding]:
    def add(function: Unfolding) -> Unfolding:
        _UNFOLDINGS[op] = function
        return function

    return add


@_unfolds("FusedElementwise")
def _elementwise(w: Writer, node: Node) -> Sequence[Value]:
    results = w.inlined(_body(node, "body"), _given(node))
    return [w.expanded(new, old, node.inputs) for new, old in zip(results, node.outputs, strict=True)]


@_unfolds("FusedMatMul")
def _matmul(w: Writer, node: Node) -> Sequence[Value]:
    a, b, *extras = _given(node)
    made = _product(w, _permuted(w, node, a, "perm_a"), _permuted(w, node, b, "perm_b"))
    return [_permuted(w, node, _finished(w, node, made, extras), "perm_y")]


@_unfolds("FusedAttention")
def _attention(w: Writer, node: Node) -> Sequence[Value]:
    q, k, v, *extras = _given(node)
    q, k, v = (_wide(w, value) for value in (q, k, v))
    scores = w.emit("MatMul", _permuted(w, node, q, "perm_q"), _permuted(w, node, k, "perm_k"))
    weights = w.emit("Softmax", _finished(w, node, scores, extras), axis=-1)
    weights = _guarded(w, weights) if node.attrs.get("guarded") else weights
    made = w.emit("MatMul", weights, _permuted(w, node, v, "perm_v"))
    return [_cast(w, _permuted(w, node, made, "perm_y"), node.output.dtype)]


@_unfolds("GuardedSoftmax")
def _guarded_softmax(w: Writer, node: Node) -> Sequence[Value]:
    return [_guarded(w, w.emit("Softmax", node.inputs[0], **node.attrs))]


def _guarded(w: Writer, weights: Value) -> Value:
    """The same with zeros in place of what is no number."""
    zero = w.emitter.constant(np.zeros((), weights.dtype.numpy))
    return w.emit("Where", w.emit("IsNaN", weights), zero, weights)


@_unfolds("FusedConv")
def _conv(w: Writer, node: Node) -> Sequence[Value]:
    return [_finished(w, node, _last(w, node, _plain_conv(w, node)), _extras(node))]


@_unfolds("PooledConv")
def _pooled_conv(w: Writer, node: Node) -> Sequence[Value]:
    full = _finished(w, node, _last(w, node, _plain_conv(w, node)), _extras(node))
    pool = "MaxPool" if node.attrs["pool"] == "max" else "AveragePool"
    pooled = w.emit(pool, _first(w, node, full), kernel_shape=(2, 2), strides=(2, 2))
    return [_last(w, node, pooled)]


@_unfolds("ConvChain")
def _conv_chain(w: Writer, node: Node) -> Sequence[Value]:
    body = _body(node, "body")
    values = dict(zip(body.inputs, _given(node), strict=True))
    for inner in body.nodes:
        inputs = [None if value is None else values[value] for value in inner.inputs]
        values[inner.output] = _conv(w, Node(inner.op, inputs, inner.outputs, inner.attrs, inner.name))[0]
    return [values[value] for value in body.outputs]


@_unfolds("RecurrentSteps")
def _recurrent(w: Writer, node: Node) -> Sequence[Value]:
    """The layer over an input that is the gates' sums already: its weight only picks those of each direction."""
    gates, r, bias = node.inputs[0], node.inputs[1], node.input(2)
    assert gates is not None and r is not None, registry.describe(node)
    directions, rows, _ = r.tensor.evaluate({})
    pick = np.eye(directions * rows, dtype=gates.dtype.numpy).reshape(directions, rows, directions * rows)
    if bias is not None:
        none = w.emitter.constant(np.zeros((directions, rows), bias.dtype.numpy))
        bias = w.emit("Concat", none, bias, axis=1)
    own = {name: attr for name, attr in node.attrs.items() if name not in ("cell", "layout")}
    inputs = [gates, w.emitter.constant(pick), r, bias, *node.inputs[3:]]
    return w.emit_many(str(node.attrs["cell"]), inputs, len(node.outputs), **own)


@_unfolds("Iota")
def _iota(w: Writer, node: Node) -> Sequence[Value]:
    """The start, and a Range times its step along each axis."""
    shape, steps = node.output.shape, node.attrs["steps"]
    start = node.attrs.get("start", 0)
    assert isinstance(steps, tuple) and isinstance(start, int | SymDim), registry.describe(node)
    zero, one = (w.emitter.constant(np.array(number, np.int64)) for number in (0, 1))
    total = w.dims((start,)) if shape else w.emitter("Squeeze", w.dims((start,)))
    for axis, (extent, step) in enumerate(zip(shape, steps, strict=True)):
        assert isinstance(step, int | SymDim), registry.describe(node)
        line = w.emit("Mul", w.emit("Range", zero, w.emitter("Squeeze", w.dims((extent,))), one), w.dims((step,)))
        behind = tuple(range(1, len(shape) - axis))
        total = w.emit("Add", total, w.emit("Unsqueeze", line, axes=behind) if behind else line)
    return [_cast(w, total, node.output.dtype)]


@_unfolds("StopGradient")
def _stop_gradient(w: Writer, node: Node) -> Sequence[Value]:
    return [w.emit("Identity", node.inputs[0])]


@_unfolds("MaxPoolGradient")
def _max_pool_gradient(w: Writer, node: Node) -> Sequence[Value]:
    """MaxPool tells where the greatest elements are: there the gradient is added up."""
    x, dy = _first(w, node, node.inputs[0]), _first(w, node, node.inputs[1])
    own = {name: attr for name, attr in node.attrs.items() if name != "layout"}
    where = w.emit_many("MaxPool", [x], 2, **own)[1]
    shape = w.emit("Shape", x)
    zeros = w.emit("ConstantOfShape", shape, value=np.zeros(1, x.dtype.numpy))
    zeros, places, given = (w.emit("Reshape", value, shape=(-1,)) for value in (zeros, where, dy))
    added = w.emit("ScatterElements", zeros, places, given, axis=0, reduction="add")
    return [_last(w, node, w.emit("Reshape", added, shape, allowzero=1))]


@_unfolds("ConvWeightGradient")
def _conv_weight_gradient(w: Writer, node: Node) -> Sequence[Value]:
    """A convolution of the images with the gradients, both with batch and channels swapped, group by group."""
    x, dy = _first(w, node, node.inputs[0]), _first(w, node, node.inputs[1])
    group = registry.NodeView(registry.get(node.op), node).attr("group")
    pairs = zip(_channel_groups(w, x, group), _channel_groups(w, dy, group), strict=True)
    parts = [_weight_gradient(w, node, *pair) for pair in pairs]
    return [parts[0] if group == 1 else w.emit("Concat", *parts, axis=0)]


def _channel_groups(w: Writer, image: Value, count: int) -> Sequence[Value]:
    if count == 1:
        return [image]
    return w.emit_many("Split", [image], count, axis=1, num_outputs=count)


def _weight_gradient(w: Writer, node: Node, x: Value, dy: Value) -> Value:
    view = registry.NodeView(registry.get(node.op), node)
    window = window_of(view, view.attr("kernel_shape"))
    pads = window.pads_for([size for size in x.shape[2:] if isinstance(size, int)])
    flat = (*(before for before, _ in pads), *(after for _, after in pads))
    axes = tuple(range(2, len(pads) + 2))
    swap = (1, 0, *axes)
    images, kernels = w.transposed(x, swap), w.transposed(dy, swap)
    full = w.emit("Conv", images, kernels, strides=window.dilations, dilations=window.strides, pads=flat)
    kept = w.emit("Slice", full, starts=(0,) * len(pads), ends=window.kernel, axes=axes)
    return w.transposed(kept, swap)


def _plain_conv(w: Writer, node: Node) -> Value:
    """The convolution itself, channels first, with its bias; in the type of the product (see `core.ops.products`)."""
    own = {
        name: attr
        for name, attr in node.attrs.items()
        if name not in ("layout", "epilogue", "pool", "pad_value", "exact")
    }
    x, weight, bias = _first(w, node, node.inputs[0]), node.inputs[1], node.input(2)
    assert weight is not None, registry.describe(node)
    fill = registry.NodeView(registry.get(node.op), node).attr("pad_value")
    if _are_bytes(x, weight):
        zero = w.emitter.constant(np.asarray(fill, x.dtype.numpy))
        made = w.emit("ConvInteger", x, weight, zero, **own)
    else:
        x, weight = _multiplied(w, x, weight)
        x = x if not fill else w.emit("Sub", x, w.emitter.constant(np.asarray(fill, x.dtype.numpy)))
        made = w.emit("Conv", x, weight, **own)
    if fill:
        made = _per_channel(w, made, _padded_total(w, weight, made.dtype, fill))
    return made if bias is None else _per_channel(w, made, bias)


def _padded_total(w: Writer, weight: Value, dtype: DType, fill: int) -> Value:
    """What `fill` in every place of a window adds to each channel."""
    axes = tuple(range(1, len(weight.shape)))
    total = w.emit("ReduceSum", _cast(w, weight, dtype), axes=axes, keepdims=0)
    return w.emit("Mul", total, w.emitter.constant(np.asarray(fill, dtype.numpy)))


def _per_channel(w: Writer, image: Value, added: Value) -> Value:
    """An image, channels first, and one number for each channel."""
    return w.emit("Add", image, w.emit("Reshape", added, shape=(-1, *(1,) * (len(image.shape) - 2))))


def _product(w: Writer, a: Value, b: Value) -> Value:
    if _are_bytes(a, b):
        return w.emit("MatMulInteger", a, b)
    return w.emit("MatMul", *_multiplied(w, a, b))


def _are_bytes(a: Value, b: Value) -> bool:
    return (a.dtype, b.dtype) == (DType.UINT8, DType.INT8)


def _multiplied(w: Writer, a: Value, b: Value) -> tuple[Value, Value]:
    """Operands in the type of their product; the wider one of two floats is rounded like the other first."""
    if a.dtype is b.dtype:
        return a, b
    return _cast(w, a, b.dtype), _cast(w, _cast(w, b, a.dtype), b.dtype)


def _wide(w: Writer, value: Value) -> Value:
    return _cast(w, value, DType.FLOAT32) if value.dtype.itemsize < DType.FLOAT32.itemsize else value


def _cast(w: Writer, value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else w.emit("Cast", value, to=dtype.onnx_code)


def _laid_out(w: Writer, node: Node) -> Sequence[Value]:
    """An operator between transposes; only its first input and first output are images."""
    own = {name: attr for name, attr in node.attrs.items() if name != "layout"}
    made = w.emit(node.op, _first(w, node, node.inputs[0]), *node.inputs[1:], **own)
    return [_last(w, node, made)]


def _of_one_type(w: Writer, node: Node) -> Sequence[Value]:
    """An operator whose inputs are of two types, for ONNX in the wider one."""
    inputs = [None if value is None else _wide(w, value) for value in node.inputs]
    return [_cast(w, w.emit(node.op, *inputs, **node.attrs), node.output.dtype)]


def _to_first(node: Node, rank: int) -> tuple[int, ...] | None:
    """The permutation that brings an image in the node's layout to channels first; None where it is already."""
    layouts = {"NHWC": (0, rank - 1, *range(1, rank - 1)), "CHWN": (rank - 1, *range(rank - 1))}
    return layouts.get(str(node.attrs.get("layout")))


def _first(w: Writer, node: Node, value: Value | None) -> Value:
    """An image with its channels first."""
    assert value is not None, f"{registry.describe(node)} has no image"
    rank = len(value.shape)
    return w.transposed(value, _to_first(node, rank))


def _last(w: Writer, node: Node, value: Value) -> Value:
    """An image, given channels first, in the node's layout."""
    perm = _to_first(node, len(value.shape))
    return w.transposed(value, None if perm is None else inverse(perm))


def _permuted(w: Writer, node: Node, value: Value, perm: str) -> Value:
    return w.transposed(value, node.attrs.get(perm))


def _finished(w: Writer, node: Node, computed: Value, extras: Sequence[Value]) -> Value:
    """`computed` after the node's epilogue, if it has one."""
    if node.attrs.get("epilogue") is None:
        return computed
    return w.inlined(_body(node, "epilogue"), [computed, *extras])[0]


def _body(node: Node, name: str) -> Graph:
    body = node.attrs[name]
    assert isinstance(body, Graph)
    return body


def _given(node: Node) -> Sequence[Value]:
    return [value for value in node.inputs if value is not None]


def _extras(node: Node) -> Sequence[Value]:
    """What the epilogue of a convolution reads besides the result."""
    return [value for value in node.inputs[3:] if value is not None]
