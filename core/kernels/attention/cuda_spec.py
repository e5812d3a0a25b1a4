"""Attention on a GPU: scores stay in registers for any number of keys (FlashAttention)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Graph, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.attention.spec import SOFTMAX_FLOPS, extras_of, operand_of
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.body import is_computable_on_gpu
from lathe.core.kernels.shared.cuda_product import F32, FACTORS, precisions
from lathe.core.kernels.shared.cuda_product_tiles import padded
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.matrices import Matrices, perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, traffic
from lathe.core.kernels.target import GpuTarget

_WIDEST = 256  # largest depth of queries and keys, and largest number of columns of values
_OFFERED = 3  # tiles


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A program computes `queries` queries of one head, and reads `keys` keys at a time; both are powers of two."""

    queries: int
    keys: int
    warps: int
    stages: int


_TILES = tuple(
    AttentionTile(*facts)
    for facts in ((64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (16, 64, 4, 2),
                  (16, 32, 4, 1), (16, 16, 4, 1))
)  # fmt: skip


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """Y[b, q, c] = sum over j of softmax over j of (epilogue(sum over d of Q[b, q, d] * K[b, j, d])) * V[b, j, c].

    The operands of `batch` are Q, K, V, the extras and Y. Pairs are strides: of Q along (q, d), K along (j, d), V along
    (j, c), Y along (q, c), each extra along (q, j). `dtype` is the type of Q, K, V and Y; scores are float32. If
    `guarded`, queries whose weights are NaN get zeros.
    """

    family: ClassVar[str] = "attention"
    generator: ClassVar[str] = "attention.cuda"
    batch: Nest
    queries: Dim
    keys: Dim
    depth: int
    columns: int
    q_steps: tuple[Dim, Dim]
    k_steps: tuple[Dim, Dim]
    v_steps: tuple[Dim, Dim]
    y_steps: tuple[Dim, Dim]
    extra_steps: tuple[tuple[Dim, Dim], ...]
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    dtype: DType
    tile: AttentionTile
    precision: str
    guarded: bool

    @property
    def summary(self) -> str:
        return f"attention {self.dtype} {self.tile.queries} queries by {self.tile.keys} keys"


def attention(request: Request) -> KernelCall | None:
    """Selector of FusedAttention of float32, float16 and bfloat16 whose depth and columns are numbers of at most 256.

    Q, K, V and Y have the same type. None for other nodes, if generated code cannot compute a dimension, if the
    epilogue of the scores has operators that are not elementwise or does not end in float32, and if no tile fits the
    GPU's shared memory.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the attention of `attention` with every candidate of `tiles`, the selector's own included.

    No offers for nodes that `attention` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node = request.node
    if not _is_covered(node):
        return
    q, k, v = (operand_of(request, index, name) for index, name in enumerate(("perm_q", "perm_k", "perm_v")))
    perm_y = perm_attribute(node, "perm_y")
    shape = to_product_axes(node.output.shape, perm_y)
    y = Matrices(shape, to_product_axes(request.strides_of(node.output), perm_y))
    depth, columns = q.shape[-1], v.shape[-1]
    if not isinstance(depth, int) or not isinstance(columns, int) or max(depth, columns) > _WIDEST:
        return
    scores = (*shape[:-1], k.shape[-1])
    extras = {i: Matrices(scores, request.walk(value, scores)) for i, value in extras_of(node).items()}
    batch, epilogue, dtype = shape[:-2], node.attrs.get("epilogue"), node.output.dtype
    nest = Nest(batch, tuple(matrix.along(batch) for matrix in (q, k, v, *extras.values(), y))).collapsed()
    operands: tuple[In | Out, ...] = (*(In(i) for i in (0, 1, 2, *extras)), Out())
    precision = precisions(dtype, request.gpu)[0]
    for tile in tiles(request.gpu, q.shape[-2], k.shape[-1], depth, columns, dtype):
        spec = AttentionSpec(
            nest, q.shape[-2], k.shape[-1], depth, columns,
            _last(q), (k.strides[-1], k.strides[-2]), _last(v), _last(y),
            tuple(_last(extra) for extra in extras.values()),
            bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
            tuple(value.dtype for value in extras_of(node).values()), dtype, tile, precision,
            bool(node.attrs.get("guarded")),
        )  # fmt: skip
        yield KernelCall(
            spec,
            operands,
            strided=operands,
            flops=product(scores) * (2 * depth + 2 * columns + SOFTMAX_FLOPS),
            bytes=traffic(node),
            grid=(product(nest.extents) * blocks(spec.queries, tile.queries),),
        )


def tiles(
    target: GpuTarget, queries: Dim, keys: Dim, depth: int, columns: int, dtype: DType
) -> tuple[AttentionTile, ...]:
    """At most three tiles, preferred ones first: they fit shared memory and exceed neither queries nor keys.

    Numbers of queries and keys are padded to powers of two for this comparison.
    """
    width = padded(depth) + padded(columns)

    def fits(tile: AttentionTile) -> bool:
        held = tile.queries * padded(depth) + tile.stages * tile.keys * width + tile.queries * tile.keys
        small = tile.queries <= padded(queries) and tile.keys <= padded(keys)
        return small and held * dtype.itemsize <= target.shared_bytes

    return tuple(tile for tile in _TILES if fits(tile))[:_OFFERED]


def _last(matrix: Matrices) -> tuple[Dim, Dim]:
    return matrix.strides[-2], matrix.strides[-1]


def _is_covered(node: Node) -> bool:
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and is_computable_on_gpu(epilogue)):
        return False
    if isinstance(epilogue, Graph) and epilogue.outputs[0].dtype is not F32:
        return False
    given, dtype = [*node.inputs[:3], node.output], node.output.dtype
    alike = all(value is not None and value.dtype is dtype for value in given)
    return alike and dtype in FACTORS and has_plannable_types(node)
