"""The steps of a plan as a device is given them, and the graphs that were captured of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from core.ir.dim import evaluate
from core.ir.types import Dim
from core.runtime.device import Function, Graph, Grid, Stream


class Key(NamedTuple):
    """What a graph is for. `whole`: of a run that nobody is beside, so its copies are in it, too."""

    slot: int
    n: int
    whole: bool


Generations = tuple[int, int]  # of the memory whose addresses a graph holds


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
    """The steps of a plan for one batch size and slot: nothing is left to be computed."""

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
    """A grid without programs, as an empty batch gives it, is no launch."""
    if min(launch.grid) > 0:
        stream.launch(launch.function, launch.grid, launch.addresses, n)


def grid_of(dims: Sequence[Dim], n: int) -> Grid:
    x, y, z = [*(evaluate(dim, {"n": n}) for dim in dims), 1, 1, 1][:3]
    return x, y, z


@dataclass(eq=False)
class Graphs:
    """Captured graphs, the ones not used for longest dropped; and which sizes came how often."""

    limit: int
    made: OrderedDict[Key, tuple[Graph, Generations]] = field(default_factory=OrderedDict)
    seen: OrderedDict[Key, int] = field(default_factory=OrderedDict)

    def find(self, key: Key, generations: Generations) -> Graph | None:
        """A graph of this slot and size, unless its addresses are of memory that is gone."""
        graph, known = self.made.get(key, (None, None))
        if graph is None:
            return None
        if known != generations:
            self.drop(key)
            return None
        self.made.move_to_end(key)
        return graph

    def is_wanted(self, key: Key) -> bool:
        """Whether it is time to capture: once for every size that came twice."""
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
        """It may be captured again later."""
        self.seen.pop(key, None)
        graph, _ = self.made.pop(key, (None, None))
        if graph is not None:
            graph.close()

    def close(self) -> None:
        for key in list(self.made):
            self.drop(key)
