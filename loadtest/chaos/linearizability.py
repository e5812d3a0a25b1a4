"""Linearizability check: can a history of reads and writes be that of one register? (Herlihy and Wing, 1990)

The search is Wing and Gong's ("Testing and Verifying Concurrent Objects", 1993): it linearizes operations one by one,
each at a moment between its call and its answer. Configurations that were met before are not searched again. An
operation is linearized no earlier than at the answer of an operation that needs it (Lowe, "Testing for
Linearizability", 2017). So the memory grows with the number of concurrent operations, not with the length of the
history.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ANY = -1  # the value of a write whose value is unknown
Value = int | None  # None: never written


@dataclass(frozen=True, slots=True)
class Entry:
    """A read or a write. An optional one took effect before `end`, or never."""

    invoked: float
    end: float
    value: Value
    writes: bool
    optional: bool = False
    said: str = ""  # description for reports of violations


@dataclass(frozen=True, slots=True)
class Violation:
    """The first answer that no order of the operations can explain."""

    entry: Entry
    values: tuple[Value, ...]  # possible values of the register before it
    pending: tuple[Entry, ...]  # operations in flight at its end

    def __str__(self) -> str:
        under_way = "; ".join(entry.said for entry in self.pending) or "none"
        return f"{self.entry.said}: the register may have been {list(self.values)}; under way: {under_way}"


Config = tuple[Value, frozenset[int]]  # the register, and which of the pending operations have taken effect


def find_violation(entries: Sequence[Entry]) -> Violation | None:
    """The first violation of linearizability, None if there is none. The register is unset at first."""
    pending: dict[int, Entry] = {}
    configs: set[Config] = {(None, frozenset())}
    for index, is_end in _events(entries):
        entry = entries[index]
        if not is_end:
            pending[index] = entry
            configs = {_settle(config, {index: entry}) for config in configs}
            continue
        reached = {found for config in configs for found in _until(index, config, pending)}
        if not reached and not entry.optional:
            values = tuple(sorted({value for value, _ in configs}, key=str))
            return Violation(entry, values, tuple(pending.values()))
        configs = reached | configs if entry.optional else reached
        del pending[index]
        configs = {(value, done - {index}) for value, done in configs}
    return None


def _events(entries: Sequence[Entry]) -> Iterator[tuple[int, bool]]:
    """(index, is_end) of calls and answers in order of time. At equal times calls come first, so both are in flight."""
    events = [(entry.invoked, False, False, index) for index, entry in enumerate(entries)]
    events += [(entry.end, True, entry.optional, index) for index, entry in enumerate(entries) if entry.end < math.inf]
    for _, is_end, _, index in sorted(events):
        yield index, is_end


def _settle(config: Config, pending: dict[int, Entry]) -> Config:
    """Linearize every pending read of the current value; doing it at once is always safe."""
    value, done = config
    seen = {i for i, entry in pending.items() if not entry.writes and entry.value == value and i not in done}
    return (value, done | seen) if seen else config


def _until(index: int, config: Config, pending: dict[int, Entry]) -> Iterator[Config]:
    """All configurations reachable from `config` in which operation `index` has taken effect."""
    found, todo = {config}, [config]
    while todo:
        config = todo.pop()
        if index in config[1]:
            yield config
            continue
        for following in _steps(config, pending):
            if following not in found:
                found.add(following)
                todo.append(following)


def _steps(config: Config, pending: dict[int, Entry]) -> Iterator[Config]:
    """The successors of a configuration: after one more write, or after a read that fixes an unknown value."""
    value, done = config
    for i, entry in pending.items():
        if i in done:
            continue
        if entry.writes:
            yield _settle((entry.value, done | {i}), pending)
        elif value == ANY and entry.value is not None:
            yield _settle((entry.value, done), pending)
