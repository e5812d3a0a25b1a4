"""Large batches go through the tape in pieces, so that one step's results are still in the cache for the next.

That is possible where rows are proven independent and every input and output leads with the batch: then a piece is the
same run with fewer rows and other addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

from core.ir.dim import affine
from core.ir.types import TensorType, ValueType
from core.plan.liveness import Affine
from core.plan.plan import Plan, Port

_CACHE_BYTES = 16 << 20  # of the arena at a time: about half of a server's last-level cache
ALL = sys.maxsize


def rows_of_a_piece(plan: Plan, threads: int) -> int:
    """How many rows go through the tape together; `ALL` where more than that would be no slower.

    Each piece reads the weights again: it must be large enough that they are the smaller part of what it moves.
    """
    if plan.arena.a == 0 or not all(row_bytes(port.type) for port in (*plan.inputs, *plan.outputs)):
        return ALL
    moved = sum((step.bytes for step in plan.steps), Affine())
    return max(threads, _CACHE_BYTES // plan.arena.a, -(-moved.b // max(moved.a, 1)))


def even_piece(n: int, most: int) -> int:
    """The size of equal pieces of `n` rows, at most `most` each."""
    count = -(-n // most)
    return -(-n // max(count, 1))


def row_steps(ports: Sequence[Port]) -> list[int]:
    """Bytes from one row to the next, port by port."""
    return [row_bytes(port.type) or 0 for port in ports]


def row_bytes(type_: ValueType) -> int | None:
    """Bytes of one row of the batch; 0 for a tensor that does not depend on it, None when there are no such rows."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    known = [parts for dim in type_.shape if (parts := affine(dim, "n")) is not None]
    if len(known) < len(type_.shape):
        return None
    if all(slope == 0 for slope, _ in known):
        return 0
    if known[0] != (1, 0) or any(slope for slope, _ in known[1:]):
        return None
    return prod(size for _, size in known[1:]) * type_.dtype.itemsize
