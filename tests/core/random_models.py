"""Random ONNX files of every opset since 7: old forms of operators, several element types, subgraphs, sequences.

What `random_nets` does for canonical graphs, this does for files, so that the importer takes part. A source of choices
decides everything. A value is `exact` if any two correct programs compute the same bits; discontinuous operators
(comparing, sorting, quantizing) are applied only to exact values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

T = TypeVar("T")
Result = tuple[int, tuple[int, ...], bool]  # element type, shape, exact
Choose = Callable[[int], int]  # a number below the given one
F32, F64, I32, I64, BOOL = (
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL,
)  # fmt: skip
FLOATS, INTS = (F32, F64), (I32, I64)
OPSETS = range(7, 24)
_MOST_ELEMENTS = 4000


@dataclass(frozen=True)
class Item:
    """A value of the file."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    exact: bool = True

    @property
    def rank(self) -> int:
        return len(self.shape)


class File:
    """Grows one graph; a nested `File` grows the body of a control-flow node, and may read its values."""

    def __init__(self, choose: Choose, opset: int, rng: np.random.Generator, prefix: str = "") -> None:
        self.choose, self.opset, self.rng, self.prefix = choose, opset, rng, prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.items: list[Item] = []
        self.count = 0

    def of(self, options: Sequence[T]) -> T:
        return options[self.choose(len(options))]

    def name(self) -> str:
        self.count += 1
        return f"{self.prefix}v{self.count}"

    def constant(self, array: Any, dtype: Any = None) -> str:
        name = self.name()
        self.constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def ints(self, *items: int) -> str:
        return self.constant(items, np.int64)

    def weight(self, dtype: int, *shape: int) -> str:
        return self.constant(self.rng.uniform(-1, 1, shape), helper.tensor_dtype_to_np_dtype(dtype))

    def pick(self, dtypes: Sequence[int] = FLOATS, ranks: Sequence[int] = (1, 2, 3, 4), exact: bool = False) -> Item:
        """A value of one of these element types and ranks; an exact one if asked. There always is one."""
        found = [v for v in self.items if v.dtype in dtypes and v.rank in ranks and (v.exact or not exact)]
        return self.of(found) if found else self.fresh(self.of(dtypes), self.of(ranks))

    def fresh(self, dtype: int, rank: int) -> Item:
        """A constant as a value, when no other value fits."""
        shape = tuple(self.of((1, 2, 3, 4)) for _ in range(rank))
        numbers = self.rng.uniform(-3, 3, shape)
        name = self.constant(numbers > 0 if dtype == BOOL else numbers, helper.tensor_dtype_to_np_dtype(dtype))
        return Item(name, dtype, shape)

    def add(self, op: str, inputs: Sequence[str], *results: Result, **attrs: Any) -> list[Item]:
        """A node; `results` are (element type, shape, exact) of its outputs, which are kept unless they are large."""
        made = [Item(self.name(), *result) for result in results]
        self.nodes.append(helper.make_node(op, inputs, [item.name for item in made], **attrs))
        self.items += [item for item in made if 0 < np.prod(item.shape) <= _MOST_ELEMENTS]
        return made

    def tame(self, item: Item) -> Item:
        """The value through Tanh, which bounds it."""
        return self.add("Tanh", [item.name], (item.dtype, item.shape, False))[0]


