"""Thousands of random events on a batcher: whatever happens, no request is lost, answered twice or left waiting."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from lathe.server.batching.mode import TRANSITIONS
from tests.server.batching.mode_check import POLICY_CHANGES, CheckedMode
from tests.server.batching.random_events import RandomEvents

SEEDS = 12
EVENTS = 1_500  # for each seed


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "workers"])
@pytest.mark.sample(2)
def test_every_admitted_request_gets_one_outcome_whatever_happens(inline: bool, checked_mode: CheckedMode) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts += asyncio.run(run_events(seed, inline, checked_mode)).counts
    expected = {"dict", "refused", "rested", "Internal", "DeadlineExceeded", "Shed", "Overloaded"}
    assert expected <= counts.keys(), counts
    assert bool(counts["coalesced"]) is inline, counts


def test_every_transition_between_modes_occurs(checked_mode: CheckedMode) -> None:
    allowed = {(mode, following) for mode in TRANSITIONS for following in TRANSITIONS[mode]}
    for seed in range(100, 140):
        asyncio.run(run_events(seed, seed % 2 == 0, checked_mode))
        if checked_mode.transitions.keys() >= allowed - POLICY_CHANGES:
            break
    assert checked_mode.transitions.keys() >= allowed - POLICY_CHANGES


async def run_events(seed: int, inline: bool, checked_mode: CheckedMode) -> RandomEvents:
    events = RandomEvents(seed, inline, checked_mode.check)
    await events.run(EVENTS)
    return events
