"""Matrix products on a GPU: MatMul and FusedMatMul of floats or bytes, batched, with strides and an epilogue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request
from lathe.core.kernels.gemm.cublaslt_spec import cublaslt_gemm
from lathe.core.kernels.gemm.spec import can_be_replaced, extras_of, operand_of, product_shape
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.body import is_computable_on_gpu
from lathe.core.kernels.shared.cuda_product import (
    F32,
    FACTORS,
    HALVES,
    I8,
    SHIFT,
    SPLIT,
    Results,
    TiledProduct,
    cast_array,
    needs_adjacent_depth,
    precisions,
    split_into_halves,
    split_operands,
    weights_for_tf32,
)
from lathe.core.kernels.shared.cuda_product_tiles import (
    ProductTile,
    parts_of,
    ranked_tiles,
)
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.matrices import Perm, perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, traffic


@dataclass(frozen=True)
class GemmSpec(KernelSpec):
    """Y[b, i, j] = epilogue(sum over k of A[b, i, k] * B[b, k, j], extras[b, i, j]).

    The operands of both nests are A, B, the extras and Y. B moves along the loops of `batch`, and does not move along
    those of `rows`, which together form the row index i. `b_steps` are the strides of B along k and j. `element` is the
    type that is multiplied. If there are few tiles, `parts` programs share the depth of each tile (split-K).

    Bytes: A is uint8 and B is int8, but tensor cores multiply int8 only. So 128 is subtracted from A, and the operand
    after B holds the correction of the sums.
    """

    family: ClassVar[str] = "gemm"
    generator: ClassVar[str] = "gemm.cuda"
    batch: Nest
    rows: Nest
    depth: Dim
    columns: Dim
    a_step: Dim  # stride of A along k
    b_steps: tuple[Dim, Dim]
    factors: tuple[DType, DType]  # of A and B in memory
    element: DType
    results: Results
    tile: ProductTile
    precision: str
    parts: int

    @property
    def programs(self) -> Dim:
        """The number of tiles of all matrices."""
        high = blocks(product(self.rows.extents), self.tile.rows)
        return product(self.batch.extents) * high * blocks(self.columns, self.tile.columns)

    @property
    def summary(self) -> str:
        return f"gemm {self.element} {self.tile}{'' if self.precision == 'ieee' else f' by {self.precision}'}"


def gemm(request: Request) -> KernelCall | None:
    """Selector of MatMul and FusedMatMul of float32, float16, bfloat16, or uint8 by a constant int8 matrix.

    A and B have rank 2 or more (int8: B of rank 2) and any dimensions that code can compute. Narrow floats may be
    multiplied by float32, which is rounded to their type. None for other types, if generated code cannot compute a
    dimension, and if the epilogue has operators that are not elementwise.
    """
    kernels = _kernels(request)
    return kernels.preferred() if kernels is not None else None


def other_kernels(request: Request) -> Iterator[KernelCall]:
    """Offers of other kernels for the products of `gemm`: cuBLASLt first, since it needs no compilation.

    Then come other tiles and precisions. cuBLASLt is left out where it does not cover the product. No offers for other
    nodes.
    """
    kernels = _kernels(request)
    if kernels is None:
        return
    plain = kernels.call(kernels.tiles.tiles[0], "ieee")  # with the weights as they are: the library rounds for TF32
    library = cublaslt_gemm(plain, plain.spec, request) if isinstance(plain.spec, GemmSpec) else None
    yield from [library] if library is not None else []
    yield from kernels.offers()


def _kernels(request: Request) -> TiledProduct | None:
    """The kernels of a product; None if it is not covered."""
    node = request.node
    element = _element(request)
    if element is None:
        return None
    shape, extras = product_shape(node), extras_of(node)
    a, b = operand_of(request, 0), operand_of(request, 1)
    y = to_product_axes(request.strides_of(node.output), perm_attribute(node, "perm_y"))
    walks = {i: request.walk(value, shape) for i, value in extras.items()}
    batch = shape[:-2]
    moves = ((*a.along(batch), a.strides[-2]), (*b.along(batch), 0), *(s[:-1] for s in walks.values()), y[:-1])
    nest = Nest(shape[:-1], moves)
    batches, rows = (
        nest.take(k for k in range(nest.rank) if (nest.strides[1][k] != 0) is moving).collapsed()
        for moving in (True, False)
    )
    epilogue = node.attrs.get("epilogue")
    results = Results(
        bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        epilogue.inputs[0].dtype if isinstance(epilogue, Graph) else node.output.dtype,
        tuple(value.dtype for value in extras.values()),
        tuple(strides[-1] for strides in walks.values()),
        node.output.dtype,
        y[-1],
    )
    turned = request.constant(1) is not None and len(b.shape) == 2 and needs_adjacent_depth(element, request.gpu)
    ways = precisions(element, request.gpu, turned)
    left, right = (value.dtype for value in node.inputs[:2] if value is not None)
    factors = (left, element if request.constant(1) is not None else right)
    inplace = tuple(i for i, strides in walks.items() if strides == y and can_be_replaced(node, i))
    count = product(batches.extents)
    b_steps = (1, a.shape[-1]) if turned else (b.strides[-2], b.strides[-1])
    offsets = (Packed(1, "offsets", partial(_offsets, perm=perm_attribute(node, "perm_b"))),) if element is I8 else ()
    given: tuple[In | Out, ...] = (In(0), *(In(i) for i in extras), Out())

    def call(tile: ProductTile, precision: str) -> KernelCall:
        second = _right_operand(request, element, turned, precision)
        spec = GemmSpec(
            batches, rows, a.shape[-1], b.shape[-1], a.strides[-1], b_steps,
            factors, element, results, tile, precision, 1,
        )  # fmt: skip
        parts = parts_of(request.gpu, tile, spec.programs, spec.depth) if element.is_float else 1
        return KernelCall(
            replace(spec, parts=parts),
            (In(0), second, *offsets, *(In(i) for i in extras), Out(), *split_operands(tile, spec.programs, parts)),
            inplace,
            strided=(*given, In(1)) if isinstance(second, In) else given,
            flops=product(shape) * a.shape[-1] * 2,
            bytes=traffic(node),
            grid=(spec.programs, parts),
        )

    sizes = (product(rows.extents), b.shape[-1], a.shape[-1], count)
    tiles = ranked_tiles(request.gpu, *sizes, element, 2 if SPLIT in ways else 1)
    return TiledProduct(call, tiles, ways)


def _element(request: Request) -> DType | None:
    """The type of the factors in the product: that of A, or int8 for uint8 by int8.

    None for types and epilogues without a kernel. Bytes need a constant matrix B.
    """
    node, (a, b) = request.node, request.node.inputs[:2]
    if a is None or b is None or not has_plannable_types(node) or min(len(a.shape), len(b.shape)) < 2:
        return None
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and is_computable_on_gpu(epilogue)):
        return None
    if (a.dtype, b.dtype) == (DType.UINT8, I8):
        return I8 if request.constant(1) is not None and len(b.shape) == 2 else None
    return a.dtype if a.dtype in FACTORS and (b.dtype is a.dtype or (a.dtype in HALVES and b.dtype is F32)) else None


def _right_operand(request: Request, element: DType, turned: bool, precision: str) -> Operand:
    """The operand B.

    A constant B is converted to `element` at compile time, and transposed if `turned` (`_transpose`). It is split in
    halves if the precision is `SPLIT`, and rounded if it is "tf32" (`weights_for_tf32`).
    """
    if turned:
        perm = perm_attribute(request.node, "perm_b")
        if precision == SPLIT:
            return Packed(1, "turned halves", partial(_transposed_halves, perm=perm))
        if precision == "tf32":
            return Packed(1, "turned for tf32", partial(_transposed_for_tf32, perm=perm))
        return Packed(1, "turned", partial(_transpose, perm=perm))
    if request.constant(1) is None:
        return In(1)
    if precision == "tf32":
        return Packed(1, "for tf32", weights_for_tf32)
    if request.node.required_input(1).dtype is element:
        return In(1)
    return Packed(1, f"{element}", partial(cast_array, element=element))


def _transpose(array: Array, perm: Perm | None) -> Array:
    """The matrix B that `perm` makes of `array`, transposed, so that the numbers of each column are adjacent."""
    return np.ascontiguousarray(_matrix(array, perm).T)


def _transposed_halves(array: Array, perm: Perm | None) -> Array:
    return split_into_halves(_transpose(array, perm))


def _transposed_for_tf32(array: Array, perm: Perm | None) -> Array:
    return weights_for_tf32(_transpose(array, perm))


def _offsets(array: Array, perm: Perm | None) -> Array:
    """The int32 number per column of B to add to its sums, because `SHIFT` is subtracted from the left factors.

    The number is `SHIFT` times the sum of the column.
    """
    return SHIFT * _matrix(array, perm).sum(0, dtype=np.int32)


def _matrix(array: Array, perm: Perm | None) -> Array:
    return array if perm is None else np.transpose(array, perm)
