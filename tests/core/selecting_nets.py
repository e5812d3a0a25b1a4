"""Random ONNX models that compute something of the rows that masks select, and write it back."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.core.onnx_writer import OnnxWriter

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
WIDTH, PLACES = 6, 3


class SelectingNet(OnnxWriter):
    """A model of x [batch, length, WIDTH], groups [batch] and choices [batch, length, PLACES].

    The choices of a token are groups. One group after the other computes a function of its rows, as XMOD's languages
    do, or of its tokens, as experts do, and writes the results over zeros, over x, or over those of earlier groups."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed = seed
        self.tokens = self.op("Reshape", "x", self.ints(-1, WIDTH))
        self.chosen = self.op("Reshape", "choices", self.ints(-1, PLACES))
        kind = (self._rows, self._tokens, self._experts)[self._below(3)]
        flat = kind != self._rows
        written = self.tokens if flat else "x"
        if self._below(2):
            written = self.op("Mul", written, self.const(0.0))
        for group in range(1 + self._below(3)):
            written = kind(written, group)
        self.result = self.op("Reshape", written, self.op("Shape", "x")) if flat else written

    def model(self) -> onnx.ModelProto:
        info = helper.make_tensor_value_info
        y = self.op("Add", self.result, self.const(0.5), name="y")
        inputs = [info("x", FLOAT, ["batch", "length", WIDTH]), info("groups", INT64, ["batch"])]
        inputs.append(info("choices", INT64, ["batch", "length", PLACES]))
        name = f"selecting_{self.seed}"
        graph = helper.make_graph(self.nodes, name, inputs, [info(y, FLOAT, None)], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    def _below(self, count: int) -> int:
        return int(self.rng.integers(count))

    # -- ways to select ---------------------------------------------------------------------------------------------

    def _rows(self, written: str, group: int) -> str:
        """`written[groups == group] = f(x[groups == group])`."""
        mask = self.op("Equal", "groups", self.const(group, np.int64))
        index = self.op("Transpose", self.op("NonZero", mask), perm=[1, 0])
        made = self._function(self.op("GatherND", "x", index), rank=3)
        if self._below(2):
            return self._scattered(written, index, made)
        shape = self.op("Shape", "x")  # as `torchscript` exports it: a mask for each element, and the selected elements
        whole = self.op("Expand", self.op("Unsqueeze", mask, self.ints(1, 2)), shape)
        elements = self.op("Transpose", self.op("NonZero", whole), perm=[1, 0])
        flat = self.op("Reshape", made, self.ints(-1))
        count = self.op("Slice", self.op("Shape", elements), self.ints(0), self.ints(1))
        return self.op("ScatterND", written, elements, self.op("Slice", flat, self.ints(0), count, self.ints(0)))

    def _tokens(self, written: str, group: int) -> str:
        """`written`, with a function of the tokens whose first choice is the group."""
        first = self.op("Gather", self.chosen, self.const(0, np.int64), axis=1)
        mask = self.op("Equal", first, self.const(group, np.int64))
        if self._below(2):
            mask = self.op("Cast", mask, to=(INT64, FLOAT)[self._below(2)])
        found = self.op("NonZero", mask)
        index = self.op("Squeeze", found, self.ints(0)) if self._below(2) else self.op("Reshape", found, self.ints(-1))
        made = self._function(self.op("Gather", self.tokens, index, axis=0), rank=2)
        return self._scattered(written, self.op("Unsqueeze", index, self.ints(1)), made)

    def _experts(self, written: str, group: int) -> str:
        """`written` plus a weighted function of the tokens that chose the group at any place."""
        mask = self.op("Equal", self.chosen, self.const(group, np.int64))
        weights = self.op("Mul", self.op("Cast", self.chosen, to=FLOAT), self.const(0.3))
        turned = self._below(2)
        found = self.op("NonZero", self.op("Transpose", mask, perm=[1, 0]) if turned else mask)
        columns = self.op("Transpose", found, perm=[1, 0])
        parts = [self.op("Slice", columns, self.ints(k), self.ints(k + 1), self.ints(1)) for k in (0, 1)]
        token, place = reversed(parts) if turned else parts
        made = self._function(self.op("GatherND", self.tokens, token), rank=2)
        if self._below(2):
            weight = self.op("GatherND", weights, self.op("Concat", token, place, axis=1))
            weight = self.op("Unsqueeze", weight, self.ints(1))
        else:
            number = self.op("Add", self.op("Mul", token, self.const(PLACES, np.int64)), place)
            flat = self.op("Reshape", weights, self.ints(-1, 1))
            weight = self.op("Gather", flat, self.op("Squeeze", number, self.ints(1)), axis=0)
        return self._scattered(written, token, self.op("Mul", made, weight), adds=True)

    def _scattered(self, written: str, index: str, made: str, adds: bool = False) -> str:
        reduction = "add" if adds or self._below(2) else "none"
        if self._below(2) or not adds:
            return self.op("ScatterND", written, index, made, reduction=reduction)
        index = self.op("Expand", index, self.op("Shape", made))
        return self.op("ScatterElements", written, index, made, axis=0, reduction=reduction)

    # -- functions of each row --------------------------------------------------------------------------------------

    def _function(self, rows: str, rank: int) -> str:
        for _ in range(1 + self._below(3)):
            steps = (self._linear, self._gated, self._normal, self._softmax, self._viewed, self._joined)
            rows = steps[self._below(len(steps))](rows, rank)
        return rows

    def _linear(self, rows: str, rank: int) -> str:
        if rank == 2 and self._below(2):
            return self.op("Gemm", rows, self.weight(WIDTH, WIDTH), self.weight(WIDTH), transB=1)
        return self.op("Add", self.op("MatMul", rows, self.weight(WIDTH, WIDTH)), self.weight(WIDTH))

    def _gated(self, rows: str, rank: int) -> str:
        both = self.op("MatMul", rows, self.weight(WIDTH, 2 * WIDTH))
        ends = ((0, WIDTH), (WIDTH, 2**31 - 1))
        gate, up = (self.op("Slice", both, self.ints(a), self.ints(b), self.ints(-1)) for a, b in ends)
        return self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)

    def _normal(self, rows: str, rank: int) -> str:
        return self.op("LayerNormalization", rows, self.weight(WIDTH), self.weight(WIDTH))

    def _softmax(self, rows: str, rank: int) -> str:
        return self.op("Softmax", rows, axis=-1)

    def _viewed(self, rows: str, rank: int) -> str:
        """The relu of the rows as [2, WIDTH / 2], transposed."""
        halves = self.op("Reshape", rows, self.ints(*[0] * (rank - 1), 2, WIDTH // 2))
        turned = self.op("Transpose", halves, perm=[*range(rank - 1), rank, rank - 1])
        return self.op("Reshape", self.op("Relu", turned), self.op("Shape", rows))

    def _joined(self, rows: str, rank: int) -> str:
        mean = self.op("ReduceMean", rows, self.ints(-1), keepdims=1)
        both = self.op("Concat", rows, self.op("Sub", rows, mean), axis=rank - 1)
        return self.op("MatMul", both, self.weight(2 * WIDTH, WIDTH))


def feeds(rows: int, length: int, seed: int = 0) -> dict[str, NDArray[np.generic]]:
    """Random inputs. The choices of a token differ; they are of four groups, one more than any model has."""
    rng = np.random.default_rng((rows, length, seed))
    choices = np.argsort(rng.random((rows, length, 4)), axis=-1)[..., :PLACES].astype(np.int64)
    x = rng.standard_normal((rows, length, WIDTH)).astype(np.float32)
    return {"x": x, "groups": rng.integers(0, 4, rows), "choices": choices}
