"""Cases for gradient checks: one node per differentiable operator, with float64 inputs away from kinks.

Arrays of real numbers are inputs of the graph; all others are constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.terms import Writer


@dataclass(frozen=True)
class Case:
    op: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1

    @property
    def label(self) -> str:
        shown = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{self.op}({shown})"

    def graph(self) -> tuple[Graph, dict[str, Any]]:
        """The node in a graph, and its feeds."""
        graph = Graph(self.op.lower())
        writer, feeds, values = Writer(graph), dict[str, Any](), []
        for index, array in enumerate(self.inputs):
            if array is None:
                values.append(None)
            elif np.asarray(array).dtype == np.float64:
                feeds[f"x{index}"] = np.asarray(array)
                values.append(writer.input(f"x{index}", TensorType(DType.FLOAT64, np.shape(array))).value)
            else:
                values.append(writer.array(array).value)
        graph.outputs = writer.emit(self.op, values, self.attrs, self.outputs)
        return graph, feeds


def case(op: str, *inputs: Any, outputs: int = 1, **attrs: Any) -> Case:
    return Case(op, inputs, attrs, outputs)


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> Any:
    """Random numbers without pattern, at least 1e-3 apart from each other; the same in every run."""
    count = int(np.prod(shape))
    seed = sum(extent * 7**i for i, extent in enumerate(shape)) + len(shape)
    steps = np.random.default_rng(seed).permutation(count) + 0.37
    return (low + (high - low) * steps / max(count, 1)).reshape(shape)


def whole(*items: Any, dtype: Any = np.int64) -> Any:
    return np.array(items, dtype)


def _elementwise() -> Iterator[Case]:
    x, unit, above = real(3, 4), real(3, 4, low=-0.9, high=0.9), real(3, 4, low=1.1, high=5)
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"):
        yield case(op, real(2, 3, 4), real(3, 1, low=0.6, high=3))
    for op in (
        "Neg",
        "Abs",
        "Exp",
        "Erf",
        "Sin",
        "Cos",
        "Tan",
        "Atan",
        "Sinh",
        "Cosh",
        "Tanh",
        "Asinh",
        "Identity",
        "RoundableRows",
    ):
        yield case(op, unit if op == "Tan" else x)
    for op in ("Asin", "Acos", "Atanh"):
        yield case(op, unit)
    for op in ("Sqrt", "Log", "Reciprocal", "Acosh"):
        yield case(op, above)
    yield case("Pow", above, real(4))
    yield case("Pow", x, whole(3))
    yield case("Mod", x * 3, real(4, low=0.8, high=1.9), fmod=1)
    yield case("Mod", x * 3, real(4, low=0.8, high=1.9))
    yield case("Max", real(4), real(3, 4), real(3, 1))
    yield case("Where", x > 0, x, real(4))
    for low, high in ((np.array(-1.0), np.array(1.1)), (None, np.array(0.4)), (np.array(0.4), None)):
        yield case("Clip", x, low, high)
    yield case("Cast", x, to=DType.FLOAT64)
    yield case("PRelu", x, real(4))
    plain = ("Relu", "HardSwish", "Sigmoid", "Softplus", "Softsign", "Mish", "Swish", "Gelu", "LeakyRelu", "Elu")
    yield from (case(op, 2 * x) for op in (*plain, "Selu", "Celu", "HardSigmoid", "ThresholdedRelu", "Shrink"))
    yield case("Gelu", x, approximate="tanh")
    yield case("Swish", x, alpha=1.7)
    for op in ("Elu", "Celu", "LeakyRelu", "ThresholdedRelu"):
        yield case(op, 2 * x, alpha=0.7)


def _products() -> Iterator[Case]:
    shapes = [
        ((3, 4), (4, 2)),
        ((4,), (4, 2)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 3, 4), (4, 2)),
        ((5, 1, 3, 4), (2, 4, 2)),
    ]
    yield from (case("MatMul", real(*a), real(*b)) for a, b in shapes)
    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        left, right = (4, 3) if a else (3, 4), (2, 4) if b else (4, 2)
        yield case("Gemm", real(*left), real(*right), real(2), transA=a, transB=b, alpha=0.7, beta=1.3)
    yield case("ExpertProduct", real(5, 3), whole(1, -1, 1, 0, 3), real(4, 2, 3))
    yield case("ExpertProduct", real(2, 1, 3), whole((1, 0), (2, 2)), real(4, 2, 3))
    equations = (
        ("ij,jk->ik", (2, 3), (3, 4)), ("...ij,jk", (2, 2, 3), (3, 4)), ("ij->j", (2, 3)), ("ij,ij->", (2, 3), (2, 3)),
        ("i,j,k->ki", (2,), (3,), (2,)), ("...a,...a->...", (2, 1, 3), (2, 4, 3)),
    )  # fmt: skip
    for equation, *sizes in equations:
        yield case("Einsum", *(real(*size) for size in sizes), equation=equation)


def _reductions() -> Iterator[Case]:
    names = ("Sum", "Mean", "Prod", "Max", "Min", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    for name in names:
        x = real(2, 3, 4, low=0.2 if name == "LogSum" else -2)
        yield case(f"Reduce{name}", x, axes=(0, 2), keepdims=0)
        yield case(f"Reduce{name}", x, axes=(-2,))
    yield case("ReduceProd", np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 3.0]]), axes=(1,))
    for op in ("Softmax", "LogSoftmax"):
        yield case(op, real(2, 3, 4), axis=1)
    for reverse in (0, 1):
        yield case("CumSum", real(3, 4), whole(1)[0], exclusive=1 - reverse, reverse=reverse)
        zeros = np.array([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
        yield case("CumProd", zeros, whole(1)[0], exclusive=reverse, reverse=reverse)
    yield case("TopK", real(3, 5), whole(2), outputs=2, axis=1)


def _movement() -> Iterator[Case]:
    x = real(2, 3, 4)
    yield case("Reshape", x, whole(4, -1))
    yield case("Flatten", x)
    yield case("Squeeze", real(2, 1, 3), whole(1))
    yield case("Unsqueeze", x, whole(0, 3))
    yield case("Transpose", x, perm=(2, 0, 1))
    yield case("Concat", x, real(2, 2, 4), axis=1)
    yield case("Split", x, whole(1, 3), outputs=2, axis=2)
    yield case("Expand", real(3, 1), whole(2, 3, 4))
    yield case("Tile", real(2, 3), whole(2, 3))
    for mode in ("DCR", "CRD"):
        yield case("DepthToSpace", real(1, 8, 2, 3), blocksize=2, mode=mode)
        yield case("SpaceToDepth", real(1, 2, 4, 6), blocksize=2, mode=mode)
    for start, end, step in ((1, 6, 1), (0, 7, 3), (-1, -8, -2), (5, 1, -1), (3, 3, 1)):
        yield case("Slice", real(2, 7), whole(start), whole(end), whole(1), whole(step))
    yield case("Pad", x, whole(0, 1, 2, 0, 0, -1), np.array(0.5))
    for mode in ("reflect", "edge", "wrap"):
        yield case("Pad", real(3, 4), whole(1, 2, 0, 1), mode=mode)
    yield case("Trilu", real(3, 4), whole(1)[0])
    yield case("ReverseSequence", real(4, 3), whole(2, 4, 1))
    yield case("Range", np.array(1.0), np.array(5.3), np.array(0.7))
    yield case("Dropout", x)


def _indexing() -> Iterator[Case]:
    x = real(4, 3, 2)
    yield case("Gather", x, whole([0, 2], [-1, 0]), axis=1)
    yield case("GatherElements", real(3, 4), whole([0, 1, 1], [3, 3, -1]), axis=1)
    yield case("GatherND", x, whole([0, 1], [3, -1], [0, 1]))
    yield case("GatherND", x, whole([[0], [1]], [[2], [2]], [[1], [0]], [[0], [0]]), batch_dims=1)
    places = whole([0, 1, 0], [2, 3, 3])
    for reduction in ("add", "mul", "max", "min"):
        yield case(
            "ScatterElements", real(2, 4, low=0.5), places, real(2, 3, low=0.4, high=1.9), axis=1, reduction=reduction
        )
        yield case("ScatterND", x + 3, whole([1, 2], [0, 0], [1, 2]), real(3, 2, low=0.4), reduction=reduction)
    factors = np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 1.5]])  # of two factors at a place, one is 0
    yield case("ScatterElements", real(2, 4, low=0.5), places, factors, axis=1, reduction="mul")
    factors = np.array([[0.0, 2.0], [1.0, 0.0], [0.0, 3.0]])  # of two factors at a place, both are 0
    yield case("ScatterND", x, whole([1, 2], [0, 0], [1, 2]), factors, reduction="mul")
    for op in ("Scatter", "ScatterElements"):
        yield case(op, real(2, 4), whole([0, 1, 3], [2, 3, 0]), real(2, 3), axis=1)
    yield case("ScatterND", x, whole([1], [-1]), real(2, 3, 2))
    yield case("OneHot", whole(1, 2, 7), whole(4)[0], real(2))
    yield case("Compress", x, np.array([True, False, True]), axis=1)
    yield case("Compress", x, np.array([True, False, True]))


def _norms() -> Iterator[Case]:
    for mode in (0, 1):
        data = (real(2, 3, 4), real(3), real(3) + 1, real(3) * 2, real(3, low=0.5))
        yield case("BatchNormalization", *data, training_mode=mode, outputs=3 if mode else 1)
    yield case("InstanceNormalization", real(2, 3, 4), real(3), real(3) + 1)
    yield case("GroupNormalization", real(2, 4, 3), real(4), real(4) + 1, num_groups=2)
    yield case("LayerNormalization", real(2, 3, 4), real(4), real(4) + 1)
    yield case("LayerNormalization", real(2, 3, 4), real(3, 4), axis=1)
    yield case("RMSNormalization", real(2, 3, 4), real(4))
    yield case("MeanVarianceNormalization", real(2, 3, 2, 2))
    for p in (1, 2):
        yield case("LpNormalization", real(2, 3), p=p, axis=0)
    yield case("LRN", real(2, 5, 3), size=3, alpha=0.3)
    yield case("LRN", real(2, 4, 3), size=2, alpha=0.3)


def _convolutions() -> Iterator[Case]:
    yield case("Conv", real(2, 3, 5, 4), real(4, 3, 3, 2), real(4), pads=(1, 1, 0, 1))
    yield case("Conv", real(2, 4, 7), real(6, 2, 3), real(6), group=2, strides=(2,))
    yield case("Conv", real(1, 2, 6, 7), real(2, 2, 2, 3), strides=(2, 2), dilations=(2, 1), pads=(1, 0, 0, 2))
    yield case("Conv", real(1, 2, 6, 7), real(2, 2, 2, 3), strides=(2, 2), auto_pad="SAME_LOWER")
    yield case("ConvTranspose", real(2, 3, 4), real(3, 2, 3), real(2), strides=(2,), pads=(1, 0), output_padding=(1,))
    yield case("ConvTranspose", real(1, 4, 3, 3), real(4, 1, 2, 2), real(2), group=2)
    yield case("ConvTranspose", real(1, 2, 3), real(2, 1, 3), strides=(2,), auto_pad="SAME_UPPER", output_shape=(6,))
    yield case("ConvWeightGradient", real(2, 4, 5), real(2, 6, 3), kernel_shape=(3,), group=2)
    yield case("MaxPool", real(2, 2, 5, 5), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    yield case("MaxPool", real(1, 1, 5, 5), kernel_shape=(2, 2), strides=(2, 2), ceil_mode=1, dilations=(2, 1))
    yield case("MaxPoolGradient", real(1, 2, 6), real(1, 2, 3), kernel_shape=(2,), strides=(2,))
    for counted in (0, 1):
        pads = (1, 0, 1, 1)
        yield case("AveragePool", real(1, 2, 5, 4), kernel_shape=(3, 2), pads=pads, count_include_pad=counted)
    yield case("AveragePool", real(1, 1, 6, 5), kernel_shape=(2, 2), strides=(3, 2), ceil_mode=1)
    yield case("AveragePool", real(1, 1, 6, 5), kernel_shape=(2, 2), auto_pad="SAME_UPPER")
    yield case("LpPool", real(1, 2, 5), kernel_shape=(3,), p=3)
    yield from (case(op, real(2, 2, 3, 3)) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"))
    yield case("Col2Im", real(1, 8, 12), whole(4, 5), whole(2, 2))
    yield case("MaxUnpool", real(1, 1, 2, 2), whole([[[5, 7], [13, 15]]]), kernel_shape=(2, 2), strides=(2, 2))
    for mode in ("nearest", "linear", "cubic"):
        yield case("Resize", real(1, 2, 3, 4), None, None, whole(1, 2, 5, 6), mode=mode)
    yield case("Resize", real(1, 1, 4, 4), None, None, whole(1, 1, 2, 2), mode="linear", antialias=1)


def _samples() -> Iterator[Case]:
    x, grid = real(2, 2, 3, 4), real(2, 3, 2, 2, low=-1.1, high=1.1)
    for padding, aligned in (("zeros", 0), ("border", 0), ("zeros", 1)):
        yield case("GridSample", x, grid, padding_mode=padding, align_corners=aligned)
    yield case("GridSample", x, grid, mode="nearest")
    yield case("GridSample", real(1, 1, 3, 4, 2), real(1, 2, 2, 1, 3, low=-0.9, high=0.9))


def _recurrent() -> Iterator[Case]:
    t, b, i, h = 3, 2, 3, 2
    for op, gates, states in (("RNN", 1, 1), ("GRU", 3, 1), ("LSTM", 4, 2)):
        rows = gates * h
        both = (real(t, b, i), real(2, rows, i), real(2, rows, h), real(2, 2 * rows))
        yield case(op, *both, outputs=states + 1, direction="bidirectional")
        starts = (real(1, b, h), real(1, b, h) / 2, real(1, 3 * h))[: 1 if states == 1 else 3]
        weights = (real(1, rows, i), real(1, rows, h), real(1, 2 * rows))
        lengths = whole(3, 1, dtype=np.int32)
        yield case(op, real(t, b, i), *weights, lengths, *starts, outputs=states + 1, direction="reverse")
        yield case(op, real(b, t, i), *weights[:2], outputs=states + 1, layout=1)
    yield case(
        "GRU", real(t, b, i), real(1, 6, i), real(1, 6, h), real(1, 12), outputs=2, linear_before_reset=1, clip=3.0,
        activations=("HardSigmoid", "ScaledTanh"), activation_alpha=(0.3, 1.2), activation_beta=(0.4, 0.8),
    )  # fmt: skip


def _signals() -> Iterator[Case]:
    for inverse in (0, 1):
        yield case("DFT", real(2, 5, 3, 2), inverse=inverse, axis=(1,))
        yield case("DFT", real(2, 5, 1), whole(7)[0], inverse=inverse)
    yield case("DFT", real(2, 5, 1), onesided=1)
    yield case("DFT", real(2, 4, 2), whole(7)[0], onesided=1, inverse=1)
    yield case("STFT", real(1, 10, 1), whole(2)[0], real(4))
    yield case("DequantizeLinear", whole([1, 2], [3, 4], dtype=np.int8), real(2), whole(1, 2, dtype=np.int8), axis=1)


def cases() -> list[Case]:
    families = (
        _elementwise, _products, _reductions, _movement, _indexing, _norms, _convolutions, _samples, _recurrent,
        _signals,
    )  # fmt: skip
    return [each for family in families for each in family()]


CASES = cases()
