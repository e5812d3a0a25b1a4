"""Decompositions of internal operators, which passes and gradients make, into ONNX operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from lathe.core.frontends.annotations import INT8, ROWS
from lathe.core.frontends.writer import Writer
from lathe.core.ir.dim import SymDim, symbol
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.operator_table import OperatorTable
from lathe.core.ir.types import DType
from lathe.core.ops.control.map_selected import SELECTED
from lathe.core.ops.nn.spatial import window_of
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.permutation import inverse

_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})  # parameters may have a wider type than the input

Decomposition: TypeAlias = Callable[[Writer, Node], Sequence[Value]]
_UNFOLDINGS = OperatorTable[Decomposition]()


def decomposition(node: Node) -> Decomposition | None:
    """The function that writes a node as ONNX operators; None if ONNX can express the node as it is, or not at all.

    Nodes of ONNX operators have one if their layout is not channels first, or if they are normalizations whose inputs
    differ in type.
    """
    if node.op in _UNFOLDINGS:
        return _UNFOLDINGS[node.op]
    if _channels_first_perm(node, 2) is not None:
        return _with_transposes
    if node.op not in _NORMS:
        return None
    types = {value.dtype for value in _present_inputs(node)}
    return _in_one_type if len(types) > 1 else None


def has_decomposition(op: str) -> bool:
    return op in _UNFOLDINGS


@_UNFOLDINGS.add("FusedElementwise")
def _elementwise(w: Writer, node: Node) -> Sequence[Value]:
    results = w.inlined(_body(node, "body"), _present_inputs(node))
    return [w.expand(new, old, node.inputs) for new, old in zip(results, node.outputs, strict=True)]


@_UNFOLDINGS.add("FusedMatMul")
def _matmul(w: Writer, node: Node) -> Sequence[Value]:
    a, b, *extras = _present_inputs(node)
    product = _product(w, _permute(w, node, a, "perm_a"), _permute(w, node, b, "perm_b"))
    return [_permute(w, node, _apply_epilogue(w, node, product, extras), "perm_y")]


@_UNFOLDINGS.add("DequantizedMatMul")
def _dequantized_matmul(w: Writer, node: Node) -> Sequence[Value]:
    """The weight as Gather of the numbers of its codes, times and plus Gather of the rows of its blocks."""
    a, codes, scales, offsets = (node.input(index) for index in range(4))
    assert a is not None and codes is not None and scales is not None, registry.describe(node)
    numbers, block = node.attrs["numbers"], node.attrs["block"]
    assert isinstance(numbers, tuple) and isinstance(block, int), registry.describe(node)
    depth = codes.shape[0]
    assert isinstance(depth, int), registry.describe(node)
    block_of_row = w.emitter.constant(np.arange(depth) // block)
    weight = _cast(w, codes, DType.FLOAT32)
    if numbers:
        table = w.emitter.constant(np.array(numbers, np.float32))
        weight = w.emit("Gather", table, _cast(w, codes, DType.INT32))
    weight = w.emit("Mul", weight, w.emit("Gather", scales, block_of_row))
    if offsets is not None:
        weight = w.emit("Add", weight, w.emit("Gather", offsets, block_of_row))
    extras = [value for value in node.inputs[4:] if value is not None]
    return [_apply_epilogue(w, node, w.emit("MatMul", a, weight), extras)]


@_UNFOLDINGS.add("ExpertProduct")
def _expert_product(w: Writer, node: Node) -> Sequence[Value]:
    """A copy of the expert's matrix for each row, times the row as a column."""
    x, expert, weights = (node.required_input(index) for index in range(3))
    last = w.emitter.constant(np.array([-1], np.int64))
    column = w.emit("MatMul", w.emit("Gather", weights, expert), w.emit("Unsqueeze", x, last))
    return [w.emit("Squeeze", column, last)]


@_UNFOLDINGS.add("TextCodes")
def _text_codes(w: Writer, node: Node) -> Sequence[Value]:
    vocabulary = node.attrs["vocabulary"]
    assert isinstance(vocabulary, tuple), registry.describe(node)
    codes = tuple(range(len(vocabulary)))
    x = node.inputs[0]
    return [w.emit("LabelEncoder", x, keys_strings=vocabulary, values_int64s=codes, default_int64=-1)]


