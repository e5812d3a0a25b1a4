"""CachedAttention: tokens of many sequences over the pages of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.target import Target
from lathe.core.ops.opdef import registry

_ROWS = 24  # queries times heads that share a pass over the pages: two register tiles with AVX-512
_LEAST_LANES, _MOST_VECTORS = 4, 8  # of the scores of a page
_USUAL_KEYS = 256  # of a query, assumed for costs, since positions are data
_SOFTMAX_FLOPS = 12  # per score


@dataclass(frozen=True)
class CachedAttentionSpec(KernelSpec):
    """Queries and results [tokens, kv_heads * group, size]; the cache has `count` pages of `page` keys of `dtype`.
    With int8, scales of keys and values follow the other operands.

    A task is one head of keys and up to `block` consecutive tokens of one sequence. Its rows are the heads of queries
    of these tokens that share the head of keys. `lanes` keys lie in a vector of scores. Register tiles have
    `score_rows` rows in the first product, and `value_rows` rows of `value_vectors` vectors in the second.
    """

    family: ClassVar[str] = "cached_attention"
    generator: ClassVar[str] = "paged_cache.attention_cpu"
    dtype: DType
    tokens: Dim
    kv_heads: int
    group: int
    size: int
    count: int
    page: int
    most: Dim
    window: int
    scale: float
    block: int
    lanes: int
    score_rows: tuple[int, ...]
    value_rows: tuple[int, ...]
    value_vectors: int

    @property
    def summary(self) -> str:
        return f"attention over pages of {self.page}, {self.block} tokens x {self.group} heads at a time"

    @property
    def rows(self) -> int:
        """The most rows of a task."""
        return self.block * self.group

    @property
    def padded(self) -> int:
        """Elements between rows of results in scratch memory: whole vectors of any target."""
        return -(-self.size // 16) * 16

    @property
    def scratch_parts(self) -> tuple[int, int, int, int, int]:
        """Float32 elements of scratch: results, powers, maxima, factors, and vectors of sums, for each row."""
        return self.rows * self.padded, self.rows * self.page, self.rows, self.rows, self.rows * 16


def cached_attention(request: Request) -> KernelCall | None:
    """Selector of CachedAttention for a cache of float32, float16, bfloat16 or int8 whose extents are numbers above 0.

    A page has a number of keys that 4 divides, and that fits 8 vectors; heads and depth of queries are numbers. None
    for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    q, keys, tables = node.required_input(0), node.required_input(1), node.required_input(5)
    scaled = keys.dtype is DType.INT8
    known = [extent for extent in (*keys.shape, *q.shape[1:]) if isinstance(extent, int) and extent]
    if not has_plannable_types(node) or len(known) < len(keys.shape) + len(q.shape) - 1:
        return None
    count, kv_heads, size, page, heads, _ = known
    target, group, view = request.cpu, heads // kv_heads, registry.NodeView(registry.get(node.op), node)
    lanes = math.gcd(page, target.lanes)
    if lanes < _LEAST_LANES or page // lanes > _MOST_VECTORS:
        return None
    vectors, columns = page // lanes, -(-size // target.lanes)
    value_vectors = min(columns, 4)
    spec = CachedAttentionSpec(
        dtype=keys.dtype,
        tokens=q.shape[0],
        kv_heads=kv_heads,
        group=group,
        size=size,
        count=count,
        page=page,
        most=tables.shape[1],
        window=view.attr("window"),
        scale=view.attr("scale"),
        block=max(_ROWS // group, 1),
        lanes=lanes,
        score_rows=_tile_heights(target, vectors, group),
        value_rows=_tile_heights(target, value_vectors, group),
        value_vectors=value_vectors,
    )
    scratch = Scratch(4 * sum(spec.scratch_parts))
    operands: tuple[Operand, ...] = (*(In(index) for index in range(8 if scaled else 6)), Out(), scratch)
    flops = q.tensor.size * _USUAL_KEYS * 4 + q.shape[0] * (heads * _USUAL_KEYS * _SOFTMAX_FLOPS)
    return KernelCall(spec, operands, flops=flops, bytes=traffic(node))


def _tile_heights(target: Target, vectors: int, group: int) -> tuple[int, ...]:
    """Rows of register tiles of `vectors` vectors, the highest first; together they cover any multiple of `group`.

    Accumulators take at most three quarters of the registers.
    """
    most = max(3 * target.registers // 4 // vectors, 1)
    unit = group if group <= most else 1
    heights = (most // unit * unit, max(most // (3 * unit), 1) * unit, unit)
    return tuple(dict.fromkeys(heights))
