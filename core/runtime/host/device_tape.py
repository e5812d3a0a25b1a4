"""The steps of a plan as a device runs them (a tape), and a cache of graphs captured from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lathe.core.ir.dim import evaluate
from lathe.core.ir.types import Dim
from lathe.core.runtime.device.device import Function, Graph, Grid, Stream


class Key(NamedTuple):
    """The key of a captured graph: a slot, a batch size `n`, and whether the copies from and to the host are in it.

    `whole`: the copies are in the graph, because the run is alone on the device.
    """

    slot: int
    n: int
    whole: bool


Generations = tuple[int, int]  # of the two blocks of memory whose addresses a graph holds


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
class Tape:
    """The kernel launches of a plan, then its copies within the device, for one batch size and slot."""

    launches: tuple[Launch, ...]
    copies: tuple[Copy, ...]
    n: int


def play(tape: Tape, stream: Stream) -> None:
    for launch in tape.launches:
        launch_one(launch, tape.n, stream)
    for copy in tape.copies:
        if copy.nbytes:
            stream.copy(copy.target, copy.source, copy.nbytes)


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
