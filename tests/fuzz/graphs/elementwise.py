"""Rules for operators that work on each number by itself."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tests.fuzz.graphs.grower import Grower
from tests.fuzz.graphs.rules import RULES, Rule, rule
from tests.fuzz.graphs.values import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    FLOATS,
    I32,
    I64,
    INTS,
    NUMBERS,
    STRING,
    UNSIGNED,
    Item,
    UnfitNode,
    broadcast,
)

_UNARY = {
    "Relu": 1, "Sigmoid": 1, "Tanh": 1, "Softplus": 1, "Softsign": 1, "Sin": 7, "Cos": 7, "Atan": 7, "Erf": 9,
    "Asinh": 9, "HardSwish": 14, "Mish": 18, "Identity": 1, "Neg": 1, "Abs": 1, "Selu": 1,
}  # fmt: skip
_STEEP = {"Exp": 1, "Sinh": 9, "Cosh": 9, "Tan": 7}  # large for large inputs
_WITH_NUMBER = {"LeakyRelu": (6, "alpha"), "Elu": (1, "alpha"), "Celu": (12, "alpha"), "Swish": (24, "alpha")}
_STEPPING = {"Floor": 1, "Ceil": 1, "Round": 11, "Sign": 9}


def _unary(f: Grower, op: str) -> None:
    f.one(op, f.pick(NUMBERS if op in ("Relu", "Neg", "Abs", "Identity") else FLOATS))


for _op, _since in _UNARY.items():
    RULES.append(Rule(_op, lambda f, op=_op: _unary(f, op), _since, weight=0.8))  # type: ignore[misc]


@rule("Identity", weight=0.3)
def _identity_of_any(f: Grower) -> None:
    f.one("Identity", f.pick((*NUMBERS, BOOL, STRING)))


def _steep(f: Grower, op: str) -> None:
    f.one(op, f.one("Tanh", f.number()))


for _op, _since in _STEEP.items():
    RULES.append(Rule(_op, lambda f, op=_op: _steep(f, op), _since, weight=0.8))  # type: ignore[misc]


def _with_number(f: Grower, op: str) -> None:
    f.one(op, f.number(), alpha=f.of((0.1, 0.5, 1.0, 1.7)))


for _op, (_since, _) in _WITH_NUMBER.items():
    RULES.append(Rule(_op, lambda f, op=_op: _with_number(f, op), _since, weight=0.8))  # type: ignore[misc]


def _stepping(f: Grower, op: str) -> None:
    f.one(op, f.number(where=lambda item: item.exact or f.on_frequent(0.3)))


for _op, _since in _STEPPING.items():
    RULES.append(Rule(_op, lambda f, op=_op: _stepping(f, op), _since))  # type: ignore[misc]


@rule("Log", "Sqrt", "Reciprocal")
def _positive(f: Grower, op: str) -> None:
    x = f.number()
    f.one(op, f.one("Add", f.one("Abs", x), f.constant(f.of((0.25, 1.0)), x.dtype)))


@rule("Asin", "Acos", since=7, weight=0.9)
def _inverse(f: Grower, op: str) -> None:
    x = f.number()
    f.one(op, f.one("Mul", f.one("Sin", x), f.constant(0.9, x.dtype)))


@rule("Atanh", since=9, weight=0.9)
def _atanh(f: Grower) -> None:
    x = f.number()
    f.one("Atanh", f.one("Mul", f.one("Sin", x), f.constant(0.9, x.dtype)))


@rule("Acosh", since=9, weight=0.9)
def _acosh(f: Grower) -> None:
    x = f.number()
    f.one("Acosh", f.one("Add", f.one("Abs", x), f.constant(1.25, x.dtype)))


@rule("HardSigmoid", weight=0.8)
def _hard_sigmoid(f: Grower) -> None:
    f.one("HardSigmoid", f.number(), **({"alpha": 0.3, "beta": 0.4} if f.on_frequent(0.5) else {}))


@rule("Gelu", since=20)
def _gelu(f: Grower) -> None:
    f.one("Gelu", f.number(), **({"approximate": "tanh"} if f.on_frequent(0.5) else {}))


@rule("ThresholdedRelu", since=10, weight=0.8)
def _thresholded(f: Grower) -> None:
    f.one("ThresholdedRelu", f.number(), alpha=f.of((0.3, 1.0)))


@rule("Shrink", since=9, weight=0.8)
def _shrink(f: Grower) -> None:
    f.one("Shrink", f.number(), lambd=0.3, bias=f.of((0.0, 0.2)))


@rule("IsNaN", since=9, weight=1)
def _is_nan(f: Grower) -> None:
    f.one("IsNaN", f.number())


@rule("IsInf", since=10, weight=1)
def _is_inf(f: Grower) -> None:
    f.one("IsInf", f.number(), **({"detect_negative": 0} if f.on_frequent(0.3) else {}))


@rule("Add", "Sub", "Mul", weight=3)
def _arithmetic(f: Grower, op: str) -> None:
    x = f.pick(NUMBERS if f.on_frequent(0.3) else FLOATS)
    y = f.like(x)
    pair = (x, y) if f.on_frequent(0.6) else (y, x)
    made = f.one(op, *pair)
    if made.dtype in FLOATS and f.on_frequent(0.25):
        f.one("Tanh", made)


@rule("Div", weight=2)
def _divide(f: Grower) -> None:
    x = f.pick((F32, F64, F16, I32, I64))
    kind = f.kind(constant=3, guarded=2 if x.dtype in FLOATS else 0, count=1)
    if kind == "guarded":
        y = f.like(x)
        f.one("Div", x, f.one("Add", f.one("Abs", y), f.constant(0.5, x.dtype)))
    elif kind == "count":
        count = f.one("Cast", f.count(1, 60), to=helper.np_dtype_to_tensor_dtype(x.dtype))
        f.one("Div", x, count)
    else:
        number = f.constant(f.of((2, 3, 7, 10, 41, 49) if x.dtype not in FLOATS else (3, 0.1, 7, 41, 47, 49)), x.dtype)
        if x.dtype in (F32, F64) and x.exact and f.on_frequent(0.6):
            x = _multiples(f, x, number)
        y = f.one("Div", x, number)
        if x.dtype in FLOATS and x.exact and f.on_frequent(0.6):  # a rounded quotient may cross an integer
            f.one("Floor", y) if f.on_frequent(0.5) else f.one("Cast", y, to=helper.np_dtype_to_tensor_dtype(I64))


def _multiples(f: Grower, x: Item, number: Item) -> Item:
    """Whole numbers, some of which are multiples of `number`; or two multiples, selected by the sign of `x`.

    Both are exact."""
    if f.opset < 9 or f.on_frequent(0.4):
        return f.one("Floor", f.one("Mul", x, f.constant(f.of((16, 32, 64)), x.dtype)))
    ones = [f.constant(number.at(f.alive[0]) * (1 + f.choose(9)), x.dtype) for _ in range(2)]
    return f.one("Where", f.one("Greater", x, f.constant(0, x.dtype)), *ones)


@rule("Mod", since=10)
def _modulo(f: Grower) -> None:
    x = f.pick((*INTS, F32, F64), where=lambda item: item.exact)
    divisor = f.constant(f.of((2, 3, 7)), x.dtype) if f.on_frequent(0.7) else f.weight(x.dtype, (1,), 0.5, 3.0)
    if (divisor.at(f.alive[0]) == 0).any():
        divisor = f.constant(3, x.dtype)
    if f.on_frequent(0.3):
        divisor = f.one("Cast", f.count(1, 60), to=helper.np_dtype_to_tensor_dtype(x.dtype))
    f.one("Mod", x, divisor, **({"fmod": 1} if x.dtype in FLOATS else {}))


@rule("Pow", since=7)
def _power(f: Grower) -> None:
    x = f.pick((F32, F64))
    kind = f.kind(square=3, root=1, count=1, like=1)
    if kind == "square":
        f.one("Pow", x, f.constant(f.of((0, 1, 2, 3)), x.dtype))
        return
    base = f.one("Add", f.one("Abs", x), f.constant(0.5, x.dtype))
    if kind == "root":
        f.one("Pow", base, f.constant(f.of((0.5, -0.5, -1, 1.5)), x.dtype))
    elif kind == "count":
        f.one("Pow", f.one("Tanh", base), f.one("Cast", f.count(0, 9), to=helper.np_dtype_to_tensor_dtype(x.dtype)))
    else:
        f.one("Pow", base, f.one("Tanh", f.like(x)))


@rule("Max", "Min", "Sum", "Mean", since=8)
def _several(f: Grower, op: str) -> None:
    x = f.pick(NUMBERS if op in ("Max", "Min") and f.on_frequent(0.3) else FLOATS)
    f.emit(op, [x, *(f.like(x) for _ in range(f.choose(3)))])


@rule("Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual", since=7)
def _compare(f: Grower, op: str) -> None:
    x = f.pick(
        (*FLOATS, *INTS, *((BOOL, STRING) if op == "Equal" else ())), where=lambda v: v.exact or f.on_frequent(0.2)
    )
    y = f.like(x)
    made = f.one(op, *((x, y) if f.on_frequent(0.5) else (y, x)))
    if f.opset >= 9 and f.on_frequent(0.5):
        _where_of(f, made)


@rule("And", "Or", "Xor", since=7, weight=2)
def _logic(f: Grower, op: str) -> None:
    x = f.pick((BOOL,))
    f.one(op, x, f.like(x))


@rule("Not", weight=2)
def _not(f: Grower) -> None:
    f.one("Not", f.pick((BOOL,)))


@rule("Where", since=9, weight=1.5)
def _where(f: Grower) -> None:
    _where_of(f, f.pick((BOOL,)))


def _where_of(f: Grower, flags: Item) -> None:
    x = f.pick((*NUMBERS, BOOL, STRING))
    f.one("Where", flags, *((x, f.like(x)) if f.on_frequent(0.5) else (f.like(x), x)))


@rule("Clip", since=6, weight=1.5)
def _clip(f: Grower) -> None:
    x = f.pick((F32, F64, F16) if f.opset < 12 else (F32, F64, F16, *INTS))
    if f.opset < 11:
        f.one("Clip", x, **{name: bound for name, bound in (("min", -0.7), ("max", 0.9)) if f.on_frequent(0.7)})
        return
    bounds: list[Item | None] = []
    for low, high in ((-1, 1), (1, 4)):
        kind = f.kind(constant=3, absent=1, count=1, data=0.5)
        if kind == "constant":
            bounds.append(f.constant(max(low, 0) if x.dtype in UNSIGNED else low, x.dtype))
        elif kind == "count":
            count = f.count(0, 40, scalar=True)
            bounds.append(f.one("Cast", count, to=helper.np_dtype_to_tensor_dtype(x.dtype)))
        elif kind == "data":
            bounds.append(f.pick((x.dtype,), (0,)))
        else:
            bounds.append(None)
        del high
    f.one("Clip", x, *bounds)


@rule("Cast", weight=2)
def _cast(f: Grower) -> None:
    x = f.pick((*NUMBERS, BOOL), where=lambda item: item.exact or f.on_frequent(0.3))
    types = [F32, F64, I32, I64, BOOL, F16, *INTS, *((BF16,) if f.opset >= 13 else ())]
    to = f.of(types)
    if x.dtype in FLOATS and to in INTS:  # numbers outside of the range of the type become arbitrary ones
        x = f.one("Abs", x) if to in UNSIGNED else x
        largest = np.iinfo(to).max
        if any(np.abs(x.at(case).astype(np.float64)).max(initial=0) > largest for case in f.alive):
            raise UnfitNode("outside of the type")
    f.one("Cast", x, to=helper.np_dtype_to_tensor_dtype(to))


@rule("CastLike", since=15, weight=1)
def _cast_like(f: Grower) -> None:
    x = f.pick((F32, F64, I32, I64, BOOL), where=lambda item: item.exact)
    f.one("CastLike", x, f.pick((F32, F64, I32, I64)))


@rule("BitShift", since=11, weight=1.5)
def _shift(f: Grower) -> None:
    x = f.pick(UNSIGNED)
    f.one("BitShift", x, f.constant(f.choose(4), x.dtype), direction=f.of(("LEFT", "RIGHT")))


@rule("BitwiseAnd", "BitwiseOr", "BitwiseXor", since=18, weight=1.2)
def _bitwise(f: Grower, op: str) -> None:
    x = f.pick(INTS)
    f.one(op, x, f.like(x))


@rule("BitwiseNot", since=18, weight=1.2)
def _bitwise_not(f: Grower) -> None:
    f.one("BitwiseNot", f.pick(INTS))


@rule("PRelu", since=7)
def _prelu(f: Grower) -> None:
    x = f.number()
    slope = f.like(x)
    if broadcast(x, slope, f.alive) != x.shapes(f.alive):
        raise UnfitNode("a slope has to broadcast to the value")
    f.one("PRelu", x, slope)


@rule("Dropout", since=7, weight=1)
def _dropout(f: Grower) -> None:
    x = f.number()
    if f.opset < 12:
        f.one("Dropout", x, ratio=0.4)
    else:
        ratio = f.constant(0.4, np.float32) if f.on_frequent(0.5) else None
        training = f.constant(False, bool) if f.on_frequent(0.3) else None
        f.emit("Dropout", [x, ratio, training], outputs=1 + f.choose(2))
