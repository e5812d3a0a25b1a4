"""Large batches go through the tape in pieces, so that one step's results are still in the cache for the next.

That is possible where rows are proven independent and every input and output leads with the batch: then a piece is the
same run with fewer rows and other addresses. Each piece reads the weights again. Networks of images have large
activations first and large weights last, so a tape may be parted at a seam: small pieces before it, large ones behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.plan.liveness import Affine
from core.plan.plan import Plan, Port, Seam, Step
from core.plan.seams import row_bytes

_CACHE_BYTES = 16 << 20  # of the arena at a time: about half of a server's last-level cache
_WORTH = 1 / 10  # of the bytes that a row moves: what a seam must save
ALL = sys.maxsize


@dataclass(frozen=True, slots=True)
class Pieces:
    """`most` rows go through the tape together: through the steps before the seam, where there is one; `behind` it rows
    of several such pieces, up to so many."""

    most: int = ALL
    seam: Seam | None = None
    behind: int = ALL

    def front(self, n: int) -> int:
        """The rows of the largest of the smaller pieces that a batch of `n` rows becomes."""
        return even_piece(even_piece(n, self.behind), self.most) if n > self.most else n


def pieces_of(plan: Plan, threads: int) -> Pieces:
    """How a large batch of independent rows had best be cut: so that the fewest bytes beyond activations are moved."""
    if plan.arena.a == 0 or not all(row_bytes(port.type) for port in (*plan.inputs, *plan.outputs)):
        return Pieces()
    moved = _moved(plan.steps)
    most = _rows(plan.arena, moved, threads)
    least, best = moved.b / most - moved.a * _WORTH, Pieces(most)
    for seam in plan.seams:
        before, after = _moved(plan.steps[: seam.step]), _moved(plan.steps[seam.step :])
        front, behind = _rows(plan.arena, before, threads), _rows(seam.arena, after, threads)
        cost = before.b / front + after.b / behind + 2 * seam.row
        if front < behind and cost < least:
            least, best = cost, Pieces(front, seam, behind)
    return best


def _moved(steps: Sequence[Step]) -> Affine:
    return sum((step.bytes for step in steps), Affine())


def _rows(arena: Affine, moved: Affine, threads: int) -> int:
    """As many as the cache has room for, but so many that weights are the smaller part of what is moved."""
    return max(threads, _CACHE_BYTES // max(arena.a, 1), -(-moved.b // max(moved.a, 1)))


def spans(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Even pieces of `n` rows, at most `most` each: where each begins, and how many rows it has."""
    piece = even_piece(n, most)
    for first in range(0, n, max(piece, 1)):
        yield first, min(piece, n - first)


def even_piece(n: int, most: int) -> int:
    """The size of equal pieces of `n` rows, at most `most` each."""
    count = -(-n // most)
    return -(-n // max(count, 1))


def row_steps(ports: Sequence[Port]) -> list[int]:
    """Bytes from one row to the next, port by port."""
    return [row_bytes(port.type) or 0 for port in ports]
