"""`ExpertProduct`: each row times the matrix of its own expert, for mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import FLOAT, INDEX, as_computed, broadcast_shapes, check_kind, same_dtype
from lathe.core.ops.tensor.indexing import normalize_indices


@register
class ExpertProduct(OpDef):
    """Y[..., :] = W[expert[...]] @ X[..., :] for rows X [..., in], their experts [...] and W [experts, out, in].

    The leading axes of X and `expert` broadcast, so a row may go to several experts. Experts are int32 or int64;
    negative ones count from the end. ModelError or FeedError for an expert out of range.
    """

    domain = "lathe"
    rounds_freely = True
    inputs = "X, expert, weights"
    outputs = "Y"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, (0, 2))
        check_kind(c, 0, FLOAT)
        check_kind(c, 1, INDEX)
        x, expert, weights = c.shape(0), c.shape(1), c.shape(2)
        if x is None or expert is None or weights is None:
            return [TensorType(dtype, None)]
        if not x or len(weights) != 3 or not c.agree(x[-1], weights[2]):
            c.fail(f"X is {c.tensor(0)} and weights are {c.tensor(2)}, expected [..., in] and [experts, out, in]")
        leading = broadcast_shapes(c, [x[:-1], expert])
        return [TensorType(dtype, None if leading is None else (*leading, weights[1]))]

    def reference(self, c: Call, x: Array, expert: Array, weights: Array) -> Array:
        chosen = normalize_indices(c, expert, len(weights), 0)
        leading = np.broadcast_shapes(x.shape[:-1], chosen.shape)
        rows = np.broadcast_to(as_computed(x), (*leading, x.shape[-1]))
        chosen = np.broadcast_to(chosen, leading)
        y = np.zeros((*leading, weights.shape[1]), rows.dtype)
        for index in np.unique(chosen):
            own = chosen == index
            y[own] = rows[own] @ as_computed(weights[index]).T
        return y.astype(x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """Rows may lie along a leading axis of X or `expert` that broadcasts, or along the outputs of the weights."""
        x, expert = c.shape(0), c.shape(1)
        if x is None or expert is None:
            return MixesRows("the rank of an input is not known")
        rank = max(len(x) - 1, len(expert))
        if axes[2] is not None:
            alone = axes[0] is None and axes[1] is None and axes[2] == 1
            return [rank] if alone else MixesRows("ExpertProduct picks a matrix, or sums, along the row axis")
        pairs = [(axes[0], x[:-1]), (axes[1], expert)]
        found = {axis - len(shape) for axis, shape in pairs if axis is not None}
        if not found:
            return [None]
        if len(found) > 1 or max(found) >= 0:
            return MixesRows("ExpertProduct sums over the row axis, or its operands have rows along different axes")
        back = found.pop()
        if any(axis is None and len(shape) >= -back and shape[back] != 1 for axis, shape in pairs):
            return MixesRows("an operand without rows varies along the row axis")
        return [rank + back]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """dX is a product with the transposed weights; dW multiplies all rows for each expert, others' set to 0.

        So dW takes the work of all experts for every row.
        """
        x, expert, weights, dy = g.x(0), g.x(1), g.x(2), g.dy()
        leading = dy.shape[:-1]
        dx = dy.op("ExpertProduct", expert, weights.swap()).fit(x.shape) if g.wants(0) else None
        return [dx, None, self._weight_gradient(x, expert, dy, leading, weights.shape[0]) if g.wants(2) else None]

    def _weight_gradient(self, x: Term, expert: Term, dy: Term, leading: Sequence[Dim], experts: Dim) -> Term:
        count = product(leading)
        rows = x.expand((*leading, x.shape[-1])).reshape((count, x.shape[-1]))
        chosen = expert.cast(DType.INT64).expand(leading).reshape((1, count, 1))
        chosen = (chosen < 0).where(chosen + chosen.writer.extent(experts), chosen)
        own = chosen.equals(x.writer.iota((experts, 1, 1), (1, 0, 0)))
        return own.where(dy.reshape((1, count, dy.shape[-1])), 0.0).swap() @ rows
