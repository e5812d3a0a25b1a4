"""Random graphs over a symbolic batch, on which the compiler, the interpreter and ONNX Runtime must agree.

A source of choices decides everything, so hypothesis can shrink a graph and a seeded generator can search for hours.
Most extents are no multiple of the vector length. The net tracks rough magnitudes: values that may become too large
pass through Tanh. Discontinuous operators (rounding, comparing) are not applied to floating-point values that two
correct programs may compute differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

import lathe.core.ops  # noqa: F401  installs type inference
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType

T = TypeVar("T")
Choose = Callable[[int], int]  # a number below the given one
Step = Callable[["Net"], Value]

BATCH = "batch"
IDS = 5  # integer inputs are below this
_LARGEST = 30.0
_MOST_ELEMENTS = 20_000  # per row
_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)


class Net:
    """Grows a graph over images [batch, C, H, W], tokens [batch, T, K], rows [batch, K] and ids [batch, T]."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.rng = np.random.default_rng(choose(1000))
        self.graph = Graph("random")
        self.b = Builder(self.graph)
        self.size: dict[Value, float] = {}
        self.values: list[Value] = []
        batch = symbol(BATCH)
        shapes = {
            "image": (batch, self.of(_SIZES), self.of((1, 3, 6, 9, 17)), self.of((1, 3, 7, 17))),
            "tokens": (batch, self.of(_SIZES[:8]), self.of(_SIZES)),
            "rows": (batch, self.of(_SIZES)),
        }
        for name, shape in shapes.items():
            self.keep(self.b.input(name, TensorType(DType.FLOAT32, shape)), 3.0)
        self.ids = [self.b.input("ids", TensorType(DType.INT64, (batch, shapes["tokens"][1])))]

    def of(self, options: Sequence[T]) -> T:
        return options[self.choose(len(options))]

    def keep(self, value: Value, size: float) -> Value:
        """Let later steps use this floating-point value; `size` is about its largest magnitude."""
        self.size[value] = size
        self.values.append(value)
        return value

    def grow(self, steps: int, kinds: Sequence[Step] = ()) -> Graph:
        """The graph after `steps` steps of the given kinds (default: those of common networks)."""
        inputs = len(self.values)
        for _ in range(steps):
            self.of(kinds or STEPS)(self)
        made = self.values[inputs:] or [self.b("Neg", self.values[0])]
        outputs = [made[-1], self.of(made), self.of(made), *([self.ids[-1]] if len(self.ids) > 1 else [])]
        self.graph.outputs = list(dict.fromkeys(outputs))
        return self.graph

    def pick(self, *ranks: int) -> Value:
        return self.of([value for value in self.values if not ranks or len(value.shape) in ranks])

    def bounded(self, *ranks: int) -> Value:
        """A value of small magnitude, for operators that amplify errors."""
        value = self.pick(*ranks)
        return value if self.size[value] <= 4 else self.keep(self.b("Tanh", value), 1.0)

    def dims(self, value: Value) -> tuple[int, ...]:
        """The extents after the batch."""
        dims = value.shape[1:]
        assert all(isinstance(dim, int) for dim in dims)
        return dims  # type: ignore[return-value]

    def axis(self, value: Value) -> int:
        """An axis after the batch, counted from either end."""
        axis = 1 + self.choose(len(value.shape) - 1)
        return axis - len(value.shape) if self.choose(3) == 0 else axis

    def weight(self, *shape: int, scale: float = 1.0) -> Value:
        return self.b.constant(self.rng.uniform(-scale, scale, shape).astype(np.float32))

    def op(self, op: str, *inputs: Value | None, size: float, **attrs: Any) -> Value:
        """Add a node; its output is kept, through Tanh when it may have become too large."""
        value = self.b(op, *inputs, **attrs)
        if size > _LARGEST:
            value, size = self.b("Tanh", value), 1.0
        return self.keep(value, size)


