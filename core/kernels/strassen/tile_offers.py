"""Offers for the tuner: products and convolutions with register tiles or loop orders other than the preferred ones."""

from __future__ import annotations

from collections.abc import Iterator

from lathe.core.kernels.call import KernelCall, Request
from lathe.core.kernels.strassen.spec import unlikely_candidates

_RANKS = 6


def other_tiles(request: Request) -> Iterator[KernelCall]:
    """Offers of the node's kernel with the next tiles of `panels.ranked_tiles`, then of `unlikely_candidates`.

    A rank for which no kernel runs the node gives no offer.
    """
    for rank in range(1, _RANKS):
        call = request.select_with(rank=rank)
        if call is not None:
            yield call
    yield from unlikely_candidates(request)
