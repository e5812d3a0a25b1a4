"""Small transformer decoders with a key-value cache as ONNX files: past keys and values are inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.core.onnx_writer import OnnxWriter

INT64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
WORDS, WIDTH, HEADS, DEPTH, LONGEST = 50, 32, 4, 8, 4096
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Decoder:
    """The settings of a decoder.

    `rotary`: positions rotate queries and keys, as in Llama, instead of being added, as in GPT-2. `shared`: the number
    of heads that share keys and values. `turned`: keys are stored as [batch, heads, depth, tokens]. `names` of the past
    dimension: "shared" by all inputs, "own" for each input, or "none"; then no dimension has a name or a size.
    """

    rotary: bool = False
    shared: int = 1
    turned: bool = False
    layers: int = 2
    seed: int = 0
    names: str = "shared"

    @property
    def pasts(self) -> list[str]:
        return [f"past.{layer}.{part}" for layer in range(self.layers) for part in ("key", "value")]

    def model(self) -> onnx.ModelProto:
        return _Writer(self).write()

    def shape(self, rows: Any, past: Any, name: str) -> list[Any]:
        """The shape of a past input: sizes, or the names of dimensions."""
        heads = HEADS // self.shared
        return [rows, heads, DEPTH, past] if self.turned and name.endswith("key") else [rows, heads, past, DEPTH]

    def feeds(self, rows: int, length: int, past: int) -> Feeds:
        """Random feeds, in which the first tokens of some rows are masked out."""
        rng = np.random.default_rng((rows, length, past))
        total = past + length
        mask = (np.arange(total) >= rng.integers(0, total // 2 + 1, (rows, 1))).astype(np.int64)
        given = {"ids": rng.integers(0, WORDS, (rows, length)), "mask": mask}
        shapes = {name: self.shape(rows, past, name) for name in self.pasts}
        return given | {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def after(self, feeds: Feeds, answers: Mapping[str, NDArray[Any]]) -> Feeds:
        """The feeds of the next run: the likeliest token, and the returned keys and values."""
        ids = answers["logits"][:, -1:].argmax(-1)
        mask = np.concatenate([feeds["mask"], np.ones_like(ids)], 1)
        return {"ids": ids, "mask": mask} | {name: answers[name.replace("past", "present")] for name in self.pasts}


class _Writer(OnnxWriter):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.seed)
        self.decoder = decoder

    def size(self, value: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", value), self.const(axis, np.int64), axis=0)

    def write(self) -> onnx.ModelProto:
        d = self.decoder
        self.past, one = self.size("past.0.value", 2), self.const(1, np.int64)
        self.total = self.op("Add", self.past, self.size("ids", 1))
        self.places = self.op("Range", self.past, self.total, one)
        bias = self._bias()
        x = self.op("Gather", self.weight(WORDS, WIDTH), "ids")
        if not d.rotary:
            x = self.op("Add", x, self.op("Gather", self.weight(LONGEST, WIDTH), self.places))
        for layer in range(d.layers):
            x = self._layer(x, layer, bias)
        self.op("MatMul", x, self.weight(WIDTH, WORDS), name="logits")
        info = helper.make_tensor_value_info
        inputs = [info("ids", INT64, ["batch", "length"]), info("mask", INT64, ["batch", "total"])]
        pasts = {name: "past" if d.names == "shared" else f"past_{index}" for index, name in enumerate(d.pasts)}
        inputs += [info(name, FLOAT, d.shape("batch", pasts[name], name)) for name in d.pasts]
        if d.names == "none":
            inputs = [info(each.name, each.type.tensor_type.elem_type, [None] * _rank(each)) for each in inputs]
        outputs = ["logits", *(name.replace("past", "present") for name in d.pasts)]
        results = [info(name, FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "decoder", inputs, results, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _bias(self) -> str:
        """The attention bias: 0 for unmasked tokens up to the current one, otherwise a large negative number."""
        keys = self.op("Range", self.const(0, np.int64), self.total, self.const(1, np.int64))
        before = self.op("LessOrEqual", keys, self.op("Unsqueeze", self.places, self.ints(1)))
        real = self.op("Unsqueeze", self.op("Cast", "mask", to=BOOL), self.ints(1, 2))
        return self.op("Where", self.op("And", before, real), self.const(0.0), self.const(-1e9))

    def _layer(self, x: str, layer: int, bias: str) -> str:
        d = self.decoder
        heads = HEADS // d.shared
        q, k, v = self._heads(x, HEADS), self._heads(x, heads), self._heads(x, heads)
        if d.rotary:
            q, k = self._turned(q), self._turned(k)
        k = self.op("Transpose", k, perm=[0, 1, 3, 2]) if d.turned else k
        k = self.op("Concat", f"past.{layer}.key", k, name=f"present.{layer}.key", axis=3 if d.turned else 2)
        v = self.op("Concat", f"past.{layer}.value", v, name=f"present.{layer}.value", axis=2)
        columns = self._repeated(k) if d.turned else self.op("Transpose", self._repeated(k), perm=[0, 1, 3, 2])
        scores = self.op("Div", self.op("MatMul", q, columns), self.const(math.sqrt(DEPTH)))
        weights = self.op("Softmax", self.op("Add", scores, bias), axis=-1)
        seen = self.op("Transpose", self.op("MatMul", weights, self._repeated(v)), perm=[0, 2, 1, 3])
        seen = self.op("Reshape", seen, self.ints(0, 0, WIDTH))
        x = self.op("Add", x, self.op("MatMul", seen, self.weight(WIDTH, WIDTH)))
        hidden = self.op("Relu", self.op("MatMul", x, self.weight(WIDTH, 2 * WIDTH)))
        return self.op("Add", x, self.op("MatMul", hidden, self.weight(2 * WIDTH, WIDTH)))

    def _heads(self, x: str, heads: int) -> str:
        projected = self.op("MatMul", x, self.weight(WIDTH, heads * DEPTH))
        return self.op("Transpose", self.op("Reshape", projected, self.ints(0, 0, heads, DEPTH)), perm=[0, 2, 1, 3])

    def _turned(self, x: str) -> str:
        """The rotary embedding of x: x * cos + (-x[half:], x[:half]) * sin, of position times frequency."""
        frequencies = self.const([100.0 ** (-2 * (i % (DEPTH // 2)) / DEPTH) for i in range(DEPTH)])
        places = self.op("Unsqueeze", self.op("Cast", self.places, to=FLOAT), self.ints(1))
        angles = self.op("Mul", places, frequencies)
        first, second = (self.op("Slice", x, self.ints(a), self.ints(b), self.ints(3)) for a, b in ((0, 4), (4, 8)))
        swapped = self.op("Concat", self.op("Neg", second), first, axis=3)
        return self.op(
            "Add", self.op("Mul", x, self.op("Cos", angles)), self.op("Mul", swapped, self.op("Sin", angles))
        )

    def _repeated(self, x: str) -> str:
        """Keys or values, with each head repeated for the query heads that share it."""
        if self.decoder.shared == 1:
            return x
        shape = self.op("Shape", x)
        wide = self.op(
            "Concat",
            self.op("Slice", shape, self.ints(0), self.ints(2)),
            self.ints(self.decoder.shared),
            self.op("Slice", shape, self.ints(2), self.ints(4)),
            axis=0,
        )
        joined = self.op("Concat", self.op("Slice", shape, self.ints(0), self.ints(1)), self.ints(HEADS),
                         self.op("Slice", shape, self.ints(2), self.ints(4)), axis=0)  # fmt: skip
        return self.op("Reshape", self.op("Expand", self.op("Unsqueeze", x, self.ints(2)), wide), joined)


def _rank(info: onnx.ValueInfoProto) -> int:
    return len(info.type.tensor_type.shape.dim)
