"""What a run was given: arrays, the batch size, and the values of all other symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from core.ir.dim import Dim
from core.ir.dims import is_sized
from core.runtime.record import Record

Binding: TypeAlias = tuple[tuple[str, int], ...]  # values of the symbols other than the batch size, sorted by name
Sizes: TypeAlias = tuple[tuple[str, Dim], ...]  # the same for code: numbers, or what symbols are in code for any sizes


def is_any_size(binding: Sizes) -> bool:
    """Whether a binding is that of code for any sizes."""
    return any(is_sized(dim) for _, dim in binding)


@dataclass(frozen=True, slots=True)
class Given:
    """What a run was given: arrays in the order of the inputs, the batch size, and the values of all other symbols."""

    rows: int
    arrays: Sequence[Any]
    binding: Binding = ()
    record: Record | None = None
