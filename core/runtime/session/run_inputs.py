"""The inputs of a run: arrays, the batch size, and the values of all other symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lathe.core.ir.dim import Dim
from lathe.core.ir.dims import has_only_sizes
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.session.record import Record

Binding: TypeAlias = tuple[tuple[str, int], ...]  # values of the symbols other than the batch size, sorted by name
CodeBinding: TypeAlias = tuple[tuple[str, Dim], ...]  # the same for code: numbers, or sizes of dynamic-shape code


def is_dynamic(binding: CodeBinding) -> bool:
    """Whether a binding gives symbols sizes of a table (size0, ...) instead of numbers: that of dynamic-shape code."""
    return any(has_only_sizes(dim) for _, dim in binding)


def batching_for(batching: BatchInfo, binding: CodeBinding) -> BatchInfo:
    """The batching of a model for the code of a binding: "not batchable" for dynamic-shape code, otherwise `batching`.

    Dynamic-shape code has no `n` that counts rows.
    """
    return BatchInfo(False, "the rows are one of the sizes") if is_dynamic(binding) else batching


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The inputs of a run: arrays in the model's order, the batch size, and the values of all other symbols.

    `record`, if there is one, is called with each kernel that ran. `earlier_runs`: as in `ShapeCache.enter`.
    """

    rows: int
    arrays: Sequence[Any]
    binding: Binding = ()
    record: Record | None = None
    earlier_runs: int = 0
