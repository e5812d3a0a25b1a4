"""Time per node of one model: a table, and a file for the Chrome trace viewer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeTime:
    """One step: median nanoseconds over the measured runs, and the work it did."""

    label: str
    op: str
    kernel: str
    outputs: tuple[str, ...]
    nanoseconds: int
    flops: int
    bytes: int

    @property
    def gflops(self) -> float:
        """10^9 operations per second."""
        return self.flops / self.nanoseconds if self.nanoseconds else 0.0

    @property
    def gigabytes(self) -> float:
        """10^9 bytes per second of the least memory traffic."""
        return self.bytes / self.nanoseconds if self.nanoseconds else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured steps in the order they ran."""

    nodes: tuple[NodeTime, ...]
    runs: int
    threads: int

    @property
    def total(self) -> int:
        """Nanoseconds of all steps."""
        return sum(node.nanoseconds for node in self.nodes)

    def top(self, count: int = 10) -> tuple[NodeTime, ...]:
        """The steps that took longest."""
        return tuple(sorted(self.nodes, key=lambda node: -node.nanoseconds)[:count])

    def table(self, count: int = 10) -> str:
        """The slowest steps as aligned text."""
        rows = [f"{'us':>9} {'share':>6} {'GFLOP/s':>8} {'GB/s':>7}  node"]
        for node in self.top(count):
            share = node.nanoseconds / self.total if self.total else 0.0
            rows.append(
                f"{node.nanoseconds / 1e3:9.1f} {share:6.1%} {node.gflops:8.1f} {node.gigabytes:7.1f}  "
                f"{node.op} '{node.label}' {node.kernel} -> {', '.join(node.outputs)}"
            )
        what = f"{len(self.nodes)} steps, {self.threads} threads, {self.runs} runs"
        rows.append(f"{self.total / 1e3:9.1f} 100.0%  {what}")
        return "\n".join(rows)

    def chrome_trace(self, path: str | Path) -> None:
        """Write the steps, end to end, in the Trace Event format (chrome://tracing, Perfetto)."""
        events, at = [], 0.0
        for node in self.nodes:
            duration = node.nanoseconds / 1e3
            arguments = {"kernel": node.kernel, "outputs": node.outputs, "gflops": round(node.gflops, 1)}
            events.append({"name": f"{node.op} {node.label}", "ph": "X", "ts": at, "dur": duration, "pid": 0, "tid": 0,
                           "args": arguments})  # fmt: skip
            at += duration
        Path(path).write_text(json.dumps({"traceEvents": events}))
