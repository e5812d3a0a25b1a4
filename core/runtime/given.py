"""What a run was given: arrays, the batch size, and the values of all other symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from core.runtime.record import Record

Binding: TypeAlias = tuple[tuple[str, int], ...]  # values of the symbols other than the batch size, sorted by name


@dataclass(frozen=True, slots=True)
class Given:
    """What a run was given: arrays in the order of the inputs, the batch size, and the values of all other symbols."""

    rows: int
    arrays: Sequence[Any]
    binding: Binding = ()
    record: Record | None = None
