"""The steps of a plan as a device runs them (a tape), and a cache of graphs captured from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lathe.core.ir.dim import evaluate
from lathe.core.ir.types import Dim
from lathe.core.plan.transfers import Boundary
from lathe.core.runtime.device.device import Device, Function, Graph, Grid, Stream


class Key(NamedTuple):
    """The key of a captured graph: a slot, a batch size `n`, and whether the copies from and to the host are in it.

    `whole`: the copies are in the graph, because the run is alone on the device.
    """

    slot: int
    n: int
    whole: bool


Generations = tuple[int, int, int]  # of the blocks of memory whose addresses a graph holds


@dataclass(frozen=True, slots=True)
class Launch:
    function: Function
    grid: Grid
    addresses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    target: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """A copy `into` the memory of the device, or out of it, between steps: see `Transfer` in core/plan/plan.py."""

    into: bool
    device: int
    host: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tape:
    """The kernel launches of a plan, then its copies within the device, for one batch size and slot.

    `moves` happen in the order of `boundaries`, which has an entry before each launch, and one after the last.
    """

    launches: tuple[Launch, ...]
    copies: tuple[Copy, ...]
    n: int
    moves: tuple[Move, ...] = ()
    boundaries: tuple[Boundary, ...] = ()


class Lanes:
    """A stream for the steps, and if a plan has transfers, one for each direction of them, with events between them."""

    def __init__(self, device: Device, work: Stream, transfers: int) -> None:
        self.work = work
        directions = (True, False) if transfers else ()
        self._streams = {into: device.stream() for into in directions}
        self._begun = [device.event() for _ in range(transfers)]
        self._done = [device.event() for _ in range(transfers)]

    def cross(self, boundary: Boundary, moves: Sequence[Move]) -> None:
        """Wait for the moves that end at a boundary, make those that happen there, and start those beside steps."""
        for index in boundary.waits:
            self.work.wait(self._done[index])
        for index in boundary.here:
            _move(self.work, moves[index])
        for index in boundary.starts:
            stream = self._streams[moves[index].into]
            self.work.record(self._begun[index])
            stream.wait(self._begun[index])
            _move(stream, moves[index])
            stream.record(self._done[index])

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        for event in (*self._begun, *self._done):
            event.close()


def _move(stream: Stream, move: Move) -> None:
    if move.into:
        stream.copy_in(move.device, move.host, move.nbytes)
    else:
        stream.copy_out(move.host, move.device, move.nbytes)


def play(tape: Tape, lanes: Lanes) -> None:
    """Submit the launches, moves and copies of a tape."""
    stream = lanes.work
    for index, launch in enumerate(tape.launches):
        if tape.moves:
            lanes.cross(tape.boundaries[index], tape.moves)
        launch_one(launch, tape.n, stream)
    finish(tape, lanes)


def finish(tape: Tape, lanes: Lanes) -> None:
    """Submit what follows the last launch."""
    if tape.moves:
        lanes.cross(tape.boundaries[-1], tape.moves)
    for copy in tape.copies:
        if copy.nbytes:
            lanes.work.copy(copy.target, copy.source, copy.nbytes)


def launch_one(launch: Launch, n: int, stream: Stream) -> None:
    """Launch a kernel. A grid without programs, as for an empty batch, is skipped."""
    if min(launch.grid) > 0:
        stream.launch(launch.function, launch.grid, launch.addresses, n)


def grid_of(dims: Sequence[Dim], n: int) -> Grid:
    x, y, z = [*(evaluate(dim, {"n": n}) for dim in dims), 1, 1, 1][:3]
    return x, y, z


@dataclass(eq=False)
class Graphs:
    """A cache of at most `limit` captured graphs, which closes the least recently used one beyond that.

    It also counts the runs of each key, for the 8 * `limit` keys that ran last.
    """

    limit: int
    made: OrderedDict[Key, tuple[Graph, Generations]] = field(default_factory=OrderedDict)
    seen: OrderedDict[Key, int] = field(default_factory=OrderedDict)

    def find(self, key: Key, generations: Generations) -> Graph | None:
        """The graph of this key; None if there is none.

        None also if memory whose addresses it holds has been reallocated: then the graph is closed and dropped.
        """
        graph, known = self.made.get(key, (None, None))
        if graph is None:
            return None
        if known != generations:
            self.drop(key)
            return None
        self.made.move_to_end(key)
        return graph

    def is_wanted(self, key: Key) -> bool:
        """Count a run of this key; true at its second run, when a graph should be captured."""
        self.seen[key] = self.seen.pop(key, 0) + 1
        if len(self.seen) > 8 * self.limit:
            self.seen.popitem(last=False)
        return self.seen[key] == 2

    def add(self, key: Key, graph: Graph, generations: Generations) -> None:
        self.drop(key)
        self.made[key] = (graph, generations)
        if len(self.made) > self.limit:
            self.drop(next(iter(self.made)))

    def drop(self, key: Key) -> None:
        """Close the graph of a key and forget its count of runs; it may be captured again later."""
        self.seen.pop(key, None)
        graph, _ = self.made.pop(key, (None, None))
        if graph is not None:
            graph.close()

    def close(self) -> None:
        for key in list(self.made):
            self.drop(key)