@_UNFOLDINGS.add("FusedAttention")
def _attention(w: Writer, node: Node) -> Sequence[Value]:
    q, k, v, *extras = _present_inputs(node)
    q, k, v = (_widen(w, value) for value in (q, k, v))
    scores = w.emit("MatMul", _permute(w, node, q, "perm_q"), _permute(w, node, k, "perm_k"))
    weights = w.emit("Softmax", _apply_epilogue(w, node, scores, extras), axis=-1)
    weights = _replace_nan(w, weights) if node.attrs.get("guarded") else weights
    result = w.emit("MatMul", weights, _permute(w, node, v, "perm_v"))
    return [_cast(w, _permute(w, node, result, "perm_y"), node.output.dtype)]


@_UNFOLDINGS.add("GuardedSoftmax")
def _guarded_softmax(w: Writer, node: Node) -> Sequence[Value]:
    return [_replace_nan(w, w.emit("Softmax", node.inputs[0], **node.attrs))]


def _replace_nan(w: Writer, weights: Value) -> Value:
    """`weights` with zeros instead of NaN."""
    zero = w.emitter.constant(np.zeros((), weights.dtype.numpy))
    return w.emit("Where", w.emit("IsNaN", weights), zero, weights)


@_UNFOLDINGS.add("FusedConv")
def _conv(w: Writer, node: Node) -> Sequence[Value]:
    return [_apply_epilogue(w, node, _to_layout(w, node, _plain_conv(w, node)), _extras(node))]


@_UNFOLDINGS.add("PackImage")
def _packed_image(w: Writer, node: Node) -> Sequence[Value]:
    image, block = _channels_first(w, node, node.inputs[0]), int(str(node.attrs.get("block", 1)))
    added = int(str(node.attrs["channels"])) - int(str(image.shape[1]))
    if added:
        pads = w.emitter.constant(np.array([0, 0, 0, 0, 0, added, 0, 0], np.int64))
        image = w.emit("Pad", image, pads)
    image = _cast(w, image, node.output.dtype)
    if block > 1:
        image = w.emit("SpaceToDepth", image, blocksize=block)
    return [w.transposed(image, (0, 2, 3, 1))]


@_UNFOLDINGS.add("PooledConv")
def _pooled_conv(w: Writer, node: Node) -> Sequence[Value]:
    full = _apply_epilogue(w, node, _to_layout(w, node, _plain_conv(w, node)), _extras(node))
    pool = "MaxPool" if node.attrs["pool"] == "max" else "AveragePool"
    pooled = w.emit(pool, _channels_first(w, node, full), kernel_shape=(2, 2), strides=(2, 2))
    return [_to_layout(w, node, pooled)]


@_UNFOLDINGS.add("ConvChain")
def _conv_chain(w: Writer, node: Node) -> Sequence[Value]:
    body = _body(node, "body")
    values = dict(zip(body.inputs, _present_inputs(node), strict=True))
    for inner in body.nodes:
        inputs = [None if value is None else values[value] for value in inner.inputs]
        values[inner.output] = _conv(w, Node(inner.op, inputs, inner.outputs, inner.attrs, inner.name))[0]
    return [values[value] for value in body.outputs]


@_UNFOLDINGS.add("MapSelected")
def _map_selected(w: Writer, node: Node) -> Sequence[Value]:
    """MapSelected as NonZero of the mask, GatherND of the selected rows, the body's nodes, and ScatterND."""
    base, mask, *sources = _present_inputs(node)
    places = w.emit("NonZero", mask)
    elements = w.emit("Transpose", places, perm=(1, 0))
    rows = w.emit("Slice", elements, starts=(1,), ends=(2,), axes=(1,))
    count = symbol(w.session.fresh("_selected"))
    body = _body(node, "body").clone({str(SELECTED): count})
    values = {value: w.emitter.constant(array) for value, array in body.constants.items()}
    per_place = node.attrs["per_place"]
    assert isinstance(per_place, tuple), registry.describe(node)
    for value, source, is_per_place in zip(body.inputs, sources, per_place, strict=True):
        values[value] = w.emit("GatherND", source, elements if is_per_place else rows)
        w.sources.setdefault(str(count), (values[value], 0))
    for inner in body.nodes:
        inputs = [None if value is None else values.get(value, value) for value in inner.inputs]
        twin = Node(inner.op, inputs, inner.outputs, inner.attrs, inner.name)
        unfold = decomposition(twin)
        results = unfold(w, twin) if unfold else w.emit_many(inner.op, inputs, len(inner.outputs), **inner.attrs)
        values.update(zip(inner.outputs, results, strict=True))
    (result,) = (values[value] for value in body.outputs)
    return [w.emit("ScatterND", base, rows, result, reduction="add" if node.attrs.get("adds") else "none")]


