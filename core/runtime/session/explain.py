"""A report on a plan as text: passes, the kernel of every node with its share of the work, fallbacks, memory.

The share of a node is that of its roofline time: the least time that its operations and bytes take on this machine,
divided by that of all nodes together. "compute" and "memory" name the bound. A line that begins with "&" may run
concurrently with the line above it, on other threads.
"""

from __future__ import annotations

from collections.abc import Iterator

from lathe.core.plan.liveness import TYPICAL_SIZE
from lathe.core.plan.plan import Fallback, Plan, Region, Step
from lathe.core.runtime.host.machine import Peaks

_BAR = 48  # characters for the lifetime of a region


def explain_plan(plan: Plan, n: int, peaks: Peaks, device: str = "cpu") -> list[str]:
    """The lines of the report for a batch of `n` rows, or for typical sizes if the plan has dynamic ones.

    `peaks`: the rates of one CPU thread, or of a whole device.
    """
    of = f"sizes of {TYPICAL_SIZE}" if plan.sizes else f"n = {n}"
    where = f"{of}; one thread" if device == "cpu" else f"{of}; {device}"
    compiled = f"steps: {len(plan.steps)} compiled, {len(plan.fallbacks.nodes)} on the reference"
    return [
        *(["passes:", *(f"  {line}" for line in plan.log)] if plan.log else []),
        f"kernels ({where}: {peaks.flops / 1e9:.0f} GFLOP/s, {peaks.bandwidth / 1e9:.0f} GB/s):",
        *_schedule(plan, n, peaks),
        f"memory: {plan.memory}",
        *_memory_map(plan.regions, plan.address_rows(n)),
        compiled,
    ]


def _schedule(plan: Plan, n: int, peaks: Peaks) -> Iterator[str]:
    total = sum(_roofline_seconds(step, n, peaks) for step in plan.steps)
    for entry in plan.schedule:
        if isinstance(entry, Fallback):
            yield f"  {entry.op:20s} {entry.label:28s} FALLBACK to the reference: {entry.reason}"
        else:
            beside = False
            for step in plan.steps[entry.first : entry.last]:
                yield f"{'&' if beside else ' '} {_step(step.at(n), n, peaks, total)}"
                beside = not step.has_barrier


def _step(step: Step, n: int, peaks: Peaks, total: float) -> str:
    flops, nbytes = step.flops.at(n), step.bytes.at(n)
    share = _roofline_seconds(step, n, peaks) / total if total else 0.0
    work = f"{_scaled(flops, 'FLOP'):>12s} {_scaled(nbytes, 'B'):>10s} {peaks.limit(flops, nbytes):7s} {share:6.1%}"
    return f"{step.op:20s} {step.label:28s} {step.summary:36s} {work} -> {', '.join(step.outputs)}"


def _roofline_seconds(step: Step, n: int, peaks: Peaks) -> float:
    return peaks.seconds(step.flops.at(n), step.bytes.at(n))


def _memory_map(regions: tuple[Region, ...], n: int) -> Iterator[str]:
    """A line per region of the arena, by address: offset, size, lifetime as a bar, and the values in it."""
    positions = max((region.last for region in regions), default=0) + 1
    for region in sorted(regions, key=lambda region: (region.offset.at(n), region.first)):
        first = region.first * _BAR // positions
        after = max((region.last + 1) * _BAR // positions, first + 1)
        life = "." * first + "#" * (after - first) + "." * (_BAR - after)
        holds = ", ".join(region.values) or "scratch"
        yield f"  {region.offset.at(n):>10d} +{region.size.at(n):<10d} {life} {holds}"


def _scaled(value: float, unit: str) -> str:
    """A number as text with a unit prefix, such as `1.5 MFLOP`: at most three digits before the point up to G."""
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.0f} {unit}" if not prefix else f"{value:.1f} {prefix}{unit}"
        value /= 1000
    return f"{value:.1f} T{unit}"
