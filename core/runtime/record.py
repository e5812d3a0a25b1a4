"""What a run consisted of: each kernel with its begin and end, for whoever follows one request through a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from core.runtime.runner import Runner, Share, Times

REFERENCE = "reference"  # in place of a kernel, for a node that has none


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One step of a run, from when to when by `time.perf_counter_ns`. A GPU's steps are measured by its own clock, and
    placed so that the last one ends when the host saw the run end."""

    label: str  # of the node
    op: str
    kernel: str
    device: str  # "cpu", "cuda:0"
    began: int
    ended: int


Record: TypeAlias = Callable[[KernelRun], None]


def run_recorded(runner: Runner, n: int, arrays: Sequence[NDArray[Any]], record: Record) -> list[Any]:
    """As `Runner.run`; `record` is told what ran, in order. The threads meet after every step, so that its end is
    known, which the run without a record does only where it must."""
    times = [Times(share.plan) for share in runner.shares]
    results = runner.run(n, arrays, times)
    tell(list(zip(runner.shares, times, strict=True)), record)
    return results


def tell(taken: Sequence[tuple[Share, Times]], record: Record, others: Sequence[KernelRun] = ()) -> None:
    """Tell `record` what ran, in order; `others` ran beside what the shares have taken."""
    found = [*others, *(run for share, times in taken for run in _runs(share, times))]
    for run in sorted(found, key=lambda run: run.began):
        record(run)


def _runs(share: Share, times: Times) -> Iterator[KernelRun]:
    plan, device = share.plan, share.device
    for lap in times.laps:
        stamps = lap.stamps.tolist()
        steps = plan.steps[lap.first : lap.first + len(stamps) - 1]
        for step, began, ended in zip(steps, stamps[:-1], stamps[1:], strict=True):
            yield KernelRun(step.label, step.op, step.summary, device, began, ended)
    for index, began, ended in times.nodes:
        node = plan.fallbacks.nodes[index]
        yield KernelRun(node.name, node.op, REFERENCE, device, began, ended)