def grow(choose: Choose, steps: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model and its feeds."""
    opset, rng = OPSETS[choose(len(OPSETS))], np.random.default_rng(choose(10_000))
    file = File(choose, opset, rng)
    feeds, infos = {}, []
    shapes = ((2, 3, 6, 5), (2, 4), (3, 2, 4), (4,), (2, 3))
    for index, (dtype, shape) in enumerate(zip((F32, file.of(FLOATS), F32, I64, I32), shapes, strict=True)):
        name = f"x{index}"
        numbers = rng.uniform(-3, 3, shape)
        feeds[name] = numbers.astype(helper.tensor_dtype_to_np_dtype(dtype))
        infos.append(helper.make_tensor_value_info(name, dtype, shape))
        file.items.append(Item(name, dtype, shape))
    for _ in range(steps):
        file.of(STEPS)(file)
    made = [item for item in file.items if item.name not in feeds] or file.add("Neg", ["x0"], (F32, shapes[0], True))
    outputs = list({item.name: item for item in (made[-1], file.of(made), file.of(made))}.values())
    graph = helper.make_graph(
        file.nodes,
        "random",
        infos,
        [helper.make_tensor_value_info(v.name, v.dtype, None) for v in outputs],
        file.constants,
    )
    for info, item in zip(graph.output, outputs, strict=True):
        info.CopyFrom(helper.make_tensor_value_info(item.name, item.dtype, item.shape))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return model, feeds


def _axis(f: File, item: Item) -> int:
    axis = f.choose(item.rank)
    return axis - item.rank if f.opset >= 11 and f.choose(2) else axis


def _without(shape: Sequence[int], axis: int, by: Sequence[int] = ()) -> tuple[int, ...]:
    axis %= len(shape)
    return (*shape[:axis], *by, *shape[axis + 1 :])


# -- elementwise ------------------------------------------------------------------------------------------------------


def _unary(f: File) -> None:
    x = f.pick()
    ops = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs"]
    late = {7: "LeakyRelu", 6: "Elu", 9: "Erf", 14: "HardSwish", 20: "Gelu"} if x.dtype == F32 else {}
    op = f.of([*ops, *(name for since, name in late.items() if f.opset >= since)])
    f.add(op, [x.name], (x.dtype, x.shape, x.exact and op in ("Relu", "Neg", "Abs")))


def _binary(f: File) -> None:
    x = f.pick((*FLOATS, *INTS))
    shape = tuple(d if f.choose(2) else 1 for d in x.shape)[f.choose(x.rank + 1) :]
    c = f.constant(f.rng.integers(1, 4, shape), helper.tensor_dtype_to_np_dtype(x.dtype))
    ops = ["Add", "Sub", "Mul", "Div", *(["Max", "Min"] if f.opset >= 12 or x.dtype in FLOATS else [])]
    op = f.of(ops)
    pair = [x.name, c] if op == "Div" or f.choose(2) else [c, x.name]
    y = f.add(op, pair, (x.dtype, x.shape, x.exact and (x.dtype in INTS or op in ("Max", "Min"))))[0]
    if x.dtype in FLOATS and op in ("Mul", "Add"):
        f.tame(y)


def _two(f: File) -> None:
    x = f.pick()
    y = f.of([v for v in f.items if (v.dtype, v.shape) == (x.dtype, x.shape)] or [x])
    made = f.add(f.of(("Add", "Sub", "Mul")), [x.name, y.name], (x.dtype, x.shape, False))[0]
    f.tame(made)


def _guarded(f: File) -> None:
    x = f.pick()
    size = f.add("Abs", [x.name], (x.dtype, x.shape, x.exact))[0]
    half = f.constant(0.5, helper.tensor_dtype_to_np_dtype(x.dtype))
    inside = f.add("Add", [size.name, half], (x.dtype, x.shape, False))[0]
    f.add(f.of(("Sqrt", "Log", "Reciprocal")), [inside.name], (x.dtype, x.shape, False))


def _clip(f: File) -> None:
    x = f.pick((F32,))
    bounds = {"min": -1.0, "max": 1.5} if f.opset < 11 else {}
    inputs = [x.name] if bounds else [x.name, f.of(("", f.constant(-1.0, np.float32))), f.constant(1.5, np.float32)]
    f.add("Clip", inputs, (F32, x.shape, x.exact), **bounds)


def _compare(f: File) -> None:
    x = f.pick((F32, I64), exact=True)
    flags = f.add(f.of(("Less", "Greater")), [x.name, f.constant(0.25, helper.tensor_dtype_to_np_dtype(x.dtype))],
                  (BOOL, x.shape, True))[0] if f.opset >= 9 else f.fresh(BOOL, 2)  # fmt: skip
    if f.choose(2):
        flags = f.add("Not", [flags.name], (BOOL, flags.shape, True))[0]
    if f.opset >= 9:
        f.add("Where", [flags.name, x.name, f.constant(1, helper.tensor_dtype_to_np_dtype(x.dtype))],
              (x.dtype, flags.shape, True)) if flags.shape == x.shape else None  # fmt: skip


def _logic(f: File) -> None:
    a = f.pick((BOOL,))
    f.add(f.of(("And", "Or", "Xor")), [a.name, f.constant(True)], (BOOL, a.shape, True))


def _cast(f: File) -> None:
    x = f.pick((*FLOATS, *INTS, BOOL), exact=True)
    to = f.of((F32, F64, I32, I64, BOOL))
    f.add("Cast", [x.name], (to, x.shape, True), to=to)


# -- products, images, recurrence -------------------------------------------------------------------------------------


def _matmul(f: File) -> None:
    x = f.pick(ranks=(2, 3, 4))
    n = f.of((1, 3, 5))
    f.tame(f.add("MatMul", [x.name, f.weight(x.dtype, x.shape[-1], n)], (x.dtype, (*x.shape[:-1], n), False))[0])


def _gemm(f: File) -> None:
    x = f.pick(ranks=(2,))
    n, turned = f.of((1, 4)), f.choose(2)
    w = f.weight(x.dtype, *((n, x.shape[1]) if turned else (x.shape[1], n)))
    y = f.add("Gemm", [x.name, w, f.weight(x.dtype, n)], (x.dtype, (x.shape[0], n), False), transB=turned, alpha=0.5)
    f.tame(y[0])


def _conv(f: File) -> None:
    x = f.pick((F32,), ranks=(4,))
    n, c, h, w = x.shape
    k, m, stride = f.of((1, 3)), f.of((2, 4)), f.of((1, 2))
    pad = k // 2
    out = tuple((size + 2 * pad - k) // stride + 1 for size in (h, w))
    y = f.add("Conv", [x.name, f.weight(F32, m, c, k, k), f.weight(F32, m)], (F32, (n, m, *out), False),
              kernel_shape=[k, k], strides=[stride] * 2, pads=[pad] * 4)[0]  # fmt: skip
    f.tame(y)


def _pool(f: File) -> None:
    x = f.pick((F32,), ranks=(4,))
    if min(x.shape[2:]) < 2:
        return _unary(f)
    out = tuple((size - 2) // 2 + 1 for size in x.shape[2:])
    op = f.of(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"))
    attrs = {} if op.startswith("Global") else {"kernel_shape": [2, 2], "strides": [2, 2]}
    f.add(op, [x.name], (F32, (*x.shape[:2], *(out if attrs else (1, 1))), x.exact and "Max" in op), **attrs)
    return None


def _normalized(f: File) -> None:
    x = f.pick((F32,), ranks=(3, 4))
    c = x.shape[1]
    scale, bias, mean = (f.weight(F32, c) for _ in range(3))
    var = f.constant(f.rng.uniform(0.5, 2, c), np.float32)
    op = f.of(("BatchNormalization", "InstanceNormalization", *(("LayerNormalization",) if f.opset >= 17 else ())))
    if op == "LayerNormalization":
        inputs = [x.name, f.weight(F32, x.shape[-1])]
    else:
        inputs = [x.name, scale, bias, *([mean, var] if op == "BatchNormalization" else [])]
    f.tame(f.add(op, inputs, (F32, x.shape, False), epsilon=0.1)[0])


def _upsample(f: File) -> None:
    x = f.pick((F32,), ranks=(4,))
    out, scales = (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), [1.0, 1.0, 2.0, 2.0]
    if f.opset < 9:
        f.add("Upsample", [x.name], (F32, out, x.exact), mode="nearest", scales=scales)
    elif f.opset < 11:
        op = "Upsample" if f.opset == 9 else "Resize"
        f.add(op, [x.name, f.constant(scales, np.float32)], (F32, out, x.exact), mode="nearest")
    else:
        region = "" if f.opset >= 13 else f.constant([], np.float32)
        inputs = [x.name, region, f.constant(scales, np.float32)]
        f.add("Resize", inputs, (F32, out, False), mode=f.of(("nearest", "linear")))


def _recurrent(f: File) -> None:
    x = f.pick((F32,), ranks=(3,))
    op, h = f.of(("RNN", "GRU", "LSTM")), f.of((2, 5))
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    inputs = [
        x.name,
        f.weight(F32, 1, gates * h, x.shape[2]),
        f.weight(F32, 1, gates * h, h),
        f.weight(F32, 1, 2 * gates * h),
    ]
    y = (F32, (x.shape[0], 1, x.shape[1], h), False)
    f.add(op, inputs, y, (F32, (1, x.shape[1], h), False), hidden_size=h)


# -- reductions and order ---------------------------------------------------------------------------------------------


def _reduce(f: File) -> None:
    x, keep = f.pick((F32, F64, I32, I64)), f.choose(2)
    axis = _axis(f, x)
    ops = ("ReduceSum", "ReduceMax", "ReduceMean") if x.dtype in FLOATS else ("ReduceSum", "ReduceMax")
    op = f.of(ops)
    as_input = f.opset >= (13 if op == "ReduceSum" else 18)
    inputs, attrs = ([x.name, f.ints(axis)], {}) if as_input else ([x.name], {"axes": [axis]})
    shape = _without(x.shape, axis, (1,) if keep else ())
    if shape:
        f.add(op, inputs, (x.dtype, shape, x.exact and (op == "ReduceMax" or x.dtype in INTS)), keepdims=keep, **attrs)


def _softmax(f: File) -> None:
    x = f.pick()
    f.add(f.of(("Softmax", "LogSoftmax")), [x.name], (x.dtype, x.shape, False), axis=_axis(f, x))


def _arg(f: File) -> None:
    x = f.pick((F32,), exact=True)
    axis = _axis(f, x)
    f.add(f.of(("ArgMax", "ArgMin")), [x.name], (I64, _without(x.shape, axis, (1,)), True), axis=axis)


def _top_k(f: File) -> None:
    x = f.pick((F32,), exact=True)
    axis = _axis(f, x)
    k = 1 + f.choose(x.shape[axis])
    results = [(dtype, _without(x.shape, axis, (k,)), True) for dtype in (F32, I64)]
    if f.opset < 10:
        f.add("TopK", [x.name], *results, axis=axis, k=k)
    else:
        f.add("TopK", [x.name, f.ints(k)], *results, axis=axis)


def _cumulative(f: File) -> None:
    x = f.pick((F32, I64))
    if f.opset >= 11:
        y = f.add("CumSum", [x.name, f.constant(_axis(f, x), np.int64)], (x.dtype, x.shape, x.exact and x.dtype == I64))
        if x.dtype == F32:
            f.tame(y[0])


# -- movement ---------------------------------------------------------------------------------------------------------

_ANY = (*FLOATS, *INTS)


def _transpose(f: File) -> None:
    x = f.pick(_ANY, ranks=(2, 3, 4))
    perm = [int(axis) for axis in f.rng.permutation(x.rank)]
    f.add("Transpose", [x.name], (x.dtype, tuple(x.shape[axis] for axis in perm), x.exact), perm=perm)


def _reshape(f: File) -> None:
    x = f.pick(_ANY)
    size, split = int(np.prod(x.shape)), f.of((1, 2, 3))
    shape = (size // split, split) if size % split == 0 else (size,)
    f.add("Reshape", [x.name, f.ints(-1, *shape[1:])], (x.dtype, shape, x.exact))


def _ones(f: File) -> None:
    """Unsqueeze, then perhaps Squeeze: axes were attributes before opset 13."""
    x = f.pick(_ANY, ranks=(1, 2, 3))
    axis = f.choose(x.rank + 1)
    shape = (*x.shape[:axis], 1, *x.shape[axis:])
    given = ([f.ints(axis)], {}) if f.opset >= 13 else ([], {"axes": [axis]})
    y = f.add("Unsqueeze", [x.name, *given[0]], (x.dtype, shape, x.exact), **given[1])[0]
    if f.choose(2):
        f.add("Squeeze", [y.name, *given[0]], (x.dtype, x.shape, x.exact), **given[1])


def _slice(f: File) -> None:
    x = f.pick(_ANY)
    axis = f.choose(x.rank)
    start = f.choose(x.shape[axis])
    end = start + 1 + f.choose(x.shape[axis] - start)
    shape = _without(x.shape, axis, (end - start,))
    if f.opset < 10:
        f.add("Slice", [x.name], (x.dtype, shape, x.exact), starts=[start], ends=[end], axes=[axis])
    else:
        f.add("Slice", [x.name, f.ints(start), f.ints(end), f.ints(axis)], (x.dtype, shape, x.exact))


def _pad(f: File) -> None:
    x = f.pick((F32,))
    ends = [f.choose(3) for _ in range(2 * x.rank)]
    shape = tuple(size + ends[i] + ends[x.rank + i] for i, size in enumerate(x.shape))
    mode = f.of(("constant", "edge"))
    if f.opset < 11:
        f.add("Pad", [x.name], (F32, shape, x.exact), mode=mode, pads=ends, value=0.5)
    else:
        f.add("Pad", [x.name, f.ints(*ends), f.constant(0.5, np.float32)], (F32, shape, x.exact), mode=mode)


def _concat_split(f: File) -> None:
    x = f.pick(_ANY)
    axis = f.choose(x.rank)
    both = f.add(
        "Concat", [x.name, x.name], (x.dtype, _without(x.shape, axis, (2 * x.shape[axis],)), x.exact), axis=axis
    )[0]
    cut = 1 + f.choose(2 * x.shape[axis] - 1)
    sizes = (cut, 2 * x.shape[axis] - cut)
    given = ([f.ints(*sizes)], {}) if f.opset >= 13 else ([], {"split": sizes})
    results = [(x.dtype, _without(x.shape, axis, (size,)), x.exact) for size in sizes]
    f.add("Split", [both.name, *given[0]], *results, axis=axis, **given[1])


def _gather(f: File) -> None:
    x = f.pick(_ANY)
    axis = f.choose(x.rank)
    least = -x.shape[axis] if f.opset >= 11 else 0
    shape = f.of(((2,), (2, 2)))
    index = f.constant(f.rng.integers(least, x.shape[axis], shape), np.int64)
    f.add("Gather", [x.name, index], (x.dtype, _without(x.shape, axis, shape), x.exact), axis=axis)


def _scatter(f: File) -> None:
    x = f.pick((F32,))
    if f.opset >= 9:
        op, axis = "Scatter" if f.opset < 11 else "ScatterElements", f.choose(x.rank)
        index = f.constant(f.rng.permutation(x.shape[axis])[:1].reshape((1,) * x.rank), np.int64)
        f.add(op, [x.name, index, f.weight(F32, *(1,) * x.rank)], (F32, x.shape, x.exact), axis=axis)


def _repeat(f: File) -> None:
    x = f.pick((F32,))
    if f.choose(2):
        times = [f.of((1, 2)) for _ in x.shape]
        shape = tuple(size * count for size, count in zip(x.shape, times, strict=True))
        f.add("Tile", [x.name, f.ints(*times)], (F32, shape, x.exact))
    elif f.opset >= 8:
        f.add("Expand", [x.name, f.ints(2, *x.shape)], (F32, (2, *x.shape), x.exact))


def _one_hot(f: File) -> None:
    x = f.pick((I64,), ranks=(1, 2))
    if f.opset >= 11:
        f.add("OneHot", [x.name, f.constant(4, np.int64), f.constant([-1, 2], np.float32)], (F32, (*x.shape, 4), True))


# -- quantization, sequences, control flow ----------------------------------------------------------------------------


def _quantized(f: File) -> None:
    x = f.pick((F32,), exact=True)
    if f.opset >= 10:
        scale, zero = f.constant(0.0625, np.float32), f.constant(7, np.uint8)  # a power of two: quotients are exact
        q = f.name()
        f.nodes.append(helper.make_node("QuantizeLinear", [x.name, scale, zero], [q]))
        f.add("DequantizeLinear", [q, scale, zero], (F32, x.shape, True))


def _sequence(f: File) -> None:
    x = f.pick((F32,))
    if f.opset >= 11:
        name, axis = f.name(), f.choose(x.rank)
        f.nodes.append(helper.make_node("SequenceConstruct", [x.name, x.name], [name]))
        shape = _without(x.shape, axis, (2 * x.shape[axis],))
        f.add("ConcatFromSequence", [name], (F32, shape, x.exact), axis=axis)


def _inner(f: File, known: Sequence[Item], steps: int) -> File:
    """A body that may read the values `known`, and computes at least one value."""
    body = File(f.choose, f.opset, f.rng, f"{f.name()}_")
    body.items = list(known)
    for _ in range(steps):
        body.of(SIMPLE)(body)
    return body


def _body(f: File, file: File, inputs: Sequence[Any], outputs: Sequence[Item]) -> onnx.GraphProto:
    infos = [helper.make_tensor_value_info(v.name, v.dtype, v.shape) for v in outputs]
    return helper.make_graph(file.nodes, file.prefix, list(inputs), infos, file.constants)


def _if(f: File) -> None:
    x = f.pick((F32,))
    branches = []
    for op in ("Neg", "Relu"):
        body = _inner(f, [*f.items[-3:], x], f.choose(3))
        branches.append(_body(f, body, [], body.add(op, [x.name], (F32, x.shape, x.exact))))
    flag = f.constant(bool(f.choose(2)))
    if f.choose(2):  # known only when the model runs
        i = f.pick((I64,), ranks=(1, 2, 3, 4), exact=True)
        total = f.name()
        f.nodes.append(helper.make_node("ReduceMax", [i.name], [total], keepdims=0))
        flag = f.name()
        zero = f.constant(1, np.int64)
        f.nodes.append(helper.make_node("Greater" if f.opset >= 9 else "Equal", [total, zero], [flag]))
    f.add("If", [flag], (F32, x.shape, x.exact), then_branch=branches[0], else_branch=branches[1])


def _loop(f: File) -> None:
    x = f.pick((F32,))
    trips = 1 + f.choose(3)
    body = File(f.choose, f.opset, f.rng, f"{f.name()}_")
    before = Item(f"{body.prefix}in", F32, x.shape, False)
    body.items = [before, x]
    for _ in range(f.choose(3)):
        body.of(SIMPLE)(body)
    after = body.tame(body.add("Add", [before.name, x.name], (F32, x.shape, False))[0])
    row = body.add("Neg", [after.name], (F32, x.shape, False))[0]
    again = Item(f"{body.prefix}again", BOOL, ())
    body.nodes.append(helper.make_node("Identity", [f"{body.prefix}go"], [again.name]))
    inputs = [helper.make_tensor_value_info(f"{body.prefix}i", I64, ()),
              helper.make_tensor_value_info(f"{body.prefix}go", BOOL, ()),
              helper.make_tensor_value_info(before.name, F32, x.shape)]  # fmt: skip
    graph = _body(f, body, inputs, [again, after, row])
    results = (F32, x.shape, False), (F32, (trips, *x.shape), False)
    f.add("Loop", [f.constant(trips, np.int64), f.constant(True), x.name], *results, body=graph)


def _scan(f: File) -> None:
    x = f.pick((F32,), ranks=(2, 3))
    if f.opset < 9:
        return
    body = File(f.choose, f.opset, f.rng, f"{f.name()}_")
    state, row = (Item(f"{body.prefix}{part}", F32, x.shape[1:], False) for part in ("state", "row"))
    body.items = [state, row]
    after = body.tame(body.add("Add", [state.name, row.name], (F32, row.shape, False))[0])
    out = body.add("Mul", [after.name, row.name], (F32, row.shape, False))[0]
    inputs = [helper.make_tensor_value_info(v.name, F32, v.shape) for v in (state, row)]
    graph = _body(f, body, inputs, [after, out])
    initial = f.weight(F32, *row.shape)
    attrs = {"scan_input_directions": [f.choose(2)]}
    f.add(
        "Scan",
        [initial, x.name],
        (F32, row.shape, False),
        (F32, x.shape, False),
        body=graph,
        num_scan_inputs=1,
        **attrs,
    )


Step = Callable[[File], Any]
SIMPLE: tuple[Step, ...] = (
    _unary,
    _binary,
    _guarded,
    _matmul,
    _reduce,
    _softmax,
    _transpose,
    _reshape,
    _slice,
    _gather,
)
STEPS: tuple[Step, ...] = (
    *SIMPLE, _binary, _two, _clip, _compare, _logic, _cast, _gemm, _conv, _conv, _pool, _normalized, _upsample,
    _recurrent, _arg, _top_k, _cumulative, _ones, _ones, _pad, _concat_split, _scatter, _repeat, _one_hot, _quantized,
    _sequence, _if, _loop, _scan,
)  # fmt: skip
