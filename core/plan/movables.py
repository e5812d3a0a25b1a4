"""What may wait in the memory of the host between two uses: buffers of the arena, and weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.graph import Node, Value, node_reads
from lathe.core.plan.liveness import Affine, Buffer, align_size
from lathe.core.plan.plan import WEIGHTS, Plan, Step, WeightItem, exact_affine
from lathe.core.plan.storage import Storage
from lathe.core.plan.transfers import Rates

Times = NDArray[np.int64]  # one number for each time of the plan, the last one for the end of the run


@dataclass(eq=False, slots=True)
class Movable:
    """Bytes that are needed at the times `uses`, ascending, and may be elsewhere between two of them.

    They are a buffer of the arena, or an item of the weight block, which is on the host at the start of a run. Kernels
    write them at the times `writes`. `size`: the memory for them, `copied`: the bytes of a copy.
    """

    values: tuple[Value, ...]
    size: Affine
    copied: Affine
    uses: tuple[int, ...]
    writes: tuple[int, ...] = ()
    buffer: Buffer | None = None
    item: WeightItem | None = None

    @property
    def resident(self) -> int:
        """The bytes of the weight block for a weight that stays there."""
        return align_size(self.copied).b

    @property
    def name(self) -> str:
        return self.values[0].name if self.values else "table"

    @property
    def key(self) -> Buffer | int:
        """What identifies it in a plan without a limit: its buffer, or the offset of the item in the weight block."""
        if self.item is not None:
            return self.item.offset
        assert self.buffer is not None
        return self.buffer

    @property
    def is_weight(self) -> bool:
        return self.item is not None

    def is_written(self, first: int, last: int) -> bool:
        """Whether a kernel writes the bytes at a time from `first` to `last`."""
        return any(first <= time <= last for time in self.writes)


@dataclass(frozen=True)
class MemoryLimit:
    """The most bytes that weights and arena of a plan may take for batches of `rows`, with rates for forecasts."""

    nbytes: int
    rows: int
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class SwapProblem:
    """A plan whose weights and arena exceed a limit: what may move, what needs memory anyway, and when.

    `buffers`, `weights`: the movables. `scratch`: buffers that are live at one time each. `pinned`: bytes of the weight
    block that must stay on the device. `nodes`: the node of every time, and `seconds` its forecast time.
    """

    buffers: tuple[Movable, ...]
    weights: tuple[Movable, ...]
    scratch: tuple[Buffer, ...]
    pinned: int
    nodes: tuple[Node, ...]
    seconds: tuple[float, ...]
    steps_before: tuple[int, ...]  # by time: the number of steps before it
    limit: MemoryLimit

    @property
    def end(self) -> int:
        """The time after all nodes."""
        return len(self.nodes)

    @cached_property
    def clock(self) -> NDArray[np.float64]:
        """The seconds from the start of the run to each time, without transfers."""
        return np.concatenate([[0.0], np.cumsum(self.seconds)])

    def bytes_of(self, size: Affine) -> int:
        return size.at(self.limit.rows)

    def needs(self, movables: Iterable[Movable]) -> Loads:
        """The bytes that are needed at each time if everything is elsewhere between its uses."""
        loads = Loads.of(self)
        for each in movables:
            for time in each.uses:
                loads.add(each.size, time, time)
        return loads


class Loads:
    """The bytes of the arena that are live at each time, for the batch size of the limit."""

    def __init__(self, problem: SwapProblem) -> None:
        self._rows = problem.limit.rows
        self.at: Times = np.zeros(problem.end + 1, np.int64)

    @classmethod
    def of(cls, problem: SwapProblem) -> Loads:
        """The loads of scratch memory alone."""
        loads = cls(problem)
        for buffer in problem.scratch:
            loads.add(buffer.size, buffer.first, buffer.last)
        return loads

    def add(self, size: Affine, first: int, last: int, sign: int = 1) -> None:
        """Add a buffer that is live from `first` to `last`; with `sign` -1, remove it."""
        self.at[first : last + 1] += sign * size.at(self._rows)

    @property
    def peak(self) -> int:
        return int(self.at.max())

    def fits(self, size: Affine, time: int, limit: int) -> bool:
        """Whether the load stays within `limit` if a buffer of this size is live at `time`, too."""
        return int(self.at[time]) + size.at(self._rows) <= limit


def swap_problem(storage: Storage, steps: Sequence[Step], plan: Plan, limit: MemoryLimit) -> SwapProblem:
    """The problem of a plan as it was made without a limit. `steps` and `plan` have the addresses of its operands.

    All buffers become proportional to n (`size_by_rows`).
    """
    for buffer in storage.buffers:
        buffer.size = size_by_rows(buffer.size, limit.rows)
    choice, nodes = storage.choice, tuple(storage.choice.nodes)
    calls = [node for node in nodes if node in choice.calls]
    seconds = dict(zip(calls, (_seconds(step, limit) for step in steps), strict=True))
    before = np.concatenate([[0], np.cumsum([node in choice.calls for node in nodes], dtype=np.int64)])
    uses = _weight_uses(storage, calls, steps)
    fixed = {address.offset.b for address, _ in plan.value_addresses.values() if address.base == WEIGHTS}
    items = [(item, value) for (value, _), item in storage.weights.by_key.items() if item.nbytes]
    weights = tuple(
        _weight(item, value, sorted(uses[item.offset]), limit.rows)
        for item, value in items
        if _may_move(item, uses, fixed)
    )
    return SwapProblem(
        buffers=tuple(_buffers(storage)),
        weights=weights,
        scratch=tuple(storage.scratch.values()),
        pinned=plan.weights - sum(each.resident for each in weights),
        nodes=nodes,
        seconds=tuple(seconds.get(node, 0.0) for node in nodes),
        steps_before=tuple(before.tolist()),
        limit=limit,
    )


def _may_move(item: WeightItem, uses: Mapping[int, set[int]], fixed: set[int]) -> bool:
    """Whether steps alone read the item: what is copied to an output at the end must stay."""
    return item.offset in uses and not any(item.offset <= at < item.offset + item.nbytes for at in fixed)


def _seconds(step: Step, limit: MemoryLimit) -> float:
    return limit.rates.step_seconds(step.flops.at(limit.rows), step.bytes.at(limit.rows))


def _weight(item: WeightItem, value: Value, uses: Sequence[int], rows: int) -> Movable:
    nbytes = Affine(b=item.nbytes)
    return Movable((value,), size_by_rows(nbytes, rows), nbytes, tuple(uses), item=item)


def size_by_rows(size: Affine, rows: int) -> Affine:
    """The size of a buffer that holds `size` bytes for n >= `rows`: proportional to n.

    So all buffers of a plan grow alike, and share memory for n = `rows` as if nothing depended on n.
    """
    return align_size(size) if size.a else align_size(Affine(a=-(-size.b // rows)))


def _weight_uses(storage: Storage, calls: Sequence[Node], steps: Sequence[Step]) -> dict[int, set[int]]:
    """The times at which steps read each item of the weight block, by its offset."""
    found: dict[int, set[int]] = {}
    for node, step in zip(calls, steps, strict=True):
        for operand in step.operands:
            if operand.base == WEIGHTS:
                item = storage.weights.item_at(operand.offset.b)
                found.setdefault(item.offset, set()).add(storage.times[node])
    return found


def _buffers(storage: Storage) -> Iterator[Movable]:
    """Yield the buffers of the arena that hold values, with the times at which kernels read or write them."""
    reads: dict[Buffer, set[int]] = {buffer: set() for buffer in storage.buffers if buffer.values}
    writes: dict[Buffer, set[int]] = {buffer: {buffer.first} for buffer in reads}

    def note(values: Iterable[Value], time: int, found: dict[Buffer, set[int]]) -> None:
        for value in values:
            place = storage.places.get(value)
            if place is not None and place.buffer is not None:
                found[place.buffer].add(time)

    for node in storage.choice.calls:
        note(node_reads(node), storage.times[node], reads)
        note(node.outputs, storage.times[node], writes)
    note(storage.graph.live_outs(), len(storage.choice.nodes), reads)
    for buffer in reads:
        uses = tuple(sorted(reads[buffer] | writes[buffer]))
        yield Movable(tuple(buffer.values), buffer.size, _bytes_of(buffer), uses, tuple(writes[buffer]), buffer)


def _bytes_of(buffer: Buffer) -> Affine:
    """The bytes of the values in a buffer, without the padding of the buffer's size."""
    sizes = {exact_affine(value.tensor.nbytes) for value in buffer.values}
    size = next(iter(sizes))
    return size if len(sizes) == 1 and size is not None else buffer.size
