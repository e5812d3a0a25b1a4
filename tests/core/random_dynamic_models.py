"""Random ONNX models of sequences with three dynamic sizes: two lengths and a batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.core.onnx_writer import OnnxWriter

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
WORDS, HEADS = 40, 2
WIDTHS = (6, 8, 16, 24)
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Sequence:
    """A tensor [batch, length, width]; two of one `length` have as many tokens."""

    name: str
    length: str
    width: int


class SizedNet(OnnxWriter):
    """A model of some random steps. Inputs: token ids [batch, length], vectors [batch, other, 8], a mask of the ids."""

    def __init__(self, seed: int, steps: int = 6) -> None:
        super().__init__(seed)
        self.seed = seed
        ids = self.op("Gather", self.weight(WORDS, 16), "ids")
        self.values = [Sequence(ids, "length", 16), Sequence("vectors", "other", 8)]
        for _ in range(steps):
            self._step()

    def model(self) -> onnx.ModelProto:
        """The model. Its outputs are the last two values, renamed."""
        outputs = []
        for index, value in enumerate(self.values[-2:]):
            outputs.append(self.op("Mul", value.name, self.const(1.5), name=f"y{index}"))
        info = helper.make_tensor_value_info
        inputs = [info("ids", INT64, ["batch", "length"]), info("mask", INT64, ["batch", "seen"])]
        inputs.append(info("vectors", FLOAT, ["batch", "other", 8]))
        results = [info(name, FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, f"sized_{self.seed}", inputs, results, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    @staticmethod
    def feeds(rows: int, length: int, other: int) -> Feeds:
        """Random inputs of these sizes."""
        rng = np.random.default_rng((rows, length, other))
        mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.int64)
        vectors = rng.standard_normal((rows, other, 8)).astype(np.float32)
        return {"ids": rng.integers(0, WORDS, (rows, length)), "mask": mask, "vectors": vectors}

    # -- steps ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        steps: list[Callable[[Sequence], Sequence]] = [
            self._linear, self._linear, self._activated, self._normal, self._attention, self._attention, self._pooled,
            self._joined, self._cut, self._thinned, self._convolved, self._summed, self._flat, self._added,
            self._padded, self._places, self._causal, self._crossed, self._headless, self._limited,
        ]  # fmt: skip
        value = self.values[self.rng.integers(len(self.values))]
        self.values.append(steps[self.rng.integers(len(steps))](value))

    def _pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def _same(self, value: Sequence) -> Sequence:
        """Another tensor of the same extents, or the same one."""
        others = [other for other in self.values if (other.length, other.width) == (value.length, value.width)]
        return self._pick(*others)

    def _linear(self, value: Sequence) -> Sequence:
        width = int(self._pick(*WIDTHS))
        made = self.op("MatMul", value.name, self.weight(value.width, width))
        if self._pick(True, False):
            made = self.op("Add", made, self.const(self.rng.standard_normal(width)))
        return Sequence(made, value.length, width)

    def _activated(self, value: Sequence) -> Sequence:
        kind = self._pick("Relu", "Tanh", "Sigmoid", "Erf", "Softmax-1", "Softmax1", "Exp")
        if kind.startswith("Softmax"):
            made = self.op("Softmax", value.name, axis=int(kind[7:]))
        elif kind == "Exp":
            made = self.op("Exp", self.op("Clip", value.name, self.const(-3.0), self.const(2.0)))
        else:
            made = self.op(kind, value.name)
        return Sequence(made, value.length, value.width)

    def _normal(self, value: Sequence) -> Sequence:
        scale, bias = (self.const(self.rng.standard_normal(value.width)) for _ in range(2))
        return Sequence(self.op("LayerNormalization", value.name, scale, bias), value.length, value.width)

    def _attention(self, value: Sequence) -> Sequence:
        """Attention of a sequence to itself or to another one."""
        other, depth = self._pick(value, *self.values), 4
        q, k, v = (self._heads(each, depth) for each in (value, other, other))
        if self._pick(True, False):
            scores = self.op("Einsum", q, k, equation="bhqd,bhkd->bhqk")
        else:
            scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.const(0.5))
        if other.length == "length" and self._pick(True, False):
            keep = self.op("Unsqueeze", self.op("Cast", "mask", to=FLOAT), self.ints(1, 2))
            bias = self.op("Mul", self.op("Sub", self.const(1.0), keep), self.const(-1e4))
            scores = self.op("Add", scores, bias)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), v)
        joined = self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.ints(0, 0, HEADS * depth))
        return Sequence(joined, value.length, HEADS * depth)

    def _heads(self, value: Sequence, depth: int) -> str:
        projected = self.op("MatMul", value.name, self.weight(value.width, HEADS * depth))
        return self.op("Transpose", self.op("Reshape", projected, self.ints(0, 0, HEADS, depth)), perm=[0, 2, 1, 3])

    def _pooled(self, value: Sequence) -> Sequence:
        """A value pooled from a whole sequence, added to each token."""
        kind = self._pick("ReduceMean", "ReduceMax", "ReduceMin")
        whole = self.op(kind, value.name, axes=[1], keepdims=1)
        return Sequence(self.op(self._pick("Add", "Mul", "Sub"), value.name, whole), value.length, value.width)

    def _joined(self, value: Sequence) -> Sequence:
        others = [other for other in self.values if other.width == value.width]
        other = self._pick(*others)
        made = self.op("Concat", value.name, other.name, axis=1)
        return Sequence(made, f"({value.length}+{other.length})", value.width)

    def _cut(self, value: Sequence) -> Sequence:
        """The doubled sequence without its first or last token, so that some tokens are left."""
        twice = self.op("Concat", value.name, value.name, axis=1)
        first, last = self._pick((0, -1), (1, 2**31 - 1), (1, -1) if self._pick(True, False) else (0, -1))
        made = self.op("Slice", twice, self.ints(first), self.ints(last), self.ints(1))
        return Sequence(made, f"cut{len(self.nodes)}", value.width)

    def _thinned(self, value: Sequence) -> Sequence:
        made = self.op("Slice", value.name, self.ints(0), self.ints(2**31 - 1), self.ints(1), self.ints(2))
        return Sequence(made, f"thin{len(self.nodes)}", value.width)

    def _convolved(self, value: Sequence) -> Sequence:
        width, kernel, stride = int(self._pick(*WIDTHS)), int(self._pick(1, 3, 5)), int(self._pick(1, 1, 2))
        dilation = int(self._pick(1, 1, 2))
        pad = dilation * (kernel - 1) // 2
        groups = 2 if width % 2 == 0 and value.width % 2 == 0 and self._pick(True, False, False) else 1
        weight = self.weight(width, value.width // groups, kernel)
        turned = self.op("Transpose", value.name, perm=[0, 2, 1])
        made = self.op(
            "Conv", turned, weight, self.const(self.rng.standard_normal(width)), pads=[pad, pad], strides=[stride],
            dilations=[dilation], group=groups,
        )  # fmt: skip
        made = self.op("Transpose", self.op("Relu", made) if self._pick(True, False) else made, perm=[0, 2, 1])
        return Sequence(made, value.length if stride == 1 else f"conv{len(self.nodes)}", width)

    def _summed(self, value: Sequence) -> Sequence:
        return Sequence(self.op("CumSum", value.name, self.const(1, np.int64)), value.length, value.width)

    def _flat(self, value: Sequence) -> Sequence:
        """All tokens of all rows as rows of a matrix, and back."""
        flat = self.op("Reshape", value.name, self.ints(-1, value.width))
        made = self.op("Gemm", flat, self.weight(12, value.width), transB=1)
        shape = self.op("Slice", self.op("Shape", value.name), self.ints(0), self.ints(2))
        return Sequence(self.op("Reshape", made, self.op("Concat", shape, self.ints(12), axis=0)), value.length, 12)

    def _added(self, value: Sequence) -> Sequence:
        kind = self._pick("Add", "Mul", "Max")
        return Sequence(self.op(kind, value.name, self._same(value).name), value.length, value.width)

    def _padded(self, value: Sequence) -> Sequence:
        made = self.op("Pad", value.name, self.ints(0, 1, 0, 0, 2, 0), self.const(0.25))
        return Sequence(made, f"pad{len(self.nodes)}", value.width)

    def _places(self, value: Sequence) -> Sequence:
        """The sequence plus the sine or cosine of positions."""
        count = self.op("Gather", self.op("Shape", value.name), self.const(1, np.int64), axis=0)
        places = self.op("Range", self.const(0, np.int64), count, self.const(1, np.int64))
        angles = self.op("Mul", self.op("Cast", places, to=FLOAT), self.const(0.1))
        column = self.op("Unsqueeze", self.op(self._pick("Sin", "Cos"), angles), self.ints(0, 2))
        return Sequence(self.op("Add", value.name, column), value.length, value.width)

    def _crossed(self, value: Sequence) -> Sequence:
        """Sums of tokens weighted by products of all pairs, without a softmax."""
        other = self._pick(*self.values)
        q, k = (self.op("MatMul", each.name, self.weight(each.width, 6)) for each in (value, other))
        pairs = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 2, 1]))
        made = self.op("MatMul", self.op("Tanh", pairs), other.name)
        return Sequence(self.op("Mul", made, self.const(0.2)), value.length, other.width)

    def _headless(self, value: Sequence) -> Sequence:
        """The last half of two concatenated sequences of the same extents."""
        twice = self.op("Concat", value.name, self._same(value).name, axis=1)
        count = self.op("Slice", self.op("Shape", value.name), self.ints(1), self.ints(2))
        first = self.op("Neg", count) if self._pick(True, False) else count
        made = self.op("Slice", twice, first, self.ints(2**31 - 1), self.ints(1))
        return Sequence(made, value.length, value.width)

    def _limited(self, value: Sequence) -> Sequence:
        """The first tokens: at most 5, at most 50, or exactly one."""
        count = self.op("Slice", self.op("Shape", value.name), self.ints(1), self.ints(2))
        last = self.op("Min", count, self.ints(int(self._pick(5, 50)))) if self._pick(True, False) else self.ints(1)
        made = self.op("Slice", value.name, self.ints(0), last, self.ints(1))
        return Sequence(made, f"limited{len(self.nodes)}", value.width)

    def _causal(self, value: Sequence) -> Sequence:
        """Causal sums: a lower triangle of ones over all pairs of tokens, made by comparing positions."""
        count = self.op("Gather", self.op("Shape", value.name), self.const(1, np.int64), axis=0)
        places = self.op("Range", self.const(0, np.int64), count, self.const(1, np.int64))
        before = self.op(
            "LessOrEqual", self.op("Unsqueeze", places, self.ints(0)), self.op("Unsqueeze", places, self.ints(1))
        )
        q, k, v = (self._heads(value, 4) for _ in range(3))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Where", before, scores, self.const(-1e9))
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), v)
        return Sequence(
            self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.ints(0, 0, 8)), value.length, 8
        )
