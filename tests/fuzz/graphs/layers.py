"""Rules for products, images, normalisations, recurrence and quantized numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from tests.fuzz.graphs.grower import Grower
from tests.fuzz.graphs.rules import rule
from tests.fuzz.graphs.values import F32, F64, FLOATS, I8, I32, I64, U8, Item, UnfitNode


def _width(f: Grower, x: Item, axis: int) -> int:
    width = x.fixed(axis, f.alive)
    if not width:
        raise UnfitNode("no fixed extent")
    return width


def _tamed(f: Grower, x: Item) -> Item:
    """The value, in half of the cases through Tanh, since the operator before may have made it large."""
    return f.one("Tanh", x) if f.on_frequent(0.5) else x


def _residual(f: Grower, x: Item, y: Item) -> None:
    """Sometimes combine the result with the input that it was computed from, which kernels fuse."""
    if x.dtype == y.dtype and f.on_frequent(0.35):
        f.one(f.of(("Add", "Mul", "Sub")), y, x)


@rule("MatMul", weight=3)
def _matmul(f: Grower) -> None:
    x = f.number((1, 2, 3, 4))
    width = _width(f, x, -1)
    kind = f.kind(weight=4, turned=1, part=1.5, own=1, left=1)
    if kind == "turned" and (x.rank(f.alive) or 0) >= 2:
        rank = x.rank(f.alive) or 2
        perm = [*range(rank - 2), rank - 1, rank - 2]
        turned = f.one("Transpose", x, perm=perm)
        _tamed(f, f.one("MatMul", *f.of(((x, turned), (turned, x)))))
    elif kind == "part" and width > 1:
        cut = 1 + f.choose(width - 1)
        rank = x.rank(f.alive) or 1
        part = f.slice(x, [rank - 1], [0], [cut])
        made = f.one("MatMul", part, f.fit(x.dtype, (cut, width), x))
        f.one(f.of(("Add", "Sub")), made, x)
    elif kind == "own":
        fits = [v for v in f.visible() if v.dtype == x.dtype and v.rank(f.alive) == 2 and v.fixed(0, f.alive) == width]
        if not fits:
            raise UnfitNode("nothing to multiply with")
        _tamed(f, f.one("MatMul", x, f.of(fits)))
    elif kind == "left" and (x.rank(f.alive) or 0) >= 2:
        depth = _width(f, x, -2)
        _tamed(f, f.one("MatMul", f.fit(x.dtype, (f.of((1, 3, depth)), depth), x), x))
    else:
        n = f.of((1, 3, 8, width, width))
        made = f.one("MatMul", x, f.fit(x.dtype, (width, n), x))
        if f.on_frequent(0.5):
            made = f.one("Add", made, f.fit(x.dtype, (n,), x))
        if f.on_frequent(0.3):
            made = f.one("Relu", made)
        if n == width:
            _residual(f, x, made)
        elif f.on_frequent(0.3):
            f.one("Tanh", made)


@rule("Gemm", since=7, weight=1.5)
def _gemm(f: Grower) -> None:
    x = f.number((2,))
    turned_a, turned_b = int(f.on_frequent(0.2)), f.choose(2)
    depth = _width(f, x, 0 if turned_a else 1)
    n = f.of((1, 4, 8, depth))
    w = f.fit(x.dtype, (n, depth) if turned_b else (depth, n), x)
    attrs: dict[str, Any] = {
        "transA": turned_a,
        "transB": turned_b,
        "alpha": f.of((1.0, 0.5)),
        "beta": f.of((1.0, 2.0)),
    }
    rows = x.fixed(1 if turned_a else 0, f.alive)
    kind = f.kind(vector=2, none=1, same=2, scalar=0.5, other=1)
    if kind == "none" and f.opset < 11:
        kind = "vector"
    c: Item | None = None
    if kind == "vector":
        c = f.fit(x.dtype, (n,), x)
    elif kind == "scalar":
        c = f.fit(x.dtype, (), x) if rows else f.fit(x.dtype, (1, 1), x)
    elif kind == "other":  # as many rows as the product, but known only at run time
        lines = f.one("Gather", f.one("Shape", x), f.vector([1 if turned_a else 0]), axis=0)
        lines = f.one("Add", lines, f.nothing())
        c = f.one("Expand", f.fit(x.dtype, (n,), x), f.one("Concat", lines, f.vector([n]), axis=0))
    elif kind == "same":
        shapes = [((s[1] if turned_a else s[0]), n) for s in x.shapes(f.alive)]
        fits = [v for v in f.visible() if v.dtype == x.dtype and v.shapes(f.alive) == shapes]
        c = f.of(fits) if fits else f.fit(x.dtype, (n,), x)
    made = f.one("Gemm", x, w, c, **attrs)
    _residual(f, x, made) if n == depth and not turned_a else None


@rule("Einsum", since=12)
def _einsum(f: Grower) -> None:
    x = f.pick((F32, F64), (2, 3))
    f.without_empty(x)
    if x.rank(f.alive) == 2:
        y = f.of([x, f.fit(x.dtype, (_width(f, x, 1), 3), x)])
        f.one("Einsum", *((x, y, "ij,ij->i") if y is x else (x, y, "ij,jk->ik"))[:2],
              equation="ij,ij->i" if y is x else "ij,jk->ik")  # fmt: skip
    else:
        f.one("Einsum", x, x, equation=f.of(("bij,bkj->bik", "bij,bij->bi", "bij,bij->bj")))


def _spatial(f: Grower, x: Item, op: str, **extra: Any) -> dict[str, Any]:
    """Random kernel, strides, pads and dilations for the axes after the channels."""
    count = (x.rank(f.alive) or 3) - 2
    sizes = [min(x.extents(axis + 2, f.alive)) for axis in range(count)]
    kernel = [f.of([k for k in (1, 2, 3) if k <= size] or [1]) for size in sizes]
    attrs: dict[str, Any] = {"kernel_shape": kernel, **extra}
    if f.on_frequent(0.5):
        attrs["strides"] = [f.of((1, 1, 2)) for _ in range(count)]
    style = f.kind(none=1, explicit=2, same=1)
    if style == "explicit":
        attrs["pads"] = [f.choose(max(k, 1)) for k in (*kernel, *kernel)]
    elif style == "same":
        attrs["auto_pad"] = f.of(("SAME_UPPER", "SAME_LOWER", "VALID"))
    return attrs


@rule("Conv", weight=3)
def _conv(f: Grower) -> None:
    x = f.pick((F32, F32, F64) if f.on_frequent(0.2) else (F32,), (3, 4))
    channels = _width(f, x, 1)
    kind = f.kind(plain=3, part=1.5)
    source = x
    if kind == "part" and channels > 1:
        cut = 1 + f.choose(channels - 1)
        source = f.slice(x, [1], [0], [cut])
    depth = _width(f, source, 1)
    group = f.of([1, 1, depth])
    m = f.of((channels, channels, 2, 4)) if group == 1 else depth * f.of((1, 2))
    same = f.on_frequent(0.5)
    attrs = _spatial(f, source, "Conv")
    if same:
        attrs = {"kernel_shape": [f.of((1, 3))] * len(attrs["kernel_shape"]), "auto_pad": "SAME_UPPER"}
    if f.on_frequent(0.15):
        attrs["dilations"] = [f.of((1, 2)) for _ in attrs["kernel_shape"]]
    w = f.fit(x.dtype, (m, depth // group, *attrs["kernel_shape"]), x)
    bias = f.fit(x.dtype, (m,), x) if f.on_frequent(0.5) else None
    made = f.one("Conv", source, w, bias, group=group, **attrs)
    if f.on_frequent(0.4):
        made = f.one(f.of(("Relu", "Sigmoid", "Tanh")), made)
    if made.shapes(f.alive) == x.shapes(f.alive):
        _residual(f, x, made)


@rule("ConvTranspose")
def _conv_transpose(f: Grower) -> None:
    x = f.pick((F32,), (3, 4))
    channels = _width(f, x, 1)
    count = (x.rank(f.alive) or 3) - 2
    kernel, m = [f.of((1, 2, 3)) for _ in range(count)], f.of((1, 2, 4))
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": [f.of((1, 2)) for _ in range(count)]}
    if f.on_frequent(0.4):
        attrs["pads"] = [f.choose(max(k, 1)) for k in (*kernel, *kernel)]
    bias = f.fit(F32, (m,), x) if f.on_frequent(0.5) else None
    f.one("ConvTranspose", x, f.fit(F32, (channels, m, *kernel), x), bias, **attrs)


@rule("MaxPool", "AveragePool", "LpPool", weight=1.2)
def _pool(f: Grower, op: str) -> None:
    x = f.pick((F32,), (3, 4))
    f.without_empty(x)  # windows would be empty
    attrs = _spatial(f, x, op)
    if op == "MaxPool" and f.opset >= 10 and f.on_frequent(0.2):
        attrs["ceil_mode"] = 1
    if op == "AveragePool" and f.on_frequent(0.5):
        attrs["count_include_pad"] = 1
    outputs = 2 if op == "MaxPool" and f.opset >= 8 and f.on_frequent(0.2) else 1
    f.emit(op, [x], outputs=outputs, **attrs)


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", weight=1.3)
def _global_pool(f: Grower, op: str) -> None:
    f.one(op, f.pick((F32,), (3, 4)))


@rule("Resize", since=10)
def _resize(f: Grower) -> None:
    x = f.pick((F32,), (4,))
    scales = _factors(f) if f.on_frequent(0.3) else f.constant([1, 1, f.of((1, 2, 3)), f.of((1, 2, 0.5))], np.float32)
    mode = f.of(("nearest", "linear"))
    if f.opset == 10:
        f.one("Resize", x, scales, mode=mode)
        return
    attrs: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": f.of(("asymmetric", "half_pixel"))}
    if mode == "nearest":
        attrs["nearest_mode"] = "floor"
    region = None if f.opset >= 13 else f.constant([], np.float32)
    if f.on_frequent(0.25):  # only this mode reads `roi`; ONNX Runtime does not crop along an axis whose extent stays
        attrs["coordinate_transformation_mode"] = "tf_crop_and_resize"
        region = f.constant([0, 0, f.of((0, 0.125)), 0.25, 1, 1, f.of((0.75, 1)), 1], np.float32)
        f.one("Resize", x, region, f.constant([1, 1, f.of((2, 3)), 2], np.float32), **attrs)
        return
    if f.on_frequent(0.5):
        f.one("Resize", x, region, scales, **attrs)
        return
    shape = f.one("Shape", x)
    front = f.slice(shape, [0], [0], [2])
    sizes = f.one("Concat", front, f.wholes([(1, 9)] * 2, x), axis=0)
    f.one("Resize", x, region, None if f.opset >= 13 else f.constant([], np.float32), sizes, **attrs)


def _factors(f: Grower) -> Item:
    """Factors for the extents of an image: one number for both, computed from an extent."""
    both = f.one("Expand", f.count(1, 3), f.vector([2]))
    moved = f.one("Cast", both, to=helper.np_dtype_to_tensor_dtype(F32))
    return f.one("Concat", f.constant([1, 1], np.float32), moved, axis=0)


@rule("Upsample", since=7, until=9, weight=2)
def _upsample(f: Grower) -> None:
    x = f.pick((F32,), (4,))
    scales = [1.0, 1.0, 2.0, float(f.of((1, 2)))]
    if f.opset < 9:
        f.one("Upsample", x, mode=f.of(("nearest", "linear")), scales=scales)
    else:
        factors = _factors(f) if f.on_frequent(0.3) else f.constant(scales, np.float32)
        f.one("Upsample", x, factors, mode="nearest")


@rule("GridSample", since=16, weight=2)
def _grid_sample(f: Grower) -> None:
    x = f.pick((F32,), (4,))
    n = f.one("Gather", f.one("Shape", x), f.vector([0]), axis=0)
    flat = f.fit(F32, (1, 3, 2, 2), x)
    grid = f.one("Expand", flat, f.one("Concat", n, f.vector([3, 2, 2]), axis=0))
    mode = f.of(("bilinear", "nearest")) if f.opset < 20 else f.of(("linear", "nearest"))
    f.one("GridSample", x, f.one("Mul", f.one("Tanh", grid), f.constant(0.9, np.float32)), mode=mode)


@rule("RoiAlign", since=10, weight=2)
def _roi_align(f: Grower) -> None:
    x = f.pick((F32,), (4,))
    count = 1 + f.choose(3)
    corners = f.constant(np.sort(f.world.numbers.uniform(0, 4, (count, 2, 2)), axis=1).reshape(count, 4), np.float32)
    images = f.one("Expand", f.index(x, 0), f.vector([count])) if f.on_frequent(0.4) else f.vector([0] * count)
    f.one("RoiAlign", x, corners, images, output_height=2, output_width=3, sampling_ratio=2)


@rule("BatchNormalization", since=7, weight=1.2)
def _batch_norm(f: Grower) -> None:
    x = f.pick((F32, F64), (2, 3, 4))
    c = _width(f, x, 1)
    scale, bias, mean = (f.fit(x.dtype, (c,), x) for _ in range(3))
    variance = f.weight(x.dtype, (c,), 0.5, 2.0)
    if f.on_frequent(0.3):
        variance = f.one("Add", f.one("Abs", f.fit(x.dtype, (c,), x)), f.constant(0.5, x.dtype))
    f.one("BatchNormalization", x, scale, bias, mean, variance, epsilon=0.01)


def _largest(f: Grower, item: Item) -> float:
    return max(float(np.abs(item.at(case)).max(initial=0.0)) for case in f.alive)


@rule("InstanceNormalization", since=6)
def _instance_norm(f: Grower) -> None:
    x = f.pick((F32,), (3, 4), lambda v: _largest(f, v) < 50)
    c = _width(f, x, 1)
    scale, bias = f.fit(F32, (c,), x), f.fit(F32, (c,), x)
    if _largest(f, x) * _largest(f, scale) >= 50:
        raise UnfitNode("ONNX Runtime subtracts means after it has multiplied them: large ones leave few digits")
    f.one("InstanceNormalization", x, scale, bias, epsilon=0.05)


@rule("LayerNormalization", since=17, weight=1.5)
def _layer_norm(f: Grower) -> None:
    x = f.pick((F32, F64), (2, 3, 4))
    rank = x.rank(f.alive) or 2
    axis = 1 + f.choose(rank - 1)
    shape = [_width(f, x, a) for a in range(axis, rank)]
    bias = f.fit(x.dtype, shape, x) if f.on_frequent(0.5) else None
    made = f.one("LayerNormalization", x, f.fit(x.dtype, shape, x), bias, axis=axis, epsilon=0.05)
    f.one(f.of(("Add", "Sub")), made, f.like(made)) if f.on_frequent(0.4) else None


@rule("LayerNormalization", weight=1.0)
def _written_layer_norm(f: Grower) -> None:
    """Layer normalization from its parts, as older exporters wrote it; in some graphs combined with another operand."""
    x = f.pick((F32,), (2, 3))
    axis = (x.rank(f.alive) or 2) - 1
    mean = _reduced(f, "ReduceMean", x, axis)
    centred = f.one("Sub", x, mean)
    square = f.one("Mul", centred, centred) if f.on_frequent(0.5) else f.one("Pow", centred, f.constant(2, np.float32))
    variance = _reduced(f, "ReduceMean", square, axis)
    deviation = f.one("Sqrt", f.one("Add", variance, f.constant(0.05, np.float32)))
    made = f.one("Div", centred, deviation)
    f.one(f.of(("Add", "Sub", "Mul")), made, f.like(made)) if f.on_frequent(0.6) else None


def _reduced(f: Grower, op: str, x: Item, axis: int) -> Item:
    if not x.fixed(axis, f.alive):
        raise UnfitNode("the mean of nothing")
    return f.one(op, x, axes=[axis]) if f.opset < 18 else f.one(op, x, f.vector([axis]))


@rule("RMSNormalization", since=23)
def _rms_norm(f: Grower) -> None:
    x = f.pick((F32,), (2, 3))
    f.one("RMSNormalization", x, f.fit(F32, (_width(f, x, -1),), x), axis=-1, epsilon=0.05)


@rule("GroupNormalization", since=21)
def _group_norm(f: Grower) -> None:
    x = f.pick((F32,), (3, 4))
    c = _width(f, x, 1)
    groups = f.of([g for g in (1, 2, 3, c) if c % g == 0])
    f.one("GroupNormalization", x, f.fit(F32, (c,), x), f.fit(F32, (c,), x), num_groups=groups, epsilon=0.05)


@rule("LRN", weight=1.2)
def _lrn(f: Grower) -> None:
    f.one("LRN", f.pick((F32,), (4,)), size=f.of((1, 3)), alpha=0.1, beta=0.6)


@rule("LpNormalization", weight=1)
def _lp_norm(f: Grower) -> None:
    x = f.pick((F32, F64), (2, 3))
    positive = f.one("Add", f.one("Abs", x), f.constant(0.3, x.dtype))
    f.one("LpNormalization", positive, p=f.of((1, 2)), axis=f.of((-1, 1)))


@rule("MeanVarianceNormalization", since=9, weight=1.2)
def _mean_variance(f: Grower) -> None:
    f.one("MeanVarianceNormalization", f.pick((F32,), (4,)), axes=f.of(([0, 2, 3], [2, 3], [1])))


@rule("RNN", "GRU", "LSTM", since=7, weight=1.5)
def _recurrent(f: Grower, op: str) -> None:
    x = f.pick((F32,), (3,))
    if f.on_frequent(0.5):
        x = f.one("Transpose", x, perm=[1, 0, 2])
    f.without_empty(x)
    width, h = _width(f, x, 2), f.of((2, 4))
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    w, r = f.fit(F32, (1, gates * h, width), x), f.fit(F32, (1, gates * h, h), x)
    bias = f.fit(F32, (1, 2 * gates * h), x) if f.on_frequent(0.6) else None
    lengths = _lengths(f, x) if f.on_frequent(0.5) else None
    rows = x.fixed(1, f.alive)
    starts = [f.fit(F32, (1, rows, h), x) if rows and f.on_frequent(0.3) else None for _ in range(1 + (op == "LSTM"))]
    peepholes = [f.fit(F32, (1, 3 * h), x)] if op == "LSTM" and f.on_frequent(0.3) else []
    extra = {"linear_before_reset": f.choose(2)} if op == "GRU" else {}
    made = f.emit(
        op, [x, w, r, bias, lengths, *starts, *peepholes], outputs=2 + (op == "LSTM" and f.on_frequent(0.3)),
        hidden_size=h, **extra,
    )  # fmt: skip
    f.one("Squeeze", made[0], axes=[1]) if f.opset < 13 and f.on_frequent(0.5) else None


def _lengths(f: Grower, x: Item) -> Item | None:
    """The sequence lengths of all rows, at least 1: constants, or one number for all rows that may be computed."""
    rows, least = x.fixed(1, f.alive), min(x.extents(0, f.alive))
    if rows and f.on_frequent(0.5):
        return f.constant(f.world.numbers.integers(1, least + 1, rows), np.int32)
    if f.opset < 8:
        return None
    n = f.one("Gather", f.one("Shape", x), f.vector([1]), axis=0)
    return f.one("Cast", f.one("Expand", f.whole(1, least, x=x), n), to=helper.np_dtype_to_tensor_dtype(I32))


@rule("QuantizeLinear", since=10, weight=1.5)
def _quantize(f: Grower) -> None:
    x = f.pick((F32,))
    kind = f.of((U8, I8))
    if kind == U8 and f.on_frequent(0.3):  # NaN becomes 0 for any zero point; as int8 ONNX Runtime gives the minimum
        holes = f.world.numbers.uniform(-1, 1, 5).astype(np.float32)
        holes[f.choose(5)] = np.nan
        x = f.constant(holes)
    zero = f.constant(f.choose(20), kind) if f.on_frequent(0.8) else None
    scale = f.constant(f.of((0.02, 0.05, 0.1)), np.float32)
    y = f.one("QuantizeLinear", x, scale, zero)
    if f.on_frequent(0.6):
        f.one("DequantizeLinear", y, scale, zero if zero is not None else f.constant(0, y.dtype))


@rule("DequantizeLinear", since=10)
def _dequantize(f: Grower) -> None:
    x = f.pick((U8, I8, I32))
    scale = f.constant(f.of((0.02, 0.1)), np.float32) if f.on_frequent(0.7) else f.one("Abs", f.fit(F32, ()))
    f.one("DequantizeLinear", x, scale, f.constant(0 if x.dtype == I32 else f.choose(9), x.dtype))


@rule("DynamicQuantizeLinear", since=11, weight=1.5)
def _dynamic_quantize(f: Grower) -> None:
    x = f.pick((F32,), where=lambda v: all(v.at(case).any() for case in f.alive))  # the scale for zeros is arbitrary
    f.emit("DynamicQuantizeLinear", [x], outputs=3)


@rule("MatMulInteger", since=10, weight=2)
def _matmul_integer(f: Grower) -> None:
    x = f.pick((U8, I8), (2, 3))
    w = f.fit(f.of((U8, I8)), (_width(f, x, -1), 3), x)
    zeros = [f.constant(f.choose(5), x.dtype), f.constant(f.choose(5), w.dtype)] if f.on_frequent(0.6) else []
    f.one("MatMulInteger", x, w, *zeros)


@rule("ConvInteger", since=10, weight=2)
def _conv_integer(f: Grower) -> None:
    x = f.pick((U8,), (4,))
    w = f.fit(U8, (2, _width(f, x, 1), 1, 1), x)
    f.one("ConvInteger", x, w, *(f.constant(f.choose(5), U8) for _ in range(1 + f.choose(2))))


# Scales of two factors and of the result: no scaled sum is a half, whose rounding depends on the order of products.
_FACTORS = (0.02131, 0.03217, 0.29173)


@rule("QLinearMatMul", since=10, weight=2)
def _qlinear_matmul(f: Grower) -> None:
    x = f.pick((U8,), (2, 3))
    w = f.fit(U8, (_width(f, x, -1), 3), x)
    scale = [f.constant(s, np.float32) for s in _FACTORS]
    zero = [f.constant(f.choose(5), U8) for _ in range(3)]
    f.one("QLinearMatMul", x, scale[0], zero[0], w, scale[1], zero[1], scale[2], zero[2])


@rule("QLinearConv", since=10, weight=2.5)
def _qlinear_conv(f: Grower) -> None:
    x = f.pick((U8,), (4,))
    w = f.fit(U8, (3, _width(f, x, 1), f.of((1, 2)), 1), x)
    scale = [f.constant(s, np.float32) for s in _FACTORS]
    zero = [f.constant(f.choose(5), U8) for _ in range(3)]
    bias = f.fit(I32, (3,), x) if f.on_frequent(0.5) else None
    f.one("QLinearConv", x, scale[0], zero[0], w, scale[1], zero[1], scale[2], zero[2], bias)


@rule("Det", since=11, weight=1.5)
def _det(f: Grower) -> None:
    x = f.fit(F32, f.of(((2, 2), (2, 3, 3))))
    f.one("Det", x)


_REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd",
    "ReduceLogSumExp", "ReduceLogSum",
)  # fmt: skip


@rule(*_REDUCTIONS, weight=0.8)
def _reduce(f: Grower, op: str) -> None:
    # Integer results of some operators are rounded and truncated, and products overflow.
    whole = op not in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd")
    x = f.pick((*FLOATS, *((I32, I64) if whole else ())), (1, 2, 3, 4))
    if op in ("ReduceL2", "ReduceLogSum"):
        x = f.one("Add", f.one("Abs", x), f.constant(0.5 if x.dtype in FLOATS else 1, x.dtype))
    if op == "ReduceMean":
        f.without_empty(x)  # an empty mean is 0 in ONNX Runtime, and NaN in the reference
    rank = x.rank(f.alive) or 1
    axes = sorted(f.world.rng.sample(range(rank), 1 + f.choose(min(rank, 2))))
    if f.opset >= 11 and f.on_frequent(0.3):
        axes = [axis - rank for axis in axes]
    attrs = {"keepdims": f.choose(2)}
    if f.opset < (13 if op == "ReduceSum" else 18):
        made = f.one(op, x, **attrs, **({"axes": axes} if f.on_frequent(0.9) else {}))
    elif f.on_frequent(0.2) and f.opset >= 12:
        made = f.one(op, x, f.whole(0, rank - 1, x=x), **attrs)
    else:
        made = f.one(op, x, f.vector(axes) if f.on_frequent(0.9) else None, **attrs)
    if attrs["keepdims"] and made.dtype == x.dtype and f.on_frequent(0.4):
        f.one(f.of(("Sub", "Add")), x, made)


@rule("ArgMax", "ArgMin")
def _arg(f: Grower, op: str) -> None:
    x = f.pick((F32, F64, I32), (1, 2, 3, 4), lambda v: v.exact or f.on_frequent(0.4))
    f.without_empty(x)  # without elements ONNX Runtime returns uninitialized memory
    extra = {"select_last_index": f.choose(2)} if f.opset >= 12 else {}
    f.one(op, x, axis=f.choose(x.rank(f.alive) or 1), keepdims=f.choose(2), **extra)


@rule("TopK", weight=1.5)
def _top_k(f: Grower) -> None:
    x = f.pick((F32, F64, I64) if f.opset >= 11 else (F32,), (1, 2, 3), lambda v: v.exact or f.on_frequent(0.4))
    axis = f.choose(x.rank(f.alive) or 1)
    extents = x.extents(axis, f.alive)
    if f.opset < 10:
        f.emit("TopK", [x], outputs=2, axis=axis, k=1 + f.choose(max(min(extents), 1)))
        return
    extra = {"largest": f.choose(2)} if f.opset >= 11 else {}
    f.emit("TopK", [x, f.whole(0, extents, x=x)], outputs=2, axis=axis, **extra)


@rule("CumSum", since=11)
def _cumsum(f: Grower) -> None:
    x = f.pick((F32, F64, I32, I64), (1, 2, 3))
    axis = f.whole(0, (x.rank(f.alive) or 1) - 1, scalar=True, x=x)
    f.one("CumSum", x, axis, exclusive=f.choose(2), reverse=f.choose(2))


@rule("CumProd", since=26, weight=1)
def _cumprod(f: Grower) -> None:
    x = f.pick((F32,), (1, 2, 3))
    f.one("CumProd", x, f.constant(f.choose(x.rank(f.alive) or 1), np.int64), exclusive=f.choose(2))


@rule("Softmax", "LogSoftmax", weight=1.5)
def _softmax(f: Grower, op: str) -> None:
    x = f.number((1, 2, 3, 4))
    made = f.one(op, x, axis=f.choose(x.rank(f.alive) or 1))
    f.one(f.of(("Mul", "Sub")), made, f.like(made)) if f.on_frequent(0.3) else None


@rule("Hardmax", weight=1)
def _hardmax(f: Grower) -> None:
    x = f.pick((F32,), (1, 2, 3), lambda v: v.exact)
    f.one("Hardmax", x, axis=f.choose(x.rank(f.alive) or 1))


@rule("Attention", since=23, weight=2)
def _attention_node(f: Grower) -> None:
    x = f.pick((F32,), (4,), lambda v: all((v.fixed(a, f.alive) or 0) > 0 for a in (1, 2, 3)))
    others = [x if f.on_frequent(0.6) else f.one("Tanh", x) for _ in range(2)]
    steps = _width(f, x, 2)
    mask: Item | None = None
    used: Item | None = None
    past: list[Item | None] = [None, None]
    if f.on_frequent(0.3):
        past = [f.one("Tanh", f.slice(x, [2], [0], [1])) for _ in range(2)]
    elif f.opset >= 24 and f.on_frequent(0.4):
        n = f.one("Gather", f.one("Shape", x), f.vector([0]), axis=0)
        used = f.one("Expand", f.whole(1, steps, x=x), n)
    if f.on_frequent(0.4):
        mask = f.fit(F32, (steps, steps + (past[0] is not None)), x)
    outputs = 3 if past[0] is not None else 1
    f.emit("Attention", [x, *others, mask, *past, used], outputs=outputs, is_causal=f.choose(2))


@rule("RotaryEmbedding", since=23, weight=2)
def _rotary(f: Grower) -> None:
    """The operator, with cosines for each row and step, or with a table and positions."""
    x = f.pick((F32,), (4,), lambda v: all((v.fixed(a, f.alive) or 0) > 0 for a in (1, 2, 3)))
    steps, width = _width(f, x, 2), _width(f, x, 3)
    if width % 2:
        raise UnfitNode("no halves")
    half = width // 2
    n = f.one("Gather", f.one("Shape", x), f.vector([0]), axis=0)
    if f.on_frequent(0.6):
        tables = [f.fit(F32, (steps + 2, half), x) for _ in range(2)]
        places = f.constant(f.world.numbers.integers(0, steps + 2, (1, steps)), np.int64)
        f.one("RotaryEmbedding", x, *tables, f.one("Expand", places, f.one("Concat", n, f.vector([1]), axis=0)))
        return
    line = f.one("Concat", n, f.vector([1, 1]), axis=0)
    f.one("RotaryEmbedding", x, *(f.one("Expand", f.fit(F32, (1, steps, half), x), line) for _ in range(2)))


@rule("MatMul", weight=1.5)
def _attention(f: Grower) -> None:
    """Attention from its parts; queries, keys and values are windows of one product, as exporters write it."""
    x = f.pick((F32,), (3,))
    d = _width(f, x, 2)
    product = f.one("MatMul", x, f.fit(F32, (d, 3 * d), x))
    attrs = {"num_outputs": 3} if f.opset >= 18 else {}
    q, k, v = f.emit("Split", [product], outputs=3, axis=2, **attrs)
    scores = f.one("MatMul", q, f.one("Transpose", k, perm=[0, 2, 1]))
    scaled = f.one("Mul", scores, f.constant(0.3, np.float32))
    if f.opset >= 13:
        scaled = f.one("Softmax", scaled, axis=-1)
    else:
        scaled = f.one("Softmax", scaled, axis=2)
    made = f.one("MatMul", scaled, v)
    f.one("Add", made, f.of((q, k, v, x))) if f.on_frequent(0.6) else None


@rule("RotaryEmbedding", weight=1.0)
def _rotate_half(f: Grower) -> None:
    """Rotary embedding from its parts, for x = [x1, x2]: x * cos + [-x2, x1] * sin."""
    x = f.pick((F32,), (2, 3, 4), lambda v: (v.fixed(-1, f.alive) or 1) % 2 == 0)
    width, axis = _width(f, x, -1), (x.rank(f.alive) or 2) - 1
    first, second = (f.slice(x, [axis], [s], [s + width // 2]) for s in (0, width // 2))
    turned = f.one("Concat", f.one("Neg", second), first, axis=axis)
    cos, sin = (f.fit(F32, (width,), x) for _ in range(2))
    f.one("Add", f.one("Mul", x, cos), f.one("Mul", turned, sin))
