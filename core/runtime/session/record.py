"""The record of a run: each kernel with its begin and end, for tracing a request through the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from lathe.core.runtime.session.runner import DeviceShare, Runner, StepTimes

REFERENCE = "reference"  # the kernel name of a node that runs on the reference


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One step of a run, with its begin and end by `time.perf_counter_ns`.

    The steps of a GPU are measured by its own clock, and shifted so that the last one ends when the host saw the run
    end.
    """

    label: str  # of the node
    op: str
    kernel: str
    device: str  # "cpu", "cuda:0"
    began: int
    ended: int


Record: TypeAlias = Callable[[KernelRun], None]


def run_recorded(runner: Runner, n: int, arrays: Sequence[NDArray[Any]], record: Record) -> list[Any]:
    """The outputs of `runner.run(n, arrays)`; after the run, `record` is called with each kernel, in order of begin.

    The threads synchronise after every step, so that its end is known. A run without a record does so only where it
    must.
    """
    times = [StepTimes(share.plan, n) for share in runner.shares]
    results = runner.run(n, arrays, times)
    report_kernels(list(zip(runner.shares, times, strict=True)), record)
    return results


def report_kernels(
    taken: Sequence[tuple[DeviceShare, StepTimes]], record: Record, others: Sequence[KernelRun] = ()
) -> None:
    """Call `record` with the kernels in `taken` and those in `others`, in the order in which they began."""
    found = [*others, *(run for share, times in taken for run in _runs(share, times))]
    for run in sorted(found, key=lambda run: run.began):
        record(run)


def _runs(share: DeviceShare, times: StepTimes) -> Iterator[KernelRun]:
    plan, device = share.plan, share.device
    for lap in times.laps:
        stamps = lap.stamps.tolist()
        steps = plan.steps[lap.first : lap.first + len(stamps) - 1]
        for step, began, ended in zip(steps, stamps[:-1], stamps[1:], strict=True):
            yield KernelRun(step.label, step.op, step.at(times.n).summary, device, began, ended)
    for index, began, ended in times.nodes:
        node = plan.fallbacks.nodes[index]
        yield KernelRun(node.name, node.op, REFERENCE, device, began, ended)
