"""Small transformer encoders as ONNX files, of [batch, sequence] tokens, in the ways exporters write them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.core.onnx_writer import OnnxWriter

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT
WORDS, WIDTH, HEADS, LONGEST = 50, 16, 2, 160
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Encoder:
    """The settings of an encoder.

    `positions`: "table", "range", "mask" (counted from the mask, as RoBERTa does), "rotary" or "". `causal`:
    "trilu", "range" or "". `pools`: which of mean, max, min, first, last and all become outputs besides the tokens.
    `guarded`: the mask is boolean, and attention weights that are NaN become 0, as PyTorch exports attention.
    """

    positions: str = "table"
    causal: str = ""
    pools: tuple[str, ...] = ("mean",)
    masked: bool = True
    guarded: bool = False
    layers: int = 2
    seed: int = 0

    def model(self) -> onnx.ModelProto:
        return _Writer(self).write()

    def feeds(self, rows: int, length: int, seed: int = 0) -> Feeds:
        """Random feeds: more than half of each sequence are tokens, the rest of it is padding."""
        rng = np.random.default_rng((rows, length, seed))
        real = rng.integers(1 + length // 2, length + 1, (rows, 1))
        given = {"ids": rng.integers(0, WORDS, (rows, length)), "mask": (np.arange(length) < real).astype(np.int64)}
        return given if self.masked else {"ids": given["ids"]}


class _Writer(OnnxWriter):
    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder.seed)
        self.encoder = encoder

    def write(self) -> onnx.ModelProto:
        e, given = self.encoder, ["ids", "mask"] if self.encoder.masked else ["ids"]
        self.length = self.op("Gather", self.op("Shape", "ids"), self.ints(1), axis=0)  # [1]
        bias = self._bias()
        x = self._embedded()
        for _ in range(e.layers):
            x = self._layer(x, bias)
        outputs = {"tokens": self.op("Identity", x), **{f"pool_{kind}": self._pool(x, kind) for kind in e.pools}}
        for name, value in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        graph = helper.make_graph(
            self.nodes,
            "encoder",
            [helper.make_tensor_value_info(name, INT64, ["batch", "sequence"]) for name in given],
            [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
            self.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _embedded(self) -> str:
        x = self.op("Gather", self.const(self.rng.standard_normal((WORDS, WIDTH))), "ids")
        table = self.const(self.rng.standard_normal((LONGEST + 2, WIDTH)))
        match self.encoder.positions:
            case "table":
                rows = self.op("Slice", self.const([range(LONGEST)], np.int64), self.ints(0), self.length, self.ints(1))
                x = self.op("Add", x, self.op("Gather", table, rows))
            case "range":
                x = self.op("Add", x, self.op("Gather", table, self._range()))
            case "mask":
                count = self.op("CumSum", "mask", self.const(1, np.int64))
                x = self.op(
                    "Add", x, self.op("Gather", table, self.op("Add", self.op("Mul", count, "mask"), self.ints(1)))
                )
        return self._norm(x)

    def _range(self) -> str:
        stop = self.op("Squeeze", self.length, self.ints(0))
        return self.op("Range", self.const(0, np.int64), stop, self.const(1, np.int64))

    def _bias(self) -> str:
        """The name of the bias of the scores; empty if there is none."""
        parts = []
        if self.encoder.guarded:
            real = self.op("Unsqueeze", self.op("Cast", "mask", to=TensorProto.BOOL), self.ints(1, 2))
            shape = self.op("Concat", self.ints(1, 1), self.length, self.ints(1), axis=0)
            parts.append(self.op("Where", self.op("Expand", real, shape), self.const(0), self.const(-np.inf)))
        elif self.encoder.masked:
            hidden = self.op("Sub", self.const(1), self.op("Cast", "mask", to=FLOAT))
            parts.append(self.op("Unsqueeze", self.op("Mul", hidden, self.const(-1e9)), self.ints(1, 2)))
        if self.encoder.causal == "trilu":
            shape = self.op("Concat", self.length, self.length, axis=0)
            ones = self.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.array([-1e9], np.float32)))
            parts.append(self.op("Trilu", ones, self.const(1, np.int64), upper=1))
        elif self.encoder.causal == "range":
            place = self._range()
            later = self.op(
                "Less", self.op("Unsqueeze", place, self.ints(1)), self.op("Unsqueeze", place, self.ints(0))
            )
            parts.append(self.op("Where", later, self.const(-np.inf), self.const(0)))
        return "" if not parts else parts[0] if len(parts) == 1 else self.op("Add", *parts)

    def _layer(self, x: str, bias: str) -> str:
        x = self._norm(self.op("Add", x, self._attention(x, bias)))
        hidden = self.op("Relu", self._linear(x, WIDTH, 2 * WIDTH))
        return self._norm(self.op("Add", x, self._linear(hidden, 2 * WIDTH, WIDTH)))

    def _attention(self, x: str, bias: str) -> str:
        q, k, v = (self._heads(self._linear(x, WIDTH, WIDTH)) for _ in range(3))
        if self.encoder.positions == "rotary":
            q, k = self._rotated(q), self._rotated(k)
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Div", scores, self.const(math.sqrt(WIDTH // HEADS)))
        scores = self.op("Add", scores, bias) if bias else scores
        weights = self.op("Softmax", scores, axis=-1)
        if self.encoder.guarded:
            weights = self.op("Where", self.op("IsNaN", weights), self.const(0), weights)
        mixed = self.op("Transpose", self.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self._linear(self.op("Reshape", mixed, self.ints(0, 0, WIDTH)), WIDTH, WIDTH)

    def _rotated(self, x: str) -> str:
        """The rotary embedding of x (Su et al., 2021): angles from positions and frequencies, halves exchanged."""
        half = WIDTH // HEADS // 2
        place = self.op("Unsqueeze", self.op("Cast", self._range(), to=FLOAT), self.ints(1))
        angles = self.op("MatMul", place, self.const([10.0 ** -np.arange(half)]))
        both = self.op("Concat", angles, angles, axis=1)
        first, second = self.nodes, f"halves_{len(self.nodes)}"
        first.append(helper.make_node("Split", [x, self.ints(half, half)], [second, second + "b"], axis=3))
        turned = self.op("Concat", self.op("Neg", second + "b"), second, axis=3)
        return self.op("Add", self.op("Mul", x, self.op("Cos", both)), self.op("Mul", turned, self.op("Sin", both)))

    def _heads(self, x: str) -> str:
        return self.op("Transpose", self.op("Reshape", x, self.ints(0, 0, HEADS, WIDTH // HEADS)), perm=[0, 2, 1, 3])

    def _linear(self, x: str, inputs: int, outputs: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(inputs, outputs)), self.weight(outputs))

    def _norm(self, x: str) -> str:
        return self.op("LayerNormalization", x, self.const(np.ones(WIDTH)), self.const(np.zeros(WIDTH)), axis=-1)

    def _pool(self, x: str, kind: str) -> str:
        match kind:
            case "first" | "last":
                end = self.op("Gather", x, self.const(0 if kind == "first" else -1, np.int64), axis=1)
                return self.op("Tanh", self.op("Gemm", end, self.weight(WIDTH, WIDTH), self.weight(WIDTH)))
            case "max" | "min":
                return self.op("ReduceMax" if kind == "max" else "ReduceMin", x, axes=[1], keepdims=0)
            case "all":
                return self.op("ReduceMean", x, axes=[1], keepdims=0)
        weights = self.op("Unsqueeze", self.op("Cast", "mask", to=FLOAT), self.ints(2))
        total = self.op("ReduceSum", self.op("Mul", x, weights), self.ints(1), keepdims=0)
        count = self.op("ReduceSum", weights, self.ints(1), keepdims=0)
        mean = self.op("Div", total, self.op("Clip", count, self.const(1e-9)))
        return self.op("Div", mean, self.op("ReduceL2", mean, axes=[1], keepdims=1))
