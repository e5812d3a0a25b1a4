"""Products with constant float32 weights of many zeros: MatMul, FusedMatMul and 1x1 convolutions.

The kernel multiplies only the weights that are not zero. Vectors run along the rows of A (the pixels of an image): a
block of rows is transposed first, so that a weight is one factor for a whole vector. Columns of about equally
many weights take turns, so their sums are independent. No pattern of the zeros is needed.
Where A is infinite or NaN, zeros of the weights would give NaN; the kernel leaves these products out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import evaluate, product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch
from lathe.core.kernels.conv.spec import Finish
from lathe.core.kernels.shared.matrices import perm_attribute
from lathe.core.kernels.shared.nest import BATCH, Nest
from lathe.core.kernels.shared.panels import LINE
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.strassen.spec import product_of
from lathe.core.kernels.target import Target

COLUMNS = LINE  # of a block of results: a cache line of each row
GROUP = 4  # columns whose weights take turns
_BANKS = COLUMNS // GROUP

_LEAST_LANES = 8
_LEAST_WEIGHTS = 1 << 12  # below, products are too short for a choice to matter
_MANY_ROWS = 32  # of a sample
# Shares of zeros from which on the kernel is preferred, and timed by the tuner, with many and with few rows per sample
# (measured on a Zen 5): a single row of 90 % zeros takes as long as with all weights, eight rows take half as long.
_CHOSEN, _OFFERED = (0.7, 0.88), (0.5, 0.75)
_SHARES = 20  # steps in which the share of zeros counts for tuning
_CACHE_SHARE = 0.5  # share of the second-level cache for a transposed block


@dataclass(frozen=True)
class SparseSpec(KernelSpec):
    """Y = finish(A B), where B is a table of weights that are not zero (`pack`).

    `source` walks the rows of A, `finish` those of Y. `variants` are the shapes of a block of rows as vectors by lanes,
    from most to fewest rows. `zeros` is the share of zeros in steps of 5 %: on it depends which kernel is fastest.
    """

    family: ClassVar[str] = "sparse"
    generator: ClassVar[str] = "sparse.cpu"
    source: Nest
    depth: int
    columns: int
    finish: Finish
    variants: tuple[tuple[int, int], ...]
    zeros: int

    @property
    def rows(self) -> Dim:
        return product(self.source.extents)

    @property
    def blocks(self) -> int:
        """Blocks of `COLUMNS` columns."""
        return -(-self.columns // COLUMNS)

    @property
    def block_rows(self) -> int:
        """The most rows of a block."""
        return prod(self.variants[0])

    @property
    def scratch_words(self) -> tuple[int, int, int]:
        """Words of a transposed block of A and a line of zeros, of a block of sums, and of some of their rows."""
        lanes = max(lanes for _, lanes in self.variants)
        return (self.depth + 1) * self.block_rows, COLUMNS * self.block_rows, COLUMNS * lanes

    @property
    def summary(self) -> str:
        vectors, lanes = self.variants[0]
        return f"sparse, about {100 * self.zeros // _SHARES} % zeros, blocks of {vectors * lanes} rows"


def sparse(request: Request) -> KernelCall | None:
    """Selector of products by a constant float32 matrix with many zeros: at least 70 %, with few rows 88 %.

    These are MatMul, FusedMatMul and 1x1 Conv and FusedConv of float32, by at least 4,096 weights. Few rows are fewer
    than 32 in one sample. None for other nodes, on CPUs whose vectors have fewer than 8 float32 numbers, and for a
    request with `sparse` False or a `rank` above 0.
    """
    return _call(request, _CHOSEN) if request.sparse and request.rank == 0 else None


def with_zeros(request: Request) -> Iterator[KernelCall]:
    """Offers for the products of `sparse`, if at least 50 % of the weights are zeros, with few rows 75 %.

    They are the kernel with all weights, if there is one, and the sparse kernel. No offers otherwise.
    """
    if request.sparse and request.rank == 0 and (call := _call(request, _OFFERED)) is not None:
        dense = request.select_with(sparse=False)
        if dense is not None:
            yield dense
        yield call


def _call(request: Request, least: tuple[float, float]) -> KernelCall | None:
    """The call for weights with at least a share of zeros; None if the kernel does not cover the node.

    `least` are the shares for many and for few rows.
    """
    weight, node, target = request.constant(1), request.node, request.cpu
    if weight is None or weight.dtype != np.float32 or target.lanes < _LEAST_LANES or weight.size < _LEAST_WEIGHTS:
        return None
    if "Conv" in node.op and prod(weight.shape[2:]) != 1:
        return None
    kept = int(np.count_nonzero(weight))
    zeros = 1 - kept / weight.size
    if zeros < min(least):
        return None
    plain = request.select_with(winograd=False, sparse=False, target=target.without_tiles)
    found = product_of(plain.spec) if plain is not None else None
    if plain is None or found is None or found.depth * found.columns != weight.size:
        return None
    rows = product(found.source.extents)
    if zeros < least[not _are_many(rows)]:
        return None
    spec = SparseSpec(
        source=found.source,
        depth=found.depth,
        columns=found.columns,
        finish=found.finish,
        variants=_variants(target, found.depth, rows),
        zeros=round(zeros * _SHARES),
    )
    is_conv = "Conv" in node.op
    perm = (*range(2, weight.ndim), 1, 0) if is_conv else perm_attribute(node, "perm_b") or tuple(range(weight.ndim))
    table = Packed(1, f"nonzeros{perm}", partial(_pack, perm=perm))
    others = [operand for operand in plain.operands[2:] if isinstance(operand, In | Out)]
    scratch = Scratch(sum(spec.scratch_words) * WORD_BYTES)
    nbytes = plain.bytes - weight.nbytes + kept * 2 * WORD_BYTES
    return replace(plain, spec=spec, operands=(In(0), table, *others, scratch), flops=rows * (2 * kept), bytes=nbytes)


def _are_many(rows: Dim) -> bool:
    """Whether one sample has at least `_MANY_ROWS` rows; False if that depends on more than the batch size."""
    if isinstance(rows, int):
        return rows >= _MANY_ROWS
    return rows.names == {BATCH} and evaluate(rows, {BATCH: 1}) >= _MANY_ROWS


def _variants(target: Target, depth: int, rows: Dim) -> tuple[tuple[int, int], ...]:
    """The shapes of blocks of rows, as vectors by lanes, that `rows` rows need, from most to fewest rows.

    With 32 registers, the sums of four vectors by `GROUP` columns fit, with 16 those of three. A transposed block takes
    at most half of the second-level cache, unless one vector takes more.
    """
    lanes, widest = target.lanes, 4 if target.registers >= 32 else 3
    shapes = [(vectors, lanes) for vectors in range(widest, 0, -1) if vectors != 3 or widest == 3]
    if lanes > _LEAST_LANES:
        shapes.append((1, _LEAST_LANES))
    words = target.l2_bytes * _CACHE_SHARE / WORD_BYTES
    fitting = [shape for shape in shapes if depth * prod(shape) <= words] or shapes[-1:]
    if isinstance(rows, int):
        enough = next((shape for shape in reversed(fitting) if prod(shape) >= rows), None)
        if enough is not None:
            return (enough,)
    return tuple(fitting)


def table_places(columns: int) -> tuple[int, int, int]:
    """Where parts of a table for `columns` columns begin, in words: first steps of the groups, places, and entries."""
    groups = -(-columns // COLUMNS) * _BANKS
    places = groups + 1
    return 0, places, -(-(places + groups * GROUP) // COLUMNS) * COLUMNS


def _pack(weight: Array, perm: tuple[int, ...]) -> Array:
    ordered = np.transpose(weight, perm)
    return pack(ordered.reshape(ordered.shape[-2:]))


def pack(matrix: Array) -> Array:
    """The table of a matrix [K, N], float32, as int32 words.

    The columns of a block of `COLUMNS` are sorted by the number of their weights that are not zero, and cut into groups
    of `GROUP` columns. A step of a group is one weight of each column: `GROUP` rows of the matrix, then the bits of
    `GROUP` weights. Columns with fewer weights than others of their group get zeros in row K, which is a line of zeros.
    The table begins with the number of the first step of each group and the end; then follow the places of the columns
    in their block.
    """
    depth, columns = matrix.shape
    blocks = -(-columns // COLUMNS)
    padded = np.zeros((blocks * COLUMNS, depth), np.float32)
    padded[:columns] = matrix.T
    counts = np.count_nonzero(padded, axis=1).reshape(blocks, COLUMNS)
    places = np.argsort(counts, axis=1, kind="stable")
    counts = np.take_along_axis(counts, places, axis=1).reshape(-1, GROUP)
    starts = np.concatenate([[0], np.cumsum(counts.max(axis=1))]).astype(np.int32)
    ordered = padded.reshape(blocks, COLUMNS, depth)[np.arange(blocks)[:, None], places].reshape(-1, depth)
    column, row = np.nonzero(ordered)
    first = np.concatenate([[0], np.cumsum(counts.reshape(-1))])
    step = starts[column // GROUP] + np.arange(len(column)) - first[column]
    entries = np.zeros((starts[-1], 2, GROUP), np.int32)
    entries[:, 0] = depth
    entries[step, 0, column % GROUP] = row
    entries[step, 1, column % GROUP] = ordered[column, row].view(np.int32)
    _, at, begin = table_places(columns)
    table = np.zeros(begin + entries.size, np.int32)
    table[:at] = starts
    table[at : at + places.size] = places.reshape(-1)
    table[begin:] = entries.reshape(-1)
    return table
