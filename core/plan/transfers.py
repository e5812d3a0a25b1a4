"""The copies between the arena and the host that a run makes, their order, and a forecast of their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lathe.core.byte_sizes import format_bytes
from lathe.core.plan.plan import ARENA, Plan, Transfer

COPY_BANDWIDTH = 20e9  # bytes per second between host and device
_COPY_SECONDS = 5e-6  # the least time of a copy between two steps


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates by which times are forecast: operations and bytes per second of the device, and bytes of copies."""

    flops: float = 1e13
    bandwidth: float = 1e12
    copies: float = COPY_BANDWIDTH

    def step_seconds(self, flops: int, nbytes: int) -> float:
        """The least time of a step, by the roofline model."""
        return max(flops / self.flops, nbytes / self.bandwidth)

    def copy_seconds(self, nbytes: int) -> float:
        return _COPY_SECONDS + nbytes / self.copies


@dataclass(slots=True)
class Boundary:
    """The transfers between two steps, by index: first those to wait for, then those that happen here, then starts."""

    waits: list[int] = field(default_factory=list)
    here: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


def boundaries(spans: Sequence[tuple[int, int]], steps: int) -> list[Boundary]:
    """The `Boundary` before each of the steps, and the one after the last. `spans`: begin and end of the transfers."""
    found = [Boundary() for _ in range(steps + 1)]
    for index, (begin, end) in enumerate(spans):
        if begin == end:
            found[begin].here.append(index)
        else:
            found[begin].starts.append(index)
            found[end].waits.append(index)
    return found


def elapsed(steps: Sequence[float], spans: Sequence[tuple[int, int]], copies: Sequence[tuple[bool, float]]) -> float:
    """The seconds of a run whose steps take `steps` seconds.

    `copies`: for each transfer whether it goes into the arena, and its seconds. The copies of one direction happen one
    after the other, beside those of the other direction and beside steps.
    """
    clock, free, done = 0.0, {True: 0.0, False: 0.0}, [0.0] * len(copies)
    for step, boundary in enumerate(boundaries(spans, len(steps))):
        clock = max([clock, *(done[index] for index in boundary.waits)])
        clock += sum(copies[index][1] for index in boundary.here)
        for index in boundary.starts:
            into, seconds = copies[index]
            free[into] = done[index] = max(free[into], clock) + seconds
        clock += steps[step] if step < len(steps) else 0.0
    return clock


def transfers_at(plan: Plan, n: int) -> list[Transfer]:
    """The transfers of a batch of `n`, in order: those with bytes that a kernel for this batch size uses."""
    return [
        each for each in plan.transfers if each.nbytes.at(n) > 0 and (_is_value(each, plan) or _is_used(each, plan, n))
    ]


def _is_value(transfer: Transfer, plan: Plan) -> bool:
    return transfer.host.base == plan.swap_base


def _is_used(transfer: Transfer, plan: Plan, n: int) -> bool:
    """Whether a step reads the weight that is copied in: a step may have several kernels, with different weights."""
    steps = plan.steps[transfer.end : transfer.last + 1]
    at, nbytes, rows = transfer.arena.at(plan.address_rows(n)), transfer.nbytes.at(n), plan.address_rows(n)
    operands = (operand for step in steps for operand in step.at(n).operands if operand.base == ARENA)
    return any(0 <= operand.offset.at(rows) - at < nbytes for operand in operands)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The transfers of a run by direction, and its seconds with them (`whole`) and without them (`steps`)."""

    n: int
    copies_in: int
    bytes_in: int
    copies_out: int
    bytes_out: int
    whole: float
    steps: float
    bandwidth: float

    def __str__(self) -> str:
        return (
            f"swapping (n = {self.n}): {self.copies_in} copies in ({format_bytes(self.bytes_in)}), {self.copies_out} "
            f"copies out ({format_bytes(self.bytes_out)}) per run; at {self.bandwidth / 1e9:.0f} GB/s the steps take "
            f"{self.whole * 1e6:.1f} us with them, {self.steps * 1e6:.1f} us without"
        )


def forecast(plan: Plan, n: int, rates: Rates) -> Forecast:
    """What the transfers of a batch of `n` will be, and what time they will take."""
    moved = transfers_at(plan, n)
    steps = [rates.step_seconds(step.flops.at(n), step.bytes.at(n)) for step in plan.steps]
    copies = [(each.into, rates.copy_seconds(each.nbytes.at(n))) for each in moved]
    spans = [(each.begin, each.end) for each in moved]
    inward, outward = ([each.nbytes.at(n) for each in moved if each.into is into] for into in (True, False))
    whole = elapsed(steps, spans, copies)
    return Forecast(n, len(inward), sum(inward), len(outward), sum(outward), whole, sum(steps), rates.copies)


def swapping_lines(plan: Plan, n: int, rates: Rates) -> list[str]:
    """For people: the forecast for a batch of `n`, and a line for each transfer; empty for a plan without transfers."""
    if not plan.transfers:
        return []
    names = [*(step.label for step in plan.steps), "the end"]
    return [str(forecast(plan, n, rates)), *(_line(each, names, n) for each in transfers_at(plan, n))]


def _line(transfer: Transfer, names: Sequence[str], n: int) -> str:
    begin, end = names[transfer.begin], names[transfer.end]
    when = f"before {end}" if transfer.begin == transfer.end else f"from {begin} to {end}"
    way = "in" if transfer.into else "out"
    return f"  {way:3s} %{transfer.name}: {format_bytes(transfer.nbytes.at(n))}, {when}"
