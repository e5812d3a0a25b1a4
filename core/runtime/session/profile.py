"""Time per node of one model: a table, and a file for the Chrome trace viewer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.plan.plan import Fallback
from lathe.core.runtime.session.record import REFERENCE
from lathe.core.runtime.session.runner import DeviceShare, Runner, StepTimes

OF_PEAK = (
    "of peak: the least possible time on this machine, divided by the measured time. Above 100%: the data are in a "
    "cache, or the algorithm needs fewer operations, as Winograd does."
)


@dataclass(frozen=True, slots=True)
class NodeTime:
    """One step or fallback: median nanoseconds of the measured runs, its work, and the least time for it (roofline)."""

    label: str
    op: str
    kernel: str  # REFERENCE for a node without a compiled kernel: its work is unknown
    outputs: tuple[str, ...]
    nanoseconds: int
    flops: int
    bytes: int
    least: int  # nanoseconds at the machine's peak rates

    @property
    def gflops(self) -> float:
        """10^9 operations per second."""
        return self.flops / self.nanoseconds if self.nanoseconds else 0.0

    @property
    def gigabytes(self) -> float:
        """10^9 bytes per second, if the step moves only the least number of bytes that it must."""
        return self.bytes / self.nanoseconds if self.nanoseconds else 0.0

    @property
    def roofline(self) -> float:
        """The least time divided by the measured one. Above 1: a better algorithm (Winograd), or data in a cache."""
        return self.least / self.nanoseconds if self.nanoseconds else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """The steps and fallbacks of a run in their order, each with its median time over `runs` runs.

    `threads`: the most threads that one device of the run uses.
    """

    nodes: tuple[NodeTime, ...]
    runs: int
    threads: int

    @property
    def total(self) -> int:
        """Nanoseconds of all steps together."""
        return sum(node.nanoseconds for node in self.nodes)

    @property
    def roofline(self) -> float:
        """The sum of the least times of all steps, divided by their measured time."""
        return sum(node.least for node in self.nodes) / self.total if self.total else 0.0

    def top(self, count: int = 10) -> tuple[NodeTime, ...]:
        """The `count` steps that took longest, the longest first."""
        return tuple(sorted(self.nodes, key=lambda node: -node.nanoseconds)[:count])

    def share(self, node: NodeTime) -> float:
        """The fraction of the total time that a step took."""
        return node.nanoseconds / self.total if self.total else 0.0

    def table(self, count: int = 10) -> str:
        """The `count` slowest steps as aligned text: `OF_PEAK`, a header, a line for each step, and the total."""
        rows = [OF_PEAK, f"{'us':>9} {'share':>6} {'GFLOP/s':>8} {'GB/s':>7} {'of peak':>8}  node"]
        rows += [
            f"{node.nanoseconds / 1e3:9.1f} {self.share(node):6.1%} {node.gflops:8.1f} {node.gigabytes:7.1f} "
            f"{node.roofline:8.1%}  {node.op} '{node.label}' {node.kernel} -> {', '.join(node.outputs)}"
            for node in self.top(count)
        ]
        what = f"{len(self.nodes)} steps, {self.threads} threads, {self.runs} runs"
        rows.append(f"{self.total / 1e3:9.1f} 100.0% {'':16s} {self.roofline:8.1%}  {what}")
        return "\n".join(rows)

    def chrome_trace(self, path: str | Path) -> None:
        """Write the steps in the Trace Event format (chrome://tracing, Perfetto).

        Each step begins where the one before ends, so the trace shows durations, not the times between steps. An event
        has the arguments `kernel`, `outputs`, `gflops` and `of peak`, the least possible time of the step divided by
        the measured one. `otherData` explains `of peak`.
        """
        events, at = [], 0.0
        for node in self.nodes:
            duration = node.nanoseconds / 1e3
            arguments = {"kernel": node.kernel, "outputs": node.outputs, "gflops": round(node.gflops, 1),
                         "of peak": round(node.roofline, 3)}  # fmt: skip
            events.append({"name": f"{node.op} {node.label}", "ph": "X", "ts": at, "dur": duration, "pid": 0, "tid": 0,
                           "args": arguments})  # fmt: skip
            at += duration
        Path(path).write_text(json.dumps({"traceEvents": events, "otherData": {"of peak": OF_PEAK}}))


def profile(runner: Runner, n: int, arrays: Sequence[NDArray[Any]], runs: int) -> Profile:
    """The median time of every step over `runs` runs on the inputs `arrays`, after one warm-up run.

    All these runs update the states. Errors are those of `Runner.run`.
    """
    runner.run(n, arrays)
    samples = []
    for _ in range(runs):
        times = [StepTimes(share.plan) for share in runner.shares]
        runner.run(n, arrays, times)
        samples.append(times)
    nodes = [
        node for share, times in zip(runner.shares, zip(*samples, strict=True), strict=True)
        for node in _nodes(share, n, times)
    ]  # fmt: skip
    return Profile(tuple(nodes), runs, max(share.threads for share in runner.shares))


def _nodes(share: DeviceShare, n: int, samples: Sequence[StepTimes]) -> list[NodeTime]:
    """The median times of all steps and fallbacks of a share, in the order of its plan's schedule."""
    steps = np.median([times.steps for times in samples], axis=0).astype(np.int64).tolist()
    fallbacks = np.median([times.fallbacks for times in samples], axis=0).astype(np.int64).tolist()
    plan, machine, nodes = share.plan, share.peaks(), []
    for entry in plan.schedule:
        if isinstance(entry, Fallback):
            nodes.append(NodeTime(entry.label, entry.op, REFERENCE, (), fallbacks[entry.index], 0, 0, 0))
            continue
        for step, taken in zip(plan.steps[entry.first : entry.last], steps[entry.first : entry.last], strict=True):
            flops, nbytes = step.flops.at(n), step.bytes.at(n)
            least = int(machine.seconds(flops, nbytes, share.threads) * 1e9)
            nodes.append(NodeTime(step.label, step.op, step.at(n).summary, step.outputs, taken, flops, nbytes, least))
    return nodes
