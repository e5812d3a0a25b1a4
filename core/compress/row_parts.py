"""`RowParts`: divides batches whose rows are independent, so that the values which a run keeps need little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.rows import rows

MOST_BYTES = 1 << 28  # of the kept values of one run, unless a single row has more


class RowParts:
    """Parts of batches of a graph's inputs, whose values named in `names` take at most `MOST_BYTES`.

    A batch is not divided if the rows of the graph depend on each other (`proofs/rows.py`), if the size of these values
    is not known before a run, or if the arrays do not fit the inputs.
    """

    def __init__(self, graph: Graph, names: Iterable[str]) -> None:
        copy, wanted = graph.clone(), set(names)
        infer_graph(copy)
        proof = rows(copy)
        self._symbol = proof.symbol if proof.is_divisible else None
        self._inputs = {value.name: value for value in copy.inputs}
        self._kept = [value for value in copy.values() if value.name in wanted]

    def of(self, batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The parts of one batch, in order."""
        count = self._rows(batch)
        limit = self._limit(batch) if count is not None else None
        if count is None or limit is None or count <= limit:
            yield batch
            return
        for start in range(0, count, limit):
            yield {name: batch[name][start : start + limit] for name in self._inputs}

    def _rows(self, batch: Mapping[str, Any]) -> int | None:
        """The number of rows; None unless all inputs are arrays with as many."""
        arrays = [batch.get(name) for name in self._inputs]
        counts = {len(each) if isinstance(each, np.ndarray) and each.ndim else None for each in arrays}
        return counts.pop() if len(counts) == 1 else None

    def _limit(self, batch: Mapping[str, Any]) -> int | None:
        """The rows of a part, at least 1; None if batches cannot be divided."""
        if self._symbol is None:
            return None
        extents: dict[str, int] = {}
        for name, value in self._inputs.items():
            extents |= {str(dim): size for dim, size in zip(value.shape, np.shape(batch[name]), strict=False)}
        extents[self._symbol] = 1
        types = [value.type for value in self._kept if isinstance(value.type, TensorType)]
        try:
            row = sum(evaluate(each.nbytes, extents) for each in types)
        except KeyError:  # a size that only a run tells
            return None
        return max(MOST_BYTES // max(row, 1), 1)
