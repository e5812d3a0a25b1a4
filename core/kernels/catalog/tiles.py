"""Products and convolutions with other register tiles than the preferred one, or in another order: what the tuner may
choose from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.kernels.catalog.base import KernelCall, Request, offers, select
from core.kernels.catalog.strassen import unexpected

_RANKS = 6


@offers("FusedMatMul", "MatMul", "FusedConv", "Conv")
def other_tiles(request: Request) -> Iterator[KernelCall]:
    """The same kernel with the next tiles of `panels.ranked_tiles`, at last what is rarely faster."""
    for rank in range(1, _RANKS):
        call = select(replace(request, rank=rank))
        if call is not None:
            yield call
    yield from unexpected(request)
