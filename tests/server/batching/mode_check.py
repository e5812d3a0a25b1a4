"""Checks every assignment of a batcher's mode against the table of transitions."""

from __future__ import annotations

from collections import Counter

from lathe.server.batching.batcher import Batcher
from lathe.server.batching.mode import BUSY, DELAYING, IDLE, SCHEDULED, TRANSITIONS, Mode

Transition = tuple[Mode, Mode]

# caused by a change of the number of instances while no request waits, which hardly ever happens at random
POLICY_CHANGES: set[Transition] = {(IDLE, BUSY), (DELAYING, IDLE), (DELAYING, BUSY)}


class CheckedMode:
    """Takes the place of the attribute `mode` of all batchers, and counts transitions.

    Violations are only collected: an exception in a callback of the event loop would not fail a test.
    """

    def __init__(self) -> None:
        self.transitions: Counter[Transition] = Counter()
        self.violations: list[str] = []

    def __get__(self, batcher: Batcher, owner: type[Batcher]) -> Mode:
        mode = batcher.__dict__["mode"]
        assert isinstance(mode, Mode)
        return mode

    def __set__(self, batcher: Batcher, mode: Mode) -> None:
        before = batcher.__dict__.get("mode", mode)
        batcher.__dict__["mode"] = mode
        if mode is before:
            return
        self.transitions[before, mode] += 1
        if mode not in TRANSITIONS[before]:
            self.violations.append(f"{before.name} -> {mode.name}")

    def check(self, batcher: Batcher) -> None:
        """Between two callbacks: a callback is due in the modes that wait for one, and in no others."""
        assert self.violations == []
        assert (batcher._due is not None) is (batcher.mode in (SCHEDULED, DELAYING)), batcher.mode
