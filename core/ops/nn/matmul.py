"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import (
    NUMBER,
    Shape,
    as_computed,
    broadcast_shapes,
    check_kind,
    same_dtype,
    shape_text,
)


@register
class MatMul(OpDef):
    """NumPy's matmul: the last two axes are matrices, the others broadcast; a vector is a row or a column."""

    rounds_freely = True
    inputs = "A, B"
    outputs = "Y"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, (0, 1))
        check_kind(c, 0, NUMBER)
        return [TensorType(dtype, product_shape(c, c.shape(0), c.shape(1)))]

    def reference(self, c: Call, a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(as_computed(a), as_computed(b))).astype(a.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """Rows may lie along the rows of A, the columns of B, or a batch axis of either that broadcasts."""
        return product_rows(c.shape(0), c.shape(1), axes)

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """Two matrix products. For a single matrix B, dB is one product over the rows of the whole batch of A."""
        a, b, dy = g.x(0), g.x(1), g.dy()
        left = a.unsqueeze(0) if a.rank == 1 else a
        right = b.unsqueeze(1) if b.rank == 1 else b
        dy = dy.unsqueeze(dy.rank) if b.rank == 1 else dy
        dy = dy.unsqueeze(dy.rank - 1) if a.rank == 1 else dy
        da = dy @ right.swap()
        db = _flat_rows(left).swap() @ _flat_rows(dy) if right.rank == 2 else left.swap() @ dy
        return [da.reshape((*da.shape[:-2], a.shape[0])) if a.rank == 1 else da, db.squeeze(1) if b.rank == 1 else db]


def _flat_rows(x: Term) -> Term:
    """The rows of a batch of matrices as one matrix."""
    return x if x.rank == 2 else x.reshape((product(x.shape[:-1]), x.shape[-1]))


def product_shape(c: Infer, a: Shape | None, b: Shape | None) -> Shape | None:
    """The shape of NumPy's matmul; None if a shape is None. ModelError when the operands do not fit."""
    if a is None or b is None:
        return None
    if not a or not b:
        c.fail(f"cannot multiply {shape_text(a)} by {shape_text(b)}: expected rank 1 or more")
    left, right = (a if len(a) > 1 else (1, *a)), (b if len(b) > 1 else (*b, 1))
    if not c.agree(left[-1], right[-2]):
        c.fail(f"cannot multiply {shape_text(a)} by {shape_text(b)}: inner extents {left[-1]} and {right[-2]} differ")
    batch = broadcast_shapes(c, [left[:-2], right[:-2]]) or ()
    return (*batch, *((left[-2],) if len(a) > 1 else ()), *((right[-1],) if len(b) > 1 else ()))


def product_rows(a: Shape | None, b: Shape | None, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`) of NumPy's matmul of operands of these shapes."""
    if axes[0] is None and axes[1] is None:
        return [None]
    if a is None or b is None or min(len(a), len(b)) < 2:
        return _vector_rows(a, b, axes)
    rank, back = max(len(a), len(b)), [_from_end(axes[0], a), _from_end(axes[1], b)]
    if back == [-2, None]:
        return [rank - 2]
    if back == [None, -1]:
        return [rank - 1]
    return _batch_rows(a, b, back, rank)


def _vector_rows(a: Shape | None, b: Shape | None, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    """`product_rows` if an operand is a vector: rows along any axis of the other operand except the summed one."""
    if a is not None and b is not None:
        if axes[1] is None and axes[0] is not None and axes[0] < len(a) - 1:
            return [axes[0]]
        if axes[0] is None and axes[1] is not None and axes[1] != len(b) - 2 and len(b) > 1:
            return [axes[1] - (axes[1] == len(b) - 1)]
    return MixesRows("MatMul sums over the row axis")


def _batch_rows(a: Shape, b: Shape, back: Sequence[RowAxis], rank: int) -> Sequence[RowAxis] | MixesRows:
    found = {axis for axis in back if axis is not None}
    if len(found) > 1 or max(found) > -3:
        return MixesRows("MatMul sums over the row axis, or its operands have rows along different axes")
    axis = found.pop()
    for shape, own in ((a, back[0]), (b, back[1])):
        if own is None and len(shape) >= -axis and shape[axis] != 1:
            return MixesRows("an operand without rows varies along the row axis")
    return [rank + axis]


def _from_end(axis: RowAxis, shape: Shape) -> RowAxis:
    return None if axis is None else axis - len(shape)


@register
class Gemm(OpDef):
    """alpha * op(A) @ op(B) + beta * C for matrices, where op transposes if `transA` or `transB`; C broadcasts."""

    rounds_freely = True
    inputs = "A, B, C?"
    outputs = "Y"
    attrs = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, range(3))
        check_kind(c, 0, NUMBER)
        (m, k), (k2, n) = self._matrix(c, 0, "transA"), self._matrix(c, 1, "transB")
        if not c.agree(k, k2):
            c.fail(f"cannot multiply {c.tensor(0)} by {c.tensor(1)}: inner extents {k} and {k2} differ")
        bias = c.shape(2) if c.has_input(2) else None
        if bias is not None and not _may_fit(c, bias, (m, n)):
            c.fail(f"C is {c.tensor(2)}, which does not broadcast to [{m},{n}]")
        return [TensorType(dtype, (m, n))]

    def _matrix(self, c: Infer, index: int, transposed: str) -> Shape:
        name, shape = c.op.input_name(index), c.shape(index)
        if shape is None:
            shape = c.fresh_dim(f"{name}_rows"), c.fresh_dim(f"{name}_columns")
        if len(shape) != 2:
            c.fail(f"{name} is {c.tensor(index)}, expected rank 2")
        return shape[::-1] if c.attr(transposed) else shape

    def reference(self, c: Call, a: Array, b: Array, bias: Array | None = None) -> Array:
        for name, x in (("A", a), ("B", b)):
            if x.ndim != 2:
                c.fail(f"{name} has shape {list(x.shape)}, expected rank 2")
        left, right = (as_computed(x).T if c.attr(t) else as_computed(x) for x, t in ((a, "transA"), (b, "transB")))
        result = np.matmul(left, right)
        if a.dtype.kind not in "iu" or c.attr("alpha") != 1:
            result = result * c.attr("alpha")
        if bias is not None:
            scaled = as_computed(bias) if c.attr("beta") == 1 else as_computed(bias) * c.attr("beta")
            if np.broadcast_shapes(result.shape, scaled.shape) != result.shape:
                raise ValueError(f"C of {list(scaled.shape)} does not broadcast to {list(result.shape)}")
            result = result + scaled
        return result.astype(a.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        a, b, bias = (*axes, None, None)[:3]
        rows_of_a, columns_of_b = (1 if c.attr("transA") else 0), (0 if c.attr("transB") else 1)
        if a is None and b is None and bias is None:
            return [None]
        if a == rows_of_a and b is None:
            along = 0
        elif a is None and b == columns_of_b:
            along = 1
        else:
            return MixesRows("Gemm sums over the row axis, or both its matrices have rows")
        return (
            [along] if _bias_fits(c, bias, along) else MixesRows("C does not have its rows along those of the product")
        )

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        a, b = g.x(0), g.x(1)
        scaled = g.dy() * g.attr("alpha")
        left, right = (x.swap() if g.attr(name) else x for x, name in ((a, "transA"), (b, "transB")))
        da = right @ scaled.swap() if g.attr("transA") else scaled @ right.swap()
        db = scaled.swap() @ left if g.attr("transB") else left.swap() @ scaled
        return [da, db, g.dy() * g.attr("beta")]


def _may_fit(c: Infer, bias: Shape, product: Shape) -> bool:
    """Whether C, of shape `bias`, can broadcast to the product; symbols, which only a run can check, always fit."""
    pairs = [(dim, extent) for dim, extent in zip(reversed(bias), reversed(product), strict=False) if dim != 1]
    for pair in pairs:
        c.broadcast(pair)
    open_ = (dim == extent or not (isinstance(dim, int) and isinstance(extent, int)) for dim, extent in pairs)
    return len(bias) <= len(product) and all(open_)


def _bias_fits(c: Infer, axis: RowAxis, along: int) -> bool:
    if not c.has_input(2):
        return True
    shape = c.shape(2) or ()
    back = along - 2
    if axis is not None:
        return axis - len(shape) == back
    return len(shape) < -back or shape[back] == 1