@_UNFOLDINGS.add("RecurrentSteps")
def _recurrent(w: Writer, node: Node) -> Sequence[Value]:
    """RecurrentSteps as ONNX's RNN, GRU or LSTM, whose input is X times W already.

    So the weight of the ONNX layer is a constant that only selects the columns of each direction.
    """
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


@_UNFOLDINGS.add("Iota")
def _iota(w: Writer, node: Node) -> Sequence[Value]:
    """Iota as the sum of `start` and, for each axis, a Range times the step along that axis."""
    shape, steps = node.output.shape, node.attrs["steps"]
    start = node.attrs.get("start", 0)
    assert isinstance(steps, tuple) and isinstance(start, int | SymDim), registry.describe(node)
    zero, one = (w.emitter.constant(np.array(number, np.int64)) for number in (0, 1))
    total = w.dims((start,)) if shape else w.emitter("Squeeze", w.dims((start,)))
    for axis, (extent, step) in enumerate(zip(shape, steps, strict=True)):
        assert isinstance(step, int | SymDim), registry.describe(node)
        line = w.emit("Mul", w.emit("Range", zero, w.emitter("Squeeze", w.dims((extent,))), one), w.dims((step,)))
        trailing = tuple(range(1, len(shape) - axis))
        total = w.emit("Add", total, w.emit("Unsqueeze", line, axes=trailing) if trailing else line)
    return [_cast(w, total, node.output.dtype)]


@_UNFOLDINGS.add("StopGradient", "Boundary")
def _first_input(w: Writer, node: Node) -> Sequence[Value]:
    return [w.emit("Identity", node.inputs[0])]


@_UNFOLDINGS.add("RoundableRows")
def _roundable_rows(w: Writer, node: Node) -> Sequence[Value]:
    """An Identity; the exporter writes its attribute as metadata (`annotations.py`)."""
    return [w.emit("Identity", node.inputs[0], **{ROWS: INT8})]


@_UNFOLDINGS.add("MaxPoolGradient")
def _max_pool_gradient(w: Writer, node: Node) -> Sequence[Value]:
    """MaxPoolGradient as zeros to which dY is added at the indices of the maxima, the second output of MaxPool."""
    x, dy = _channels_first(w, node, node.inputs[0]), _channels_first(w, node, node.inputs[1])
    own = {name: attr for name, attr in node.attrs.items() if name != "layout"}
    indices = w.emit_many("MaxPool", [x], 2, **own)[1]
    shape = w.emit("Shape", x)
    zeros = w.emit("ConstantOfShape", shape, value=np.zeros(1, x.dtype.numpy))
    zeros, indices, updates = (w.emit("Reshape", value, shape=(-1,)) for value in (zeros, indices, dy))
    total = w.emit("ScatterElements", zeros, indices, updates, axis=0, reduction="add")
    return [_to_layout(w, node, w.emit("Reshape", total, shape, allowzero=1))]


@_UNFOLDINGS.add("ConvWeightGradient")
def _conv_weight_gradient(w: Writer, node: Node) -> Sequence[Value]:
    """ConvWeightGradient as a convolution of X with dY as its weight for each group, concatenated.

    In both, batch and channels are swapped.
    """
    x, dy = _channels_first(w, node, node.inputs[0]), _channels_first(w, node, node.inputs[1])
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
    gradient = w.emit("Slice", full, starts=(0,) * len(pads), ends=window.kernel, axes=axes)
    return w.transposed(gradient, swap)


def _plain_conv(w: Writer, node: Node) -> Value:
    """The result of a FusedConv or PooledConv before epilogue and pooling: convolution plus bias, channels first.

    Its element type is that of the product (see `lathe.core.ops.nn.narrow_products`).
    """
    own = {
        name: attr
        for name, attr in node.attrs.items()
        if name not in ("layout", "epilogue", "pool", "pad_value", "exact")
    }
    x, weight, bias = _channels_first(w, node, node.inputs[0]), node.inputs[1], node.input(2)
    assert weight is not None, registry.describe(node)
    fill = registry.NodeView(registry.get(node.op), node).attr("pad_value")
    if _are_bytes(x, weight):
        zero = w.emitter.constant(np.asarray(fill, x.dtype.numpy))
        result = w.emit("ConvInteger", x, weight, zero, **own)
    else:
        x, weight = _in_product_type(w, x, weight)
        x = x if not fill else w.emit("Sub", x, w.emitter.constant(np.asarray(fill, x.dtype.numpy)))
        result = w.emit("Conv", x, weight, **own)
    if fill:
        result = _add_per_channel(w, result, _fill_sum(w, weight, result.dtype, fill))
    return result if bias is None else _add_per_channel(w, result, bias)


