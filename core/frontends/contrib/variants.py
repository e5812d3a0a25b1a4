"""Variants of ONNX operators, with other names, attributes, or types of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.contrib.lowering_table import constant, emit_output, int64s, lowers, present_attrs
from lathe.core.frontends.opsets import OnnxNode
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType

_MODES = {"bilinear": "linear", "bicubic": "cubic"}
_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "strides")


@lowers("Trilu")
def _trilu(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Trilu", *node.inputs, **present_attrs(node, "upper"))


@lowers("GridSample")
def _grid_sample(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    mode: Any = node.attrs.get("mode", "bilinear")
    attrs = present_attrs(node, "align_corners", "padding_mode")
    return emit_output(e, node, "GridSample", node.required(0), node.required(1), mode=_MODES.get(mode, mode), **attrs)


@lowers("GatherND")
def _gather_nd(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "GatherND", node.required(0), _as_int64(e, node.required(1)))


def _as_int64(e: Emitter, x: Value) -> Value:
    return x if x.dtype is DType.INT64 else e("Cast", x, to=DType.INT64.onnx_code)


@lowers("Pad")
def _pad(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Pad of com.microsoft, whose pads may be a matrix [1, 2 * rank], and its value a vector of one element."""
    value = node.input(2)
    value = None if value is None else e("Reshape", value, int64s(e))
    pads = e("Reshape", node.required(1), int64s(e, -1))
    return emit_output(e, node, "Pad", node.required(0), pads, value, **present_attrs(node, "mode"))


@lowers("Range")
def _range(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Range, whose inputs may be vectors of one element, and whose step is 1 by default."""
    start, limit = (e("Reshape", node.required(index), int64s(e)) for index in (0, 1))
    delta = node.input(2)
    step = constant(e, 1, start) if delta is None else e("Reshape", delta, int64s(e))
    return emit_output(e, node, "Range", start, limit, step)


@lowers("Unique")
def _unique(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """Unique without sorting. Outputs: the unique elements, the index of each input element among them, the counts.

    ONNX's Unique, which it is lowered to, has a further output after the first one: the indices of first occurrences.
    """
    names = [*node.outputs, *(e.session.fresh(f"{node.label}.unused") for _ in range(4 - len(node.outputs)))]
    values = e.emit("Unique", [node.required(0)], {"sorted": 0}, [names[0], names[3], *names[1:3]], node.label)
    return [values[0], *values[2:]]


@lowers("ConvTransposeWithDynamicPads")
def _transposed_conv(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """ConvTranspose whose pads, which crop the result, are input 2; for computed pads, a Slice crops it in the run."""
    x, weight, pads, bias = node.required(0), node.required(1), node.input(2), node.input(3)
    attrs = present_attrs(node, *_CONV, "output_padding")
    known = e.value_of(pads)
    if pads is None or known is not None:
        pad_attr = {} if known is None else {"pads": tuple(map(int, known.ravel()))}
        return emit_output(e, node, "ConvTranspose", x, weight, bias, **attrs, **pad_attr)
    full = e("ConvTranspose", x, weight, bias, **attrs)
    count = node.rank(0) - 2
    starts = e("Slice", pads, int64s(e, 0), int64s(e, count))
    end_pads = e("Slice", pads, int64s(e, count), int64s(e, 2 * count))
    ends = e("Sub", e("Shape", full, start=2), end_pads)
    return emit_output(e, node, "Slice", full, starts, ends, int64s(e, *range(2, 2 + count)))


@lowers("QLinearConv")
def _quantized_conv(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """QLinearConv with channels in axis 1, or last with `channels_last`. Weights have ONNX's layout in both cases."""
    attrs = present_attrs(node, *_CONV, "pads")
    if not node.attrs.get("channels_last"):
        return emit_output(e, node, "QLinearConv", *node.inputs, **attrs)
    rank = node.rank(0)
    x = e("Transpose", node.required(0), perm=(0, rank - 1, *range(1, rank - 1)))
    y = e("QLinearConv", x, *node.inputs[1:], **attrs)
    return emit_output(e, node, "Transpose", y, perm=(0, *range(2, rank), 1))


@lowers("MatMulInteger16")
def _product_of_shorts(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """The product of int16 matrices as int32."""
    a, b = (e("Cast", node.required(index), to=DType.INT32.onnx_code) for index in (0, 1))
    return emit_output(e, node, "MatMul", a, b)


@lowers("SampleOp")
def _echo(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    return emit_output(e, node, "Identity", node.required(0))


@lowers("CDist")
def _distances(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """The distance of each row of A [M,N] to each row of B [K,N]: [M,K], from |a|^2 + |b|^2 - 2ab.

    The attribute `metric` is "euclidean" or "sqeuclidean" (the squares).
    """
    metric, a, b = node.attrs.get("metric", "sqeuclidean"), node.required(0), node.required(1)
    if metric not in ("sqeuclidean", "euclidean"):
        raise UnsupportedError(f"metric is {metric!r}, expected sqeuclidean or euclidean", where=node.where)
    squares = [e("ReduceSumSquare", x, int64s(e, 1), keepdims=1) for x in (a, b)]
    products = e("Mul", e("MatMul", a, e("Transpose", b, perm=(1, 0))), constant(e, -2.0, a))
    total = e("Add", e("Add", products, squares[0]), e("Transpose", squares[1], perm=(1, 0)))
    if metric == "sqeuclidean":
        return emit_output(e, node, "Max", total, constant(e, 0.0, a))
    return emit_output(e, node, "Sqrt", e("Max", total, constant(e, 0.0, a)))


@lowers("UnfoldTensor")
def _sliding_windows(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """All windows along axis `dim`, one every `step` elements; the `size` elements of each form a new last axis."""
    rank = node.rank(0)
    given: dict[str, Any] = {"dim": -1, "step": 1, **node.attrs}
    axis, size = given["dim"] % rank, given["size"]
    extent = e("Squeeze", e("Shape", node.required(0), start=axis, end=axis + 1))
    zero, step = (e.constant(number, dtype=DType.INT64) for number in (0, given["step"]))
    limit = e("Sub", extent, e.constant(size - 1, dtype=DType.INT64))
    indices = e("Add", e("Unsqueeze", e("Range", zero, limit, step), int64s(e, 1)), int64s(e, *range(size)))
    windows = e("Gather", node.required(0), indices, axis=axis)
    return emit_output(e, node, "Transpose", windows, perm=(*range(axis + 1), *range(axis + 2, rank + 1), axis + 1))
