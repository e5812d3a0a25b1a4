"""The slowest operators of a trained model in serving, for several batch sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lathe.core.compiler.compile import compile
from lathe.core.errors import FeedError
from lathe.core.runtime.session.profile import Profile
from lathe.core.runtime.session.sample_inputs import sample_inputs

BATCHES = (1, 16, 64)
TOP = 10  # operators per batch size
_RUNS = 5  # profiled runs per batch size


def slowest_operators(
    model: bytes | str | os.PathLike[str], batches: Sequence[int] = BATCHES, threads: int | None = None
) -> list[dict[str, Any]]:
    """For each batch size: `batch`, the `milliseconds` of a run and its slowest `operators`, at most `TOP`.

    An operator has `op`, `kernel`, `outputs` (names), `microseconds`, its `share` of the run from 0 to 1, `gflops`
    (10^9 operations per second), and `of_peak`, the least time by the roofline model divided by the measured time.
    Times are medians over 5 runs on random inputs. `model` is an ONNX file or its bytes; it is compiled without tuning.
    The list is empty if no sample inputs can be made for the model, or if it refuses them. ModelError for an invalid
    model.
    """
    with compile(model, threads=threads, max_batch=max(batches), tune="off") as session:
        try:
            return [_summary(batch, session.profile(sample_inputs(session, batch), _RUNS)) for batch in batches]
        except FeedError:
            return []


def _summary(batch: int, profile: Profile) -> dict[str, Any]:
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
