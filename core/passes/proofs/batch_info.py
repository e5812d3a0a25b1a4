"""Whether the rows of a batch are independent: what the proof says of a model, and what a session reports."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.types import Dim


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Whether rows of different callers may share a run, and the reason for either answer.

    `symbol`: the name of the leading dimension; None if no proof found one. `supposed`: the code for all
    batch sizes is right only while none of these dimensions is negative; for any other size a session compiles code of
    its own.
    """

    batchable: bool
    reason: str
    symbol: str | None = None
    supposed: tuple[Dim, ...] = ()

    @property
    def is_divisible(self) -> bool:
        """Whether a batch may be cut into chunks of any size."""
        return self.batchable and not self.supposed
