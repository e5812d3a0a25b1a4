"""Where a trained model's time goes when it serves, for one row and for many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from core.compiler import compile
from core.errors import FeedError
from core.runtime.profile import Profile
from core.runtime.sample import sample

BATCHES = (1, 16, 64)
TOP = 10
_RUNS = 5


def slowest(
    model: bytes | str | os.PathLike[str], batches: Sequence[int] = BATCHES, threads: int | None = None
) -> list[dict[str, Any]]:
    """For each batch size: `milliseconds` of a run, and its `operators` that take longest.

    An operator has `op`, `kernel`, `outputs`, `microseconds`, its `share` of the run, `gflops` (10^9/s), `of_peak`.
    Empty for a model whose inputs have no stand-in.
    """
    with compile(model, threads=threads, max_batch=max(batches), tune="off") as session:
        try:
            return [_told(batch, session.profile(sample(session, batch), _RUNS)) for batch in batches]
        except FeedError:
            return []


def _told(batch: int, profile: Profile) -> dict[str, Any]:
    operators = [
        {
            "op": node.op,
            "kernel": node.kernel,
            "outputs": list(node.outputs),
            "microseconds": round(node.nanoseconds / 1e3, 1),
            "share": round(profile.share(node), 4),
            "gflops": round(node.gflops, 2),
            "of_peak": round(node.roofline, 4),
        }
        for node in profile.top(TOP)
    ]
    return {"batch": batch, "milliseconds": round(profile.total / 1e6, 4), "operators": operators}