def _fill_sum(w: Writer, weight: Value, dtype: DType, fill: int) -> Value:
    """For each output channel, the convolution's result for a window in which every element is `fill`: a vector."""
    axes = tuple(range(1, len(weight.shape)))
    total = w.emit("ReduceSum", _cast(w, weight, dtype), axes=axes, keepdims=0)
    return w.emit("Mul", total, w.emitter.constant(np.asarray(fill, dtype.numpy)))


def _add_per_channel(w: Writer, image: Value, added: Value) -> Value:
    """`image`, channels first, plus the vector `added`, which has one number for each channel."""
    return w.emit("Add", image, w.emit("Reshape", added, shape=(-1, *(1,) * (len(image.shape) - 2))))


def _product(w: Writer, a: Value, b: Value) -> Value:
    if _are_bytes(a, b):
        return w.emit("MatMulInteger", a, b)
    return w.emit("MatMul", *_in_product_type(w, a, b))


def _are_bytes(a: Value, b: Value) -> bool:
    return (a.dtype, b.dtype) == (DType.UINT8, DType.INT8)


def _in_product_type(w: Writer, a: Value, b: Value) -> tuple[Value, Value]:
    """Both operands in the type of their product, which is that of `b`.

    If the types differ, `b` is rounded to the type of `a` before.
    """
    if a.dtype is b.dtype:
        return a, b
    return _cast(w, a, b.dtype), _cast(w, _cast(w, b, a.dtype), b.dtype)


def _widen(w: Writer, value: Value) -> Value:
    """The value cast to float32 if its type is narrower, otherwise unchanged."""
    return _cast(w, value, DType.FLOAT32) if value.dtype.itemsize < DType.FLOAT32.itemsize else value


def _cast(w: Writer, value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else w.emit("Cast", value, to=dtype.onnx_code)


def _with_transposes(w: Writer, node: Node) -> Sequence[Value]:
    """The node's operator with channels first, between a transpose of its first input and one of its only output."""
    own = {name: attr for name, attr in node.attrs.items() if name != "layout"}
    result = w.emit(node.op, _channels_first(w, node, node.inputs[0]), *node.inputs[1:], **own)
    return [_to_layout(w, node, result)]


def _in_one_type(w: Writer, node: Node) -> Sequence[Value]:
    """The operator with all inputs of at most 2 bytes per element as float32, since ONNX requires one type.

    Its only output is cast to the type of the node's output.
    """
    inputs = [None if value is None else _widen(w, value) for value in node.inputs]
    return [_cast(w, w.emit(node.op, *inputs, **node.attrs), node.output.dtype)]


def _channels_first_perm(node: Node, rank: int) -> tuple[int, ...] | None:
    """The permutation of `rank` axes from the node's layout to channels first; None if that is its layout."""
    layouts = {"NHWC": (0, rank - 1, *range(1, rank - 1)), "CHWN": (rank - 1, *range(rank - 1))}
    return layouts.get(str(node.attrs.get("layout")))


def _channels_first(w: Writer, node: Node, value: Value | None) -> Value:
    """An image in the node's layout, transposed to channels first."""
    assert value is not None, f"{registry.describe(node)} has no image"
    rank = len(value.shape)
    return w.transposed(value, _channels_first_perm(node, rank))


def _to_layout(w: Writer, node: Node, value: Value) -> Value:
    """An image with channels first, transposed to the node's layout."""
    perm = _channels_first_perm(node, len(value.shape))
    return w.transposed(value, None if perm is None else inverse(perm))


def _permute(w: Writer, node: Node, value: Value, perm: str) -> Value:
    return w.transposed(value, node.attrs.get(perm))


def _apply_epilogue(w: Writer, node: Node, computed: Value, extras: Sequence[Value]) -> Value:
    """`computed` after the node's epilogue, which also reads `extras`; `computed` itself if it has none."""
    if node.attrs.get("epilogue") is None:
        return computed
    return w.inlined(_body(node, "epilogue"), [computed, *extras])[0]


def _body(node: Node, name: str) -> Graph:
    body = node.attrs[name]
    assert isinstance(body, Graph)
    return body


def _present_inputs(node: Node) -> Sequence[Value]:
    return [value for value in node.inputs if value is not None]


def _extras(node: Node) -> Sequence[Value]:
    """The present inputs of a FusedConv from the fourth on, which its epilogue reads."""
    return [value for value in node.inputs[3:] if value is not None]
