"""Large batches run in chunks of rows, so that the results of one step are still in the cache for the next.

This requires that rows are proven independent and that the batch is the first axis of every input and output: then a
chunk is the same run with fewer rows and other addresses. Each chunk reads the weights again. Image networks have large
activations first and large weights last, so a plan may be cut at a cut point, with small chunks before it and large
chunks after it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lathe.core.plan.cut_points import row_bytes
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import CutPoint, Plan, Port, Step

_CACHE_BYTES = 16 << 20  # arena bytes of a chunk: about half of a server's last-level cache
_MIN_SAVING = 1 / 10  # a cut point must save at least this fraction of the bytes that a row moves
ALL = sys.maxsize


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How a batch is cut into chunks.

    `rows`: the most rows per chunk before the cut point, or in the whole plan if there is none. `rows_after_cut`: the
    most rows per chunk after the cut point, which joins several smaller chunks.
    """

    rows: int = ALL
    cut_point: CutPoint | None = None
    rows_after_cut: int = ALL

    def first_chunk_rows(self, n: int) -> int:
        """The rows of the largest chunk of a batch of `n` rows, before the cut point if there is one."""
        return even_chunk_rows(even_chunk_rows(n, self.rows_after_cut), self.rows) if n > self.rows else n


def chunk_sizes(plan: Plan, threads: int) -> ChunkSizes:
    """The chunk sizes for batches of independent rows: chunks whose values fit the cache.

    A chunk costs one more read of the weights; the rows at a cut point are written and read once more. The result has
    the cut point that moves the fewest bytes, if it saves at least a tenth of the bytes that a row moves. All rows are
    one chunk if the arena does not grow with them, or if an input or output has no rows, or none of fixed size.
    """
    if plan.arena.a == 0 or not all(row_bytes(port.type) for port in (*plan.inputs, *plan.outputs)):
        return ChunkSizes()
    moved = _bytes_moved(plan.steps)
    most = _chunk_rows(plan.arena, moved, threads)
    least, best = moved.b / most - moved.a * _MIN_SAVING, ChunkSizes(most)
    for cut in plan.cut_points:
        before, after = _bytes_moved(plan.steps[: cut.step]), _bytes_moved(plan.steps[cut.step :])
        rows, rows_after = _chunk_rows(plan.arena, before, threads), _chunk_rows(cut.arena, after, threads)
        cost = before.b / rows + after.b / rows_after + 2 * cut.row
        if rows < rows_after and cost < least:
            least, best = cost, ChunkSizes(rows, cut, rows_after)
    return best


def _bytes_moved(steps: Sequence[Step]) -> Affine:
    return sum((step.bytes for step in steps), Affine())


def _chunk_rows(arena: Affine, moved: Affine, threads: int) -> int:
    """The rows per chunk whose arena fits the cache, but at least one per thread.

    A chunk also has enough rows that its values cause at least as much memory traffic as the weights.
    """
    return max(threads, _CACHE_BYTES // max(arena.a, 1), -(-moved.b // max(moved.a, 1)))


def even_chunks(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Split `n` rows evenly into as few chunks as possible: the first row of each chunk, and its number of rows.

    Each has at most `most` rows; only the last one may have fewer than the others.
    """
    piece = even_chunk_rows(n, most)
    for first in range(0, n, max(piece, 1)):
        yield first, min(piece, n - first)


def even_chunk_rows(n: int, most: int) -> int:
    """The rows of each chunk if `n` rows are split evenly into as few chunks of at most `most` rows as possible."""
    count = -(-n // most)
    return -(-n // max(count, 1))


def row_steps(ports: Sequence[Port]) -> list[int]:
    """Bytes from one row of the batch to the next, for each port; 0 if it has no such rows, or none of fixed size."""
    return [row_bytes(port.type) or 0 for port in ports]
