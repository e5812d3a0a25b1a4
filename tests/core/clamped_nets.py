"""Random ONNX models whose extents are the smaller or the larger one of a length and a number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.core.onnx_writer import OnnxWriter

WIDTH = 4
LIMITS = (1, 2, 3, 6, 20)
FAR = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """A tensor [..., rows, WIDTH] whose number of rows is clamped to `limit`."""

    name: str
    limit: int


class ClampedNet(OnnxWriter):
    """A model of x [batch, length, WIDTH], or [length, WIDTH] if it is not `batched`.

    Clamped tensors are combined with x, with a table of `limit` rows, with their own negation or with means of x. The
    mean of x over each row of the batch is added to every result.
    """

    def __init__(self, seed: int, batched: bool = True, steps: int = 2) -> None:
        super().__init__(seed)
        self.seed, self.axis = seed, int(batched)
        shape = self.op("Shape", "x")
        self.length = self.op("Slice", shape, self.ints(self.axis), self.ints(self.axis + 1))
        self.results = [self._met() for _ in range(steps)]

    def model(self) -> onnx.ModelProto:
        info = helper.make_tensor_value_info
        whole = self.op("ReduceMean", "x", axes=[self.axis, self.axis + 1], keepdims=1)
        results = [self.op("Add", name, whole, name=f"y{k}") for k, name in enumerate(self.results)]
        outputs = [info(name, TensorProto.FLOAT, None) for name in results]
        inputs = [info("x", TensorProto.FLOAT, ["batch", "length", WIDTH][1 - self.axis :])]
        graph = helper.make_graph(self.nodes, f"clamped_{self.seed}", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _below(self, count: int) -> int:
        return int(self.rng.integers(count))

    def _met(self) -> str:
        """A clamped tensor, combined with another tensor."""
        limit = LIMITS[self._below(len(LIMITS))]
        makers = (
            self._first_of_table,
            self._last_of_table,
            self._first,
            self._first_by_number,
            self._last,
            self._filled,
        )
        rows = makers[self._below(len(makers))](limit)
        meet = (self._added, self._chosen, self._multiplied, self._beside, self._alone)
        return meet[self._below(len(meet))](rows)

    # -- clamped tensors ------------------------------------------------------------------------------------------

    def _table(self, limit: int) -> str:
        return self.weight(limit, WIDTH)

    def _least(self, limit: int) -> str:
        return self.op("Min", self.length, self.ints(limit))

    def _missing(self, one: str, other: str) -> str:
        """max(one - other, 0)."""
        return self.op("Max", self.op("Sub", one, other), self.ints(0))

    def _first_of_table(self, limit: int) -> Rows:
        ends = self._least(limit) if self._below(2) else self.length
        return Rows(self.op("Slice", self._table(limit), self.ints(0), ends, self.ints(0)), limit)

    def _last_of_table(self, limit: int) -> Rows:
        """The last rows of a table, as many as there are tokens, as models take ALiBi's biases."""
        start = self._missing(self.ints(limit), self.length)
        return Rows(self.op("Slice", self._table(limit), start, self.ints(FAR), self.ints(0)), limit)

    def _first(self, limit: int) -> Rows:
        return Rows(self.op("Slice", "x", self.ints(0), self._least(limit), self.ints(self.axis)), limit)

    def _first_by_number(self, limit: int) -> Rows:
        return Rows(self.op("Slice", "x", self.ints(0), self.ints(limit), self.ints(self.axis)), limit)

    def _last(self, limit: int) -> Rows:
        start = self._missing(self.length, self.ints(limit))
        return Rows(self.op("Slice", "x", start, self.ints(FAR), self.ints(self.axis)), limit)

    def _filled(self, limit: int) -> Rows:
        """x, padded with zeros at the end to at least `limit` rows."""
        missing = self._missing(self.ints(limit), self.length)
        pads = self.op("Concat", self.ints(*[0] * (2 + 2 * self.axis)), missing, self.ints(0), axis=0)
        return Rows(self.op("Pad", "x", pads), limit)

    # -- combinations with other tensors --------------------------------------------------------------------------

    def _other(self, rows: Rows) -> str:
        return ("x", self._table(rows.limit), self.op("Neg", rows.name))[self._below(3)]

    def _added(self, rows: Rows) -> str:
        return self.op("Add", rows.name, self._other(rows))

    def _chosen(self, rows: Rows) -> str:
        other = self._other(rows)
        return self.op("Where", self.op("Less", rows.name, self.const(0.1)), rows.name, other)

    def _multiplied(self, rows: Rows) -> str:
        """The product of the transpose with another tensor, which sums over the rows."""
        turned = self.op("Einsum", rows.name, equation="...ab->...ba")
        return self.op("MatMul", turned, self._other(rows))

    def _beside(self, rows: Rows) -> str:
        """The concatenation with another tensor along the width; a mean of x gives both a batch."""
        one, other = (self.op("Add", each, self._mean()) for each in (rows.name, self._other(rows)))
        return self.op("Concat", one, other, axis=self.axis + 1)

    def _alone(self, rows: Rows) -> str:
        return self.op("Add", rows.name, self._mean())

    def _mean(self) -> str:
        return self.op("ReduceMean", "x", axes=[self.axis], keepdims=1)


def feeds(*sizes: int) -> dict[str, NDArray[np.float32]]:
    """Random inputs of a batch size and a length, or of a length alone."""
    return {"x": np.random.default_rng(sizes).standard_normal((*sizes, WIDTH)).astype(np.float32)}
