"""The table of operator cases: each is one node with its inputs. Several tests run over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

from lathe.core.ops.opdef import registry

F32, F64, F16, BF16 = np.float32, np.float64, np.float16, ml_dtypes.bfloat16
I8, I32, I64, U8, U32, U64, BOOL = np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64, np.bool_
FAR = 2**63 - 1


@dataclass(frozen=True)
class Case:
    """`oracle` is "ort", or "onnx" where ONNX Runtime lacks the operator for these element types."""

    op: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    oracle: str = "ort"
    tolerance: float = 2e-6
    label: str = ""

    @property
    def param_indices(self) -> frozenset[int]:
        return frozenset(registry.get(self.op).params.values())


_labels: dict[str, Iterator[int]] = {}


def case(op: str, *inputs: Any, outputs: int = 1, oracle: str = "ort", tolerance: float = 2e-6, **attrs: Any) -> Case:
    label = f"{op}-{next(_labels.setdefault(op, count(1)))}"
    return Case(op, inputs, attrs, outputs, oracle, tolerance, label)


def floats(*shape: int, dtype: Any = F32, low: float = -3.0, high: float = 3.0) -> Any:
    """Random numbers, the same in every run."""
    seed = sum(extent * 7**i for i, extent in enumerate(shape)) + len(shape)
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


def ints(*shape: int, dtype: Any = I64, low: int = -9, high: int = 9) -> Any:
    seed = sum(extent * 5**i for i, extent in enumerate(shape)) + len(shape)
    return np.random.default_rng(seed).integers(low, high, shape, endpoint=True).astype(dtype)


def bools(*shape: int) -> Any:
    return ints(*shape) > 0


def vector(*items: Any, dtype: Any = I64) -> Any:
    return np.array(items, dtype)


def scalar(item: Any, dtype: Any = F32) -> Any:
    return np.array(item, dtype)


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30, -1e30, 0.5, 2.5, -2.5], F32)

_SHAPES = [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (4,)), ((3, 1, 5), (2, 1, 4, 1)), ((), (3, 2)), ((0, 3), (1, 3))]


# Numbers whose texts differ between ways of writing them: not finite, rounded, with and without exponents.
TEXTS_OF_NUMBERS = np.array(
    [np.nan, np.inf, -np.inf, 0.1, 1, -0.0, 123456.789, 1e10, 1e20, 1e-7, 1e-4, 1e-5, 1e15, 1e16, 3.4028235e38],
    np.float32,
)


def _arithmetic() -> list[Case]:
    cases = [case(op, floats(*a), floats(*b) + 4) for op in ("Add", "Sub", "Mul", "Div") for a, b in _SHAPES]
    for op in ("Add", "Sub", "Mul", "Div"):
        cases += [case(op, ints(3, 4, dtype=t), ints(1, 4, low=1, dtype=t)) for t in (I32, I64)]
        cases += [case(op, floats(3, 4, dtype=t), floats(4, dtype=t) + t(4)) for t in (F16, F64)]
        cases += [case(op, floats(3, 4, dtype=BF16), floats(4, low=1, dtype=BF16), oracle="onnx")]
    cases += [
        case("Div", vector(7, -7, 7, -7, 6, 0), vector(2, 2, -2, -2, -3, 5)),
        case("Div", ints(6, dtype=I8, low=-100, high=100), ints(6, dtype=I8, low=1), oracle="onnx"),
        case("Div", ints(6, dtype=U8, low=0, high=200), ints(6, dtype=U8, low=1)),
        case("Mod", vector(7, -7, 7, -7, 6, 0), vector(2, 2, -2, -2, -3, 5)),
        case("Mod", vector(7, -7, 7, -7, 6, 0), vector(2, 2, -2, -2, -3, 5), fmod=1),
        case("Mod", floats(3, 4), floats(4, low=0.5), fmod=1),
        case("Mod", ints(2, 3, dtype=U8, low=0), ints(3, dtype=U8, low=1)),
        case("Pow", floats(3, 4, low=0.1), floats(4)),
        case("Pow", floats(3, 4), scalar(2.0)),
        case("Pow", floats(3, 4), scalar(3, I64)),
        case("Pow", ints(3, 4, dtype=I32), scalar(3, I32)),
        case("Pow", ints(4), vector(2.0, 0.5, 1.0, 3.0, dtype=F32), oracle="onnx"),
        case("Pow", floats(3, dtype=F64), vector(2, 3, 4, dtype=I32)),
    ]
    for op in ("Max", "Min", "Sum", "Mean"):
        cases += [
            case(op, floats(2, 3), floats(3), floats(2, 1)),
            case(op, floats(4)),
            case(op, floats(3, dtype=F64), oracle="onnx"),
        ]
    for op in ("Max", "Min"):
        cases += [case(op, ints(2, 3), ints(3)), case(op, SPECIAL[:, None], SPECIAL)]
        cases += [
            case(op, floats(3, dtype=F16), floats(2, 3, dtype=F16)),
            case(op, ints(3, dtype=U8, low=0), ints(1, dtype=U8, low=0)),
        ]
    return cases


def _unary() -> list[Case]:
    x, unit, above = floats(3, 5), floats(3, 5, low=-1, high=1), floats(3, 5, low=1, high=9)
    cases = [case(op, data) for op in ("Neg", "Abs", "Sign") for data in (x, ints(4), ints(4, dtype=I8), SPECIAL[:6])]
    cases += [case("Sign", ints(4, dtype=U8, low=0)), case("Abs", ints(4, dtype=U8, low=0))]
    cases += [
        case(op, data)
        for op in ("Exp", "Floor", "Ceil", "Round", "Erf", "Tanh", "Sigmoid")
        for data in (x, 5 * x, SPECIAL)
    ]
    cases += [case("Round", np.arange(-4.5, 5, 0.5, F32)), case("Round", np.arange(-4.5, 5, 0.5, F64))]
    cases += [case(op, above) for op in ("Sqrt", "Log", "Reciprocal", "Acosh")]
    cases += [case(op, SPECIAL) for op in ("Sqrt", "Log", "Reciprocal")]
    cases += [case(op, x) for op in ("Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh")]
    cases += [case(op, unit) for op in ("Asin", "Acos", "Atanh")]
    cases += [case(op, data.astype(F16), tolerance=2e-3) for op, data in (("Sqrt", above), ("Exp", unit), ("Tanh", x))]
    cases += [case(op, data.astype(F64)) for op, data in (("Sqrt", above), ("Exp", x), ("Log", above), ("Sin", x))]
    cases += [
        case(op, data.astype(BF16), oracle="onnx", tolerance=2e-2) for op, data in (("Sqrt", above), ("Exp", unit))
    ]
    cases += [case("Erf", floats(7, low=-6, high=6)), case("Erf", floats(0, 3)), case("Exp", scalar(1.5))]
    return cases


def _activations() -> list[Case]:
    x = floats(4, 6, low=-8, high=8)
    names = (
        "Relu",
        "LeakyRelu",
        "Elu",
        "Selu",
        "Celu",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Softplus",
        "Softsign",
        "Mish",
    )
    cases = [case(op, data) for op in (*names, "ThresholdedRelu", "Shrink") for data in (x, floats(3), floats(2, 0))]
    return [
        *cases,
        case("Relu", SPECIAL),
        case("Relu", ints(5, dtype=I32)),
        case("Relu", floats(5, dtype=F16)),
        case("LeakyRelu", x, alpha=0.3),
        case("Elu", x, alpha=0.5),
        case("Selu", x, alpha=1.5, gamma=0.9),
        case("Celu", x, alpha=2.0),
        case("Gelu", x, approximate="tanh"),
        case("Gelu", floats(9, dtype=F64), oracle="onnx"),
        case("HardSigmoid", x, alpha=0.3, beta=0.4),
        case("ThresholdedRelu", x, alpha=2.0),
        case("Shrink", x, lambd=1.5, bias=0.5),
        case("Shrink", ints(6, dtype=I32), lambd=1.5, bias=1.0),
        case("Swish", x, oracle="onnx"),
        case("Swish", x, alpha=1.5, oracle="onnx"),
        case("PRelu", x, floats(6)),
        case("PRelu", floats(2, 3, 4), floats(3, 1)),
        case("PRelu", ints(2, 3, dtype=I32), ints(3, dtype=I32), oracle="onnx"),
        case("Clip", x, scalar(-1.0), scalar(2.0)),
        case("Clip", x, None, scalar(2.0)),
        case("Clip", x, scalar(-1.0)),
        case("Clip", x),
        case("Clip", x, scalar(2.0), scalar(-1.0)),
        case("Clip", ints(3, 4), scalar(-2, I64), scalar(5, I64)),
        case("Clip", ints(5, dtype=U8, low=0), scalar(2, U8), scalar(5, U8)),
        case("Clip", floats(5, dtype=F16), scalar(-1, F16), scalar(1, F16)),
    ]


def _logic() -> list[Case]:
    a, b = ints(3, 4, low=0, high=3), ints(4, low=0, high=3)
    cases = [
        case(op, a.astype(t), b.astype(t))
        for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
        for t in (F32, F64, I32, I64)
    ]
    cases += [
        case(op, SPECIAL[:, None], SPECIAL) for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    ]
    cases += [case(op, bools(3, 4), bools(4)) for op in ("And", "Or", "Xor", "Equal")]
    cases += [case(op, SPECIAL) for op in ("IsNaN", "IsInf")]
    cases += [case("IsInf", SPECIAL, detect_positive=p, detect_negative=n) for p, n in ((0, 1), (1, 0), (0, 0))]
    cases += [
        case(op, ints(3, 4, dtype=t), ints(4, dtype=t))
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
        for t in (I32, I64)
    ]
    cases += [case("BitwiseNot", ints(3, 4, dtype=t)) for t in (I8, I64)]
    cases += [
        case("BitShift", ints(3, 4, dtype=t, low=0), ints(4, dtype=t, low=0), direction=d)
        for t in (U8, U32, U64)
        for d in ("LEFT", "RIGHT")
    ]
    return [
        *cases,
        case("Equal", np.array(["a", "b", "c"], object), np.array(["a", "x", "c"], object)),
        case("Not", bools(3, 4)),
        case("Where", bools(3, 4), floats(3, 4), floats(4)),
        case("Where", bools(3, 1), ints(4), ints(2, 1, 1)),
        case("Where", bools(0, 4), floats(0, 4), scalar(1.0)),
        case("Identity", floats(2, 3)),
        case("Dropout", floats(2, 3), outputs=2),
        case("Dropout", floats(2, 3), scalar(0.4), scalar(False, BOOL), outputs=2),
        *(case("Cast", floats(3, 4), to=t) for t in (1, 6, 7, 10, 11)),
        *(case("Cast", ints(3, 4, low=0), to=t) for t in (1, 2, 3, 6, 9, 10, 11, 12, 13)),
        case("Cast", bools(4), to=TensorProto.FLOAT),
        case("Cast", SPECIAL[[0, 1, 2, 6]], to=TensorProto.BOOL),
        case("Cast", np.array(["1.5", "-2", "1e3"], object), to=TensorProto.FLOAT),
        case("Cast", np.array(["7", "-2"], object), to=TensorProto.INT64),
        case("Cast", ints(4), to=TensorProto.STRING),
        case("Cast", TEXTS_OF_NUMBERS, to=TensorProto.STRING),
        case("Cast", TEXTS_OF_NUMBERS.astype(np.float64), to=TensorProto.STRING),
        case("Cast", vector(True, False), to=TensorProto.STRING),
        case("Cast", vector(300, -300, 511), to=TensorProto.INT8),
        case("Cast", floats(9, low=-20, high=20), to=TensorProto.INT4, oracle="onnx"),
        case("Cast", floats(6, low=-900, high=900), to=TensorProto.FLOAT8E4M3FN, oracle="onnx"),
        case("Cast", floats(6, low=-900, high=900), to=TensorProto.BFLOAT16, oracle="onnx"),
    ]


def _products() -> list[Case]:
    shapes = [
        ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((2, 1, 2, 3), (4, 3, 5)), ((3,), (3, 4)),
        ((2, 3), (3,)), ((3,), (3,)), ((3,), (2, 3, 4)), ((2, 2, 3), (3,)), ((0, 3), (3, 4)), ((2, 0), (0, 3)),
        ((1, 7, 13), (13, 17)),
    ]  # fmt: skip
    a, b = floats(4, 3), floats(3, 5)
    return [
        *(case("MatMul", floats(*x), floats(*y), tolerance=1e-5) for x, y in shapes),
        case("MatMul", ints(2, 3, dtype=I32), ints(3, 4, dtype=I32)),
        case("MatMul", floats(2, 3, dtype=F64), floats(3, 4, dtype=F64)),
        case("MatMul", floats(2, 3, dtype=F16), floats(3, 4, dtype=F16), tolerance=2e-3),
        *(case("Einsum", a, b, equation=equation, tolerance=1e-5) for equation in ("ij,jk->ik", "ij, jk", "ij,jk->k")),
        case("Einsum", floats(2, 5, 3), floats(2, 3, 4), equation="bij,bjk->bik", tolerance=1e-5),
        case("Einsum", floats(2, 5, 3), floats(3, 4), equation="...j,jk->...k", tolerance=1e-5),
        case("Einsum", floats(2, 5, 4, 3), floats(2, 6, 4, 3), equation="bqhd,bkhd->bhqk", tolerance=1e-5),
        case("Einsum", floats(4, 4), equation="ii->i"),
        case("Einsum", floats(3, 4), equation="ij->ji"),
        case("Gemm", a, b),
        case("Gemm", a, b, floats(5), tolerance=1e-5),
        case("Gemm", a, b, floats(4, 1), alpha=0.5, beta=2.0, tolerance=1e-5),
        case("Gemm", a.T.copy(), b, scalar(1.5), transA=1),
        case("Gemm", a, b.T.copy(), floats(4, 5), transB=1, tolerance=1e-5),
        case("Gemm", a.T.copy(), b.T.copy(), floats(1, 5), transA=1, transB=1, alpha=0.25, tolerance=1e-5),
        case("Gemm", floats(4, 3, dtype=F64), floats(3, 5, dtype=F64)),
        case("Gemm", floats(0, 3), floats(3, 5), floats(5)),
        *(case(op, floats(3, 4, 5), axis=axis) for op in ("Softmax", "LogSoftmax", "Hardmax") for axis in (-1, 0, 1)),
        *(case(op, floats(2, 7, dtype=F64)) for op in ("Softmax", "LogSoftmax")),
        *(case(op, 50 * floats(3, 9), tolerance=1e-5) for op in ("Softmax", "LogSoftmax")),
        case("Softmax", floats(0, 4)),
        case("Softmax", floats(3, 4, dtype=F16), tolerance=2e-3),
    ]


def _reductions() -> list[Case]:
    x, positive = floats(3, 4, 5), floats(3, 4, 5, low=0.5, high=2.0)
    plain = (
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSumExp",
    )
    data = {**dict.fromkeys(plain, x), "ReduceProd": positive, "ReduceLogSum": positive}
    cases = []
    for op, array in data.items():
        cases += [
            case(op, array, tolerance=1e-5),
            case(op, array, keepdims=0, tolerance=1e-5),
            case(op, array, vector(1), tolerance=1e-5),
            case(op, array, vector(-1, 0), keepdims=0, tolerance=1e-5),
            case(op, array, noop_with_empty_axes=1, tolerance=1e-5),
            case(op, scalar(2.5), tolerance=1e-5),
        ]
    cases += [
        case(op, ints(3, 4, dtype=t), vector(1))
        for op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
        for t in (I32, I64)
    ]
    cases += [
        case("ReduceMean", ints(3, 4, dtype=I32), vector(1)),
        case("ReduceSumSquare", ints(3, 4, dtype=I32), vector(0)),
    ]
    cases += [case(op, floats(2, 0, 3), vector(1)) for op in ("ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare")]
    cases += [case(op, floats(2, 0, 3), vector(1), oracle="onnx") for op in ("ReduceMax", "ReduceMin")]
    cases += [case(op, bools(3, 4), vector(1)) for op in ("ReduceMax", "ReduceMin")]
    cases += [case(op, floats(3, 4, dtype=F16), vector(1), tolerance=5e-3) for op in ("ReduceSum", "ReduceMean")]
    ties = ints(4, 6, low=0, high=2).astype(F32)
    for op in ("ArgMax", "ArgMin"):
        cases += [case(op, x, axis=axis, keepdims=keep) for axis in (0, 1, -1) for keep in (0, 1)]
        cases += [case(op, ties, axis=1, select_last_index=last) for last in (0, 1)]
        cases += [case(op, ints(3, 4, dtype=I32), axis=1)]
    for op, oracle in (("CumSum", "ort"), ("CumProd", "onnx")):
        for exclusive, reverse in ((0, 0), (0, 1), (1, 0), (1, 1)):
            cases.append(
                case(op, x, scalar(1, I64), exclusive=exclusive, reverse=reverse, oracle=oracle, tolerance=1e-5)
            )
        cases += [case(op, ints(2, 3, dtype=I32, low=1, high=3), scalar(-1, I64), oracle=oracle)]
    cases += [
        case("TopK", ties, vector(k), axis=axis, largest=g, outputs=2)
        for k, axis in ((3, 1), (2, 0), (0, 1))
        for g in (0, 1)
    ]
    cases += [
        case("TopK", ints(3, 4), vector(2), outputs=2),
        case("TopK", floats(2, 5, dtype=F64), vector(5), outputs=2),
    ]
    return cases


def _movement() -> list[Case]:
    x = floats(2, 3, 4)
    reshapes = [(6, 4), (-1,), (0, -1), (0, 0, 2, 2), (2, -1, 2), (4, 1, -1), (1, -1), (2, 3, 4)]
    return [
        *(case("Reshape", x, vector(*shape)) for shape in reshapes),
        case("Reshape", floats(2, 0, 3), vector(0, 5), allowzero=1),
        case("Reshape", floats(2, 0, 3), vector(3, 0)),
        case("Reshape", scalar(2.0), vector(1, 1)),
        case("Reshape", floats(1), np.zeros(0, I64)),
        *(case("Flatten", x, axis=axis) for axis in (0, 1, 2, 3, -1, -3)),
        case("Squeeze", floats(2, 1, 3, 1), vector(1)),
        case("Squeeze", floats(2, 1, 3, 1), vector(-1, 1)),
        case("Squeeze", floats(2, 1, 3, 1)),
        *(case("Unsqueeze", x, vector(*axes)) for axes in ((0,), (1, -1), (2, 0), (-1,))),
        case("Transpose", x),
        *(case("Transpose", x, perm=perm) for perm in ([0, 2, 1], [1, 0, 2], [2, 0, 1])),
        case("Transpose", ints(3, 2), perm=[1, 0]),
        case("Concat", x, floats(2, 1, 4), axis=1),
        case("Concat", x, x, floats(5, 3, 4), axis=-3),
        case("Concat", ints(3), ints(0), ints(2), axis=0),
        case("Split", x, vector(1, 2), axis=1, outputs=2),
        case("Split", x, vector(4, 0), axis=-1, outputs=2),
        case("Split", floats(7, 2), num_outputs=3, outputs=3),
        case("Split", floats(2, 6), axis=1, num_outputs=2, outputs=2),
        *(case("Expand", floats(3, 1), vector(*shape)) for shape in ((3, 4), (2, 1, 5), (1,), (2, 3, 1))),
        case("Expand", scalar(2.0), vector(2, 3)),
        case("Tile", floats(2, 3), vector(2, 1)),
        case("Tile", floats(2, 3), vector(1, 3)),
        case("Tile", floats(2, 3), vector(0, 2)),
        *(case("DepthToSpace", floats(2, 12, 3, 2), blocksize=2, mode=mode) for mode in ("DCR", "CRD")),
        case("SpaceToDepth", floats(2, 3, 4, 6), blocksize=2),
        case("SpaceToDepth", floats(2, 3, 4, 6), blocksize=2, mode="CRD", oracle="onnx"),
    ]


def _slicing() -> list[Case]:
    x, image = floats(4, 5, 6), floats(2, 3, 4, 5)
    return [
        case("Slice", x, vector(1), vector(3)),
        case("Slice", x, vector(1, 0), vector(FAR, -1), vector(1, 2)),
        case("Slice", x, vector(-3), vector(FAR), vector(-1)),
        case("Slice", x, vector(-1, 0), vector(-FAR, 5), vector(1, 2), vector(-1, 2)),
        case("Slice", x, vector(4), vector(0), vector(2), vector(-2)),
        case("Slice", x, vector(3), vector(2), vector(1)),
        case("Slice", x, vector(-100), vector(100), vector(1)),
        case("Slice", x, vector(0, 0, 1), vector(FAR, 3, FAR)),
        case(
            "Slice",
            ints(7, dtype=I32),
            vector(1, dtype=I32),
            vector(6, dtype=I32),
            vector(0, dtype=I32),
            vector(3, dtype=I32),
        ),
        case("Pad", image, vector(0, 1, 2, 0, 0, 0, 1, 3)),
        case("Pad", image, vector(0, 0, 1, 1, 0, 0, 1, 1), scalar(1.5)),
        case("Pad", image, vector(1, 2, 3, 4), None, vector(-1, 2)),
        case("Pad", image, vector(0, 0, -1, 1, 0, 0, 1, -2)),
        *(case("Pad", image, vector(0, 1, 2, 1, 0, 2, 3, 0), mode=mode) for mode in ("reflect", "edge", "wrap")),
        case("Pad", ints(3), vector(1, 2), scalar(7, I64)),
        case("Pad", floats(2, 0), vector(1, 1, 0, 2)),
        *(case("Pad", floats(1), vector(*pads), scalar(1.5)) for pads in ((-2, 2), (2, -2), (-3, 4), (3, -3))),
        *(case("Pad", floats(2, 0), vector(1, *pads[:1], 0, *pads[1:])) for pads in ((-1, 1), (2, -2), (-1, 3))),
        *(
            case("Trilu", floats(2, 4, 5), k, upper=upper)
            for upper in (0, 1)
            for k in (None, scalar(1, I64), scalar(-2, I64))
        ),
        case("Trilu", ints(3, 3)),
        case("ReverseSequence", floats(4, 3), vector(4, 1, 2)),
        case("ReverseSequence", floats(3, 4, 2), vector(4, 0, 2), batch_axis=0, time_axis=1),
    ]


def _creation() -> list[Case]:
    return [
        case("Constant", value_ints=[1, 2, 3]),
        case("Constant", value_float=1.5),
        case("Constant", value_floats=[1.5, 2.0]),
        case("Constant", value_int=4),
        case("ConstantOfShape", vector(2, 3)),
        case("ConstantOfShape", np.zeros(0, I64)),
        case("ConstantOfShape", vector(2, 0), value=vector(7, dtype=I32)),
        case("Range", scalar(1, I64), scalar(10, I64), scalar(3, I64)),
        case("Range", scalar(10, I32), scalar(1, I32), scalar(-2, I32)),
        case("Range", scalar(0.5), scalar(2.1), scalar(0.25)),
        case("Range", scalar(3, I64), scalar(1, I64), scalar(1, I64)),
        case("EyeLike", floats(3, 4), k=1),
        case("EyeLike", ints(4, 3), dtype=TensorProto.FLOAT, k=-1),
        case("Shape", floats(2, 3, 4)),
        case("Shape", floats(2, 3, 4), start=1),
        case("Shape", floats(2, 3, 4), start=-2, end=-1),
        case("Shape", scalar(1.0)),
        case("Size", floats(2, 3, 4)),
        case("Size", floats(2, 0)),
    ]


def _indexing() -> list[Case]:
    x = floats(4, 5, 6)
    picks = ints(4, 3, 6, low=-4, high=3)
    add = {"reduction": "add"}
    return [
        case("Gather", x, vector(0, 2, -1)),
        case("Gather", x, ints(2, 3, low=0, high=4), axis=1),
        case("Gather", x, scalar(3, I64), axis=-1),
        case("Gather", floats(10, 4), ints(2, 3, low=0, dtype=I32)),
        case("Gather", x, np.zeros((0,), I64), axis=1),
        case("Gather", ints(5), scalar(-2, I64)),
        case("GatherElements", x, ints(4, 5, 6, low=-5, high=4), axis=1),
        case("GatherElements", x, ints(4, 5, 2, low=0, high=5), axis=-1),
        case("GatherElements", x, ints(2, 5, 6, low=0, high=3)),
        case("GatherND", x, vector([0, 1], [3, -1])),
        case("GatherND", x, vector([[0], [1]])),
        case("GatherND", x, vector([0, 1, 2])),
        case("GatherND", x, ints(2, 3, 0)),
        case("GatherND", x, ints(4, 2, 1, low=0, high=4), batch_dims=1),
        case("GatherND", floats(2, 3, 4), ints(2, 3, 5, 1, low=0, high=3), batch_dims=2),
        case("ScatterElements", x, np.tile(np.arange(3)[:, None], (4, 1, 6)), floats(4, 3, 6), axis=1),
        *(
            case("ScatterElements", x, picks, floats(4, 3, 6), axis=0, reduction=how)
            for how in ("add", "mul", "max", "min")
        ),
        case("ScatterND", x, vector([1], [-1]), floats(2, 5, 6)),
        case("ScatterND", x, ints(1, 0), floats(1, 4, 5, 6)),
        case("ScatterND", x, vector([1, 2], [0, 4], [1, 2]), floats(3, 6), **add),
        *(
            case("ScatterND", x, vector([1, 2, 3], [1, 2, 3]), floats(2), reduction=how)
            for how in ("mul", "max", "min")
        ),
        case("OneHot", ints(2, 3, low=-5, high=5), scalar(4, I64), vector(0.5, 2.0, dtype=F32)),
        case("OneHot", ints(2, 3, low=0, high=5), vector(6), vector(0, 1), axis=0),
        case("OneHot", ints(3, low=0, high=5).astype(F32), scalar(6.0), vector(0.0, 1.0, dtype=F32), axis=1),
        case("NonZero", ints(3, 4, low=0, high=1)),
        case("NonZero", bools(5)),
        case("NonZero", np.zeros((2, 2), F32)),
        case("Compress", x, vector(1, 0, 1, 1).astype(BOOL), axis=0),
        case("Compress", x, vector(0, 1, 1).astype(BOOL), axis=-1),
        case("Compress", floats(2, 3), vector(0, 1, 0, 1, 1).astype(BOOL)),
        case("Unique", vector(2, 1, 1, 3, 4, 3), outputs=4),
        case("Unique", vector(2, 1, 1, 3, 4, 3, dtype=F32), sorted=0, outputs=4),
        case("Unique", vector([1, 0, 0], [1, 0, 0], [2, 3, 4]), axis=0, outputs=4),
    ]


_FAMILIES = (
    _arithmetic,
    _unary,
    _activations,
    _logic,
    _products,
    _reductions,
    _movement,
    _slicing,
    _creation,
    _indexing,
)
CASES: Sequence[Case] = [each for family in _FAMILIES for each in family()]