def feeds(graph: Graph, batch: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs for a random graph; the same rows lead every batch size."""
    result = {}
    for index, value in enumerate(graph.inputs):
        rng = np.random.default_rng([seed, index])
        shape = value.tensor.evaluate({BATCH: batch})
        if value.tensor.dtype is DType.INT64:
            result[value.name] = rng.integers(-IDS, IDS, shape)
        else:
            result[value.name] = rng.uniform(-3, 3, shape).astype(np.float32)
    return result


# -- elementwise ------------------------------------------------------------------------------------------------------

_UNARY = (
    "Relu", "Sigmoid", "Tanh", "Erf", "Neg", "HardSwish", "Abs", "Elu", "Selu", "Celu", "Gelu", "LeakyRelu", "Mish",
    "HardSigmoid", "Softplus", "Softsign", "Sin", "Cos", "Atan", "Identity",
)  # fmt: skip


def _unary(net: Net) -> Value:
    x = net.pick()
    op = net.of(_UNARY)
    if op in ("Sin", "Cos"):
        x = net.bounded()
    attrs = {"approximate": net.of(("none", "tanh"))} if op == "Gelu" else {}
    return net.op(op, x, size=1.8 * net.size[x], **attrs)


def _guarded(net: Net) -> Value:
    """A function with a limited domain, of an argument inside it."""
    x = net.bounded()
    inside = net.b("Add", net.b("Abs", x), net.b.constant(np.float32(0.5)))
    return net.op(net.of(("Sqrt", "Log", "Reciprocal", "Exp")), inside, size=net.size[x] + 3)


def _twin(net: Net) -> Value:
    x = net.pick()
    y = net.of([value for value in net.values if value.shape == x.shape])
    op = net.of(("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean"))
    return net.op(op, x, y, size=net.size[x] * net.size[y] if op == "Mul" else net.size[x] + net.size[y])


def _broadcast(net: Net) -> Value:
    """A sum, difference or product of two values that broadcast."""
    x, rows = net.pick(), net.pick(2)
    k = net.dims(rows)[0]
    if len(x.shape) == 2:
        y = net.b("Slice", rows, starts=(0,), ends=(1,), axes=(1,))
    elif net.dims(x)[-1] in (1, k):
        y = net.b("Unsqueeze", rows, axes=tuple(range(1, len(x.shape) - 1)))
    elif net.dims(x)[0] in (1, k):
        y = net.b("Unsqueeze", rows, axes=tuple(range(2, len(x.shape))))
    else:
        return _unary(net)
    op = net.of(("Add", "Sub", "Mul"))
    pair = (x, y) if net.choose(2) else (y, x)
    return net.op(op, *pair, size=net.size[x] * net.size[rows] + net.size[x] + net.size[rows])


def _with_constant(net: Net) -> Value:
    x = net.pick()
    shape = [size if net.choose(2) else 1 for size in net.dims(x)]
    c = net.weight(*shape[net.choose(len(shape) + 1) :], scale=2)
    op = net.of(("Add", "Sub", "Mul", "Max", "Min"))
    pair = (x, c) if net.choose(2) else (c, x)
    return net.op(op, *pair, size=2 * net.size[x] + 2)


def _divide(net: Net) -> Value:
    x, y = net.pick(), net.bounded()
    if y.shape != x.shape:
        y = x
    below = net.b("Add", net.b("Mul", y, y), net.b.constant(np.float32(1)))
    return net.op("Div", x, below, size=net.size[x])


def _power(net: Net) -> Value:
    x = net.bounded()
    return net.op("Pow", x, net.b.constant(np.float32(net.of((2, 3, 1)))), size=net.size[x] ** 3)


def _clip(net: Net) -> Value:
    return net.op("Clip", net.pick(), size=2.0, min=-1.5, max=2.0)


def _prelu(net: Net) -> Value:
    x = net.pick()
    slope = net.weight(net.dims(x)[0], *[1] * (len(x.shape) - 2))
    return net.op("PRelu", x, slope, size=net.size[x])


def _where(net: Net) -> Value:
    """A Where by sign, so that the result is continuous, by ids, or by a constant mask."""
    x = net.pick()
    y = net.b("Mul", x, net.b.constant(np.float32(0.25)))
    kind = net.choose(3)
    ids = net.ids[0]
    if kind == 0:
        condition = net.b(net.of(("Greater", "GreaterOrEqual")), x, net.b.constant(np.float32(0)))
    elif kind == 1 and len(x.shape) == 3 and x.shape[1] == ids.shape[1]:
        small = net.b("Less", ids, net.b.constant(np.int64(1)))
        condition = net.b("Unsqueeze", net.b("Not", small) if net.choose(2) else small, axes=(2,))
    else:
        condition = net.b.constant(net.rng.integers(0, 2, net.dims(x)).astype(bool))
    return net.op("Where", condition, *((x, y) if net.choose(2) else (y, x)), size=net.size[x])


def _ids(net: Net) -> Value:
    """Integer arithmetic, cast to floating point at the end."""
    ids = net.of(net.ids)
    c = net.b.constant(net.rng.integers(1, 4, net.of(((), (1,), ids.shape[1:])), dtype=np.int64))
    made = net.b(net.of(("Add", "Mul", "Max", "Sub", "Mod", "Div", "Min")), ids, c)
    made = net.b("Clip", made, min=-100, max=100)
    net.ids.append(made)
    return net.op("Cast", made, size=100.0, to=DType.FLOAT32)


def _casts(net: Net) -> Value:
    """Comparisons and logic over ids, and casts between types."""
    ids = net.of(net.ids)
    zero = net.b.constant(np.int64(net.choose(3)))
    mask = net.b(net.of(("Greater", "Equal", "LessOrEqual")), ids, zero)
    other = net.b("Not", net.b("Cast", ids, to=DType.BOOL))
    mask = net.b(net.of(("And", "Or", "Xor")), mask, other)
    narrow = net.b("Cast", mask, to=net.of((DType.INT64, DType.INT32, DType.UINT8, DType.FLOAT32)))
    return net.op("Cast", narrow, size=1.0, to=DType.FLOAT32)


# -- products and windows ---------------------------------------------------------------------------------------------


def _matmul(net: Net) -> Value:
    x = net.pick()
    k, m = net.dims(x)[-1], net.of(_SIZES)
    w = net.weight(k, m, scale=2 / k**0.5)
    return net.op("MatMul", x, w, size=2 * net.size[x])


def _gemm(net: Net) -> Value:
    x = net.pick(2)
    k, m, transposed = net.dims(x)[0], net.of(_SIZES), net.choose(2)
    w = net.weight(*((m, k) if transposed else (k, m)), scale=2 / k**0.5)
    bias = net.of((None, net.weight(m), net.weight(1), net.weight(1, m)))
    return net.op("Gemm", x, w, bias, size=2 * net.size[x] + 2, transB=transposed, alpha=0.75, beta=net.of((1.0, 0.5)))


def _gram(net: Net) -> Value:
    x = net.bounded(3, 4)
    perm = (*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2)
    turned = net.b("Transpose", x, perm=perm)
    pair = (x, turned) if net.choose(2) else (turned, x)
    scale = net.b.constant(np.float32(0.5))
    size = net.size[x] ** 2 * max(net.dims(x))
    return net.op("Mul", net.b("MatMul", *pair), scale, size=size)


def _attention(net: Net) -> Value:
    """Attention of all tokens or the last few to all tokens, with one of three kinds of masks or none.

    The axis of heads is its own or joined with the batch; several heads may share keys and values."""
    x = net.bounded(3)
    t, k = net.dims(x)
    heads, queries = net.of([h for h in (1, 2, 3, 4) if k % h == 0]), min(t, net.of((33, 33, 1, 3)))
    split = net.b("Reshape", x, shape=(0, t, heads, k // heads))
    q = net.b("Transpose", split, perm=(0, 2, 1, 3))
    v = _shared(net, q, net.of([each for each in (1, 2, 3) if heads % each == 0]))
    keys = net.b("Transpose", v, perm=(0, 1, 3, 2))
    if queries < t:
        q = net.b("Slice", q, starts=(t - queries,), ends=(t,), axes=(2,))
    joined = net.of((False, True))
    if joined:
        q, keys, v = (net.b("Reshape", each, shape=(-1, *net.dims(each)[1:])) for each in (q, keys, v))
    scores = net.b("Div", net.b("MatMul", q, keys), net.b.constant(np.float32(4)))
    if joined:
        scores = net.b("Reshape", scores, shape=(-1, heads, queries, t))
    weights = net.b("Softmax", _masked(net, scores), axis=-1)
    if joined:
        weights = net.b("Reshape", weights, shape=(-1, queries, t))
    mixed = net.b("MatMul", weights, v)
    if joined:
        mixed = net.b("Reshape", mixed, shape=(-1, heads, queries, k // heads))
    mixed = net.b("Transpose", mixed, perm=(0, 2, 1, 3))
    return net.op("Reshape", mixed, size=net.size[x], shape=(0, 0, -1))


def _shared(net: Net, x: Value, repeats: int) -> Value:
    """The first heads, each repeated `repeats` times, so that the number of heads stays the same."""
    heads, *rest = net.dims(x)
    if repeats == 1:
        return x
    groups = net.b("Slice", x, starts=(0,), ends=(heads // repeats,), axes=(1,))
    apart = net.b("Unsqueeze", groups, axes=(2,))
    repeated = net.b("Expand", apart, shape=(1, heads // repeats, repeats, *rest))
    return net.b("Reshape", repeated, shape=(-1, heads, *rest))


def _masked(net: Net, scores: Value) -> Value:
    queries, keys = net.dims(scores)[1:]
    kind = net.of(("none", "keys", "pairs", "booleans"))
    if kind == "none":
        return scores
    shape = (keys,) if kind == "keys" else (queries, keys)
    kept = net.b.constant(net.rng.random(shape) < 0.7)
    low = net.b.constant(np.float32(-1e4))
    if kind == "booleans":
        return net.b("Where", kept, scores, low)
    return net.b("Add", scores, net.b("Where", kept, net.b.constant(np.float32(0)), low))


def _window(net: Net, x: Value) -> dict[str, Any] | None:
    """Kernel, strides, dilations and pads that fit an image."""
    extents = net.dims(x)[1:]
    kernel = tuple(net.of((1, 2, 3, 5)) for _ in extents)
    dilations = tuple(net.of((1, 1, 2)) for _ in extents)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    begin = [net.choose(k) for k in kernel]
    end = [net.choose(k) for k in kernel]
    if any(e + b + a < r for e, b, a, r in zip(extents, begin, end, reach, strict=True)):
        return None
    strides = tuple(net.of((1, 1, 2, 3)) for _ in extents)
    return {"kernel_shape": kernel, "dilations": dilations, "pads": (*begin, *end), "strides": strides}


def _conv(net: Net) -> Value:
    x = net.pick(4)
    window = _window(net, x)
    if window is None:
        window = {"kernel_shape": (1, 1)}
    c = net.dims(x)[0]
    group = net.of([g for g in (1, 1, c, 2, 4) if c % g == 0])
    out = group * net.of((1, 2, 3, 8, 17)) if group > 1 else net.of(_SIZES)
    if out > 64:
        out = group
    w = net.weight(out, c // group, *window["kernel_shape"], scale=2 / (c // group * window["kernel_shape"][0]) ** 0.5)
    bias = net.weight(out) if net.choose(2) else None
    y = net.op("Conv", x, w, bias, size=3 * net.size[x] + 1, group=group, **window)
    if net.choose(3) == 0:
        return y
    y = net.op(net.of(("Relu", "Sigmoid", "HardSwish")), y, size=net.size[y])
    return net.op("Add", y, x, size=net.size[y] + net.size[x]) if y.shape == x.shape and net.choose(2) else y


def _plain_conv(net: Net) -> Value:
    """3x3 over the whole image, as networks have most."""
    x = net.pick(4)
    c, out = net.dims(x)[0], net.of(_SIZES)
    w = net.weight(out, c, 3, 3, scale=1 / c**0.5)
    stride = net.of((1, 1, 2))
    return net.op("Conv", x, w, net.weight(out), size=2 * net.size[x], pads=(1, 1, 1, 1), strides=(stride, stride))


def _conv_1d(net: Net) -> Value:
    x = net.pick(3)
    c, k = net.dims(x)[0], net.of((1, 3))
    w = net.weight(net.of((1, 4, 7)), c, k, scale=2 / (c * k) ** 0.5)
    return net.op("Conv", x, w, size=2 * net.size[x], pads=(k // 2, k // 2))


def _conv_transpose(net: Net) -> Value:
    x = net.pick(4)
    c, k, s = net.dims(x)[0], net.of((2, 3)), net.of((1, 2))
    w = net.weight(c, net.of((1, 3, 5)), k, k, scale=1 / c**0.5)
    y = net.b("ConvTranspose", x, w, strides=(s, s))
    return net.op("Identity", y, size=2 * net.size[x]) if _small(net, y) else _unary(net)


def _pool(net: Net) -> Value:
    x = net.pick(4)
    window = _window(net, x)
    if window is None or min(net.dims(x)[1:]) < max(window["dilations"]):  # a window might see nothing but padding
        return net.op(net.of(("GlobalAveragePool", "GlobalMaxPool")), x, size=net.size[x])
    attrs = {"ceil_mode": net.choose(2), **window}
    if net.choose(2):
        return net.op("MaxPool", x, size=net.size[x], **attrs)
    attrs["ceil_mode"] = 0  # implementations differ in the elements that the last window counts
    return net.op("AveragePool", x, size=net.size[x], count_include_pad=net.choose(2), **attrs)


def _resize(net: Net) -> Value:
    x = net.pick(4)
    mode, transform = net.of((("nearest", "asymmetric"), ("linear", "half_pixel"), ("linear", "align_corners")))
    scales = (1.0, 1.0, net.of((1.0, 2.0, 3.0)), net.of((2.0, 1.0, 4.0)))
    attrs = {"nearest_mode": "floor"} if mode == "nearest" else {}
    y = net.b("Resize", x, mode=mode, coordinate_transformation_mode=transform, scales=scales, **attrs)
    return net.op("Identity", y, size=net.size[x]) if _small(net, y) else _unary(net)


# -- reductions and normalisations ------------------------------------------------------------------------------------


def _reduce(net: Net) -> Value:
    x = net.bounded()
    rank = len(x.shape)
    axes = tuple(axis for axis in range(1, rank) if net.choose(2)) or (rank - 1,)
    op = net.of(("ReduceMean", "ReduceMax", "ReduceSum", "ReduceMin", "ReduceL2", "ReduceL1", "ReduceSumSquare"))
    keepdims = 1 if rank - len(axes) < 2 else net.choose(2)
    count = np.prod([x.shape[axis] for axis in axes], dtype=float)
    return net.op(op, x, size=float(net.size[x] ** 2 * count), axes=axes, keepdims=keepdims)


def _arg_reduce(net: Net) -> Value:
    """The index of the largest or smallest id, which is exact."""
    ids = net.of(net.ids)
    best = net.b(net.of(("ArgMax", "ArgMin")), ids, axis=1, keepdims=1)
    return net.op("Cast", best, size=20.0, to=DType.FLOAT32)


def _softmax(net: Net) -> Value:
    x = net.bounded()
    return net.op(net.of(("Softmax", "GuardedSoftmax", "LogSoftmax")), x, size=9.0, axis=net.axis(x))


def _batch_norm(net: Net) -> Value:
    x = net.pick()
    c = net.dims(x)[0]
    variance = net.b.constant(net.rng.uniform(0.5, 2, c).astype(np.float32))
    parameters = (net.weight(c), net.weight(c), net.weight(c), variance)
    return net.op("BatchNormalization", x, *parameters, size=2 * net.size[x] + 2)


def _layer_norm(net: Net) -> Value:
    x = net.bounded()
    axis = 1 + net.choose(len(x.shape) - 1)
    shape = net.dims(x)[axis - 1 :]
    bias = net.weight(*shape) if net.choose(2) else None
    return net.op("LayerNormalization", x, net.weight(*shape), bias, size=4.0, axis=axis, epsilon=1e-2)


def _written_layer_norm(net: Net) -> Value:
    """Layer normalisation from its parts, as older exporters wrote it."""
    x = net.bounded(3)
    centred = net.b("Sub", x, net.b("ReduceMean", x, axes=(-1,), keepdims=1))
    square = net.b("Pow", centred, net.b.constant(np.float32(2)))
    variance = net.b("ReduceMean", square, axes=(-1,), keepdims=1)
    deviation = net.b("Sqrt", net.b("Add", variance, net.b.constant(np.float32(1e-2))))
    return net.op("Div", centred, deviation, size=5.0)


def _group_norm(net: Net) -> Value:
    x = net.bounded(4)
    c = net.dims(x)[0]
    if net.choose(2):
        return net.op("InstanceNormalization", x, net.weight(c), net.weight(c), size=5.0, epsilon=1e-2)
    groups = net.of([g for g in (1, 2, c, 4) if c % g == 0])
    scale, bias = net.weight(c), net.weight(c)
    return net.op("GroupNormalization", x, scale, bias, size=5.0, epsilon=1e-2, num_groups=groups)


# -- movement ---------------------------------------------------------------------------------------------------------


def _transpose(net: Net) -> Value:
    x = net.pick()
    rest = list(range(1, len(x.shape)))
    perm = [0]
    while rest:
        perm.append(rest.pop(net.choose(len(rest))))
    return net.op("Transpose", x, size=net.size[x], perm=tuple(perm))


def _reshape(net: Net) -> Value:
    x = net.pick()
    dims = net.dims(x)
    shapes: list[tuple[int, ...]] = [(0, -1), (0, int(np.prod(dims[:-1])), dims[-1]), (0, dims[0], -1)]
    shapes += [(0, 1, *dims)] if len(dims) < 3 else [(0, dims[1], dims[0], dims[2])]
    return net.op("Reshape", x, size=net.size[x], shape=net.of(shapes))


def _batch_fold(net: Net) -> Value:
    """A Relu of the batch joined with another axis, which is then split again."""
    x = net.pick(3)
    t, k = net.dims(x)
    flat = net.b("Relu", net.b("Reshape", x, shape=(-1, k)))
    return net.op("Reshape", flat, size=net.size[x], shape=(-1, t, k))


def _flatten(net: Net) -> Value:
    x = net.pick()
    return net.op("Flatten", x, size=net.size[x], axis=1)


def _concat(net: Net) -> Value:
    x = net.pick()
    axis = net.axis(x)
    mates = [v for v in net.values if len(v.shape) == len(x.shape) and _but(v.shape, axis) == _but(x.shape, axis)]
    parts = [x, *(net.of(mates) for _ in range(1 + net.choose(2)))]
    y = net.b("Concat", *parts, axis=axis)
    return net.op("Identity", y, size=max(net.size[p] for p in parts)) if _small(net, y) else _unary(net)


def _split(net: Net) -> Value:
    x = net.pick()
    axis = net.axis(x)
    extent = x.shape[axis]
    assert isinstance(extent, int)
    if extent < 2:
        return _unary(net)
    cut = 1 + net.choose(extent - 1)
    parts = net.b.emit("Split", x, outputs=2, axis=axis, split=(cut, extent - cut))
    net.keep(parts[0], net.size[x])
    return net.keep(parts[1], net.size[x])


def _slice(net: Net) -> Value:
    x = net.pick()
    axis = net.axis(x)
    extent = x.shape[axis]
    assert isinstance(extent, int)
    start = net.choose(extent)
    length = 1 + net.choose(extent - start)
    if net.choose(3) == 0:
        span: dict[str, Any] = {"starts": (-1,), "ends": (-(2**31),), "steps": (-net.of((1, 2)),)}
    else:
        span = {"starts": (start,), "ends": (start + length,), "steps": (net.of((1, 1, 2, 3)),)}
    return net.op("Slice", x, size=net.size[x], axes=(axis,), **span)


def _pad(net: Net) -> Value:
    x = net.pick()
    dims = net.dims(x)
    mode = net.of(("constant", "constant", "edge", "reflect"))
    most = [min(2, d - 1) if mode == "reflect" else 2 for d in dims]
    begin = [net.choose(m + 1) for m in most]
    end = [net.choose(m + 1) for m in most]
    attrs = {"constant_value": 0.5} if mode == "constant" and net.choose(2) else {}
    y = net.b("Pad", x, mode=mode, pads=(0, *begin, 0, *end), **attrs)
    return net.op("Identity", y, size=net.size[x] + 0.5) if _small(net, y) else _unary(net)


def _gather(net: Net) -> Value:
    x = net.pick()
    axis = net.axis(x)
    extent = x.shape[axis]
    assert isinstance(extent, int)
    shape = net.of(((), (1,), (3,)) if len(x.shape) > 2 else ((1,), (3,)))
    indices = net.b.constant(net.rng.integers(-extent, extent, shape))
    return net.op("Gather", x, indices, size=net.size[x], axis=axis)


def _embedding(net: Net) -> Value:
    return net.op("Gather", net.weight(IDS, net.of(_SIZES), scale=3), net.ids[0], size=3.0)


def _expand(net: Net) -> Value:
    x = net.pick()
    if all(dim != 1 for dim in net.dims(x)):
        return _unary(net)
    shape = tuple(net.of((1, 3, 5)) if dim == 1 else dim for dim in net.dims(x))
    y = net.b("Expand", x, shape=(1, *shape))
    return net.op("Identity", y, size=net.size[x]) if _small(net, y) else _unary(net)


def _tile(net: Net) -> Value:
    x = net.pick()
    y = net.b("Tile", x, repeats=(1, *(net.of((1, 1, 2, 3)) for _ in net.dims(x))))
    return net.op("Identity", y, size=net.size[x]) if _small(net, y) else _unary(net)


def _blocks(net: Net) -> Value:
    x = net.pick(4)
    c, h, w = net.dims(x)
    if c % 4 == 0:
        return net.op("DepthToSpace", x, size=net.size[x], blocksize=2, mode=net.of(("DCR", "CRD")))
    if h % 3 == 0 and w % 3 == 0:
        return net.op("SpaceToDepth", x, size=net.size[x], blocksize=3)
    return _unary(net)


def _cumsum(net: Net) -> Value:
    x = net.bounded()
    attrs = {"exclusive": net.choose(2), "reverse": net.choose(2)}
    return net.op("CumSum", x, size=net.size[x] * 20, axis=1 + net.choose(len(x.shape) - 1), **attrs)


def _but(shape: Sequence[Any], axis: int) -> list[Any]:
    rest = list(shape)
    del rest[axis]
    return rest


def _small(net: Net, value: Value) -> bool:
    return int(np.prod(net.dims(value))) <= _MOST_ELEMENTS


STEPS: tuple[Step, ...] = (
    _unary, _unary, _guarded, _twin, _twin, _broadcast, _with_constant, _with_constant, _divide, _power, _clip, _prelu,
    _where, _ids, _casts, _matmul, _gemm, _gram, _attention, _conv, _conv, _plain_conv, _conv_1d, _conv_transpose,
    _pool, _pool, _resize, _reduce, _reduce, _arg_reduce, _softmax, _batch_norm, _layer_norm, _written_layer_norm,
    _group_norm, _transpose, _transpose, _reshape, _batch_fold, _flatten, _concat, _split, _slice, _pad, _gather,
    _embedding, _expand, _tile, _blocks, _cumsum,
)  # fmt: skip
