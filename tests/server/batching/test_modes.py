"""The modes of a batcher, event by event; `test_random_events.py` causes the same transitions in random order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lathe.server.batching.batcher import Batcher
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.inline_budget import InlineBudget
from lathe.server.batching.mode import BUSY, DELAYING, FORMING, IDLE, SCHEDULED
from lathe.server.batching.policy import BatchPolicy
from tests.server.batching.mode_check import POLICY_CHANGES, CheckedMode
from tests.server.batching.random_events import MAX_BATCH, RandomEvents, Request
from tests.server.running import rows

LONG = 5.0  # seconds; a delay that these tests never wait for


class Stepped:
    """A batcher whose workers continue when they are told to."""

    def __init__(self, inline: bool = False) -> None:
        self.events = RandomEvents(seed=0, inline=inline)
        self.batcher: Batcher = self.events.batcher
        self.answered = 0

    def submit(self) -> Entry:
        x = {"x": rows(1)}
        entry = Entry(x, self.events.signature.group_of(x), lambda outcome: self.count())
        self.batcher.submit(entry)
        return entry

    def count(self) -> None:
        self.answered += 1

    async def run_worker(self) -> None:
        """Let the first worker execute a batch, or end."""
        self.events.pool.step(0)
        await asyncio.sleep(0)


def run(scenario: Callable[[Stepped], Awaitable[None]], inline: bool = False) -> None:
    async def main() -> None:
        await scenario(Stepped(inline))

    asyncio.run(main())


def test_a_request_is_scheduled_and_then_occupies_the_version() -> None:
    async def scenario(stepped: Stepped) -> None:
        batcher = stepped.batcher
        assert batcher.mode is IDLE
        stepped.submit()
        assert batcher.mode is SCHEDULED
        await asyncio.sleep(0)
        assert batcher.mode is BUSY
        await stepped.run_worker()
        assert (batcher.mode, stepped.answered) == (BUSY, 1)
        await stepped.run_worker()
        assert batcher.mode is IDLE

    run(scenario)


def test_a_busy_batcher_forms_a_batch_only_if_that_is_full() -> None:
    async def scenario(stepped: Stepped) -> None:
        batcher = stepped.batcher
        stepped.submit()
        await asyncio.sleep(0)
        await stepped.run_worker()
        for _ in range(MAX_BATCH - 1):
            stepped.submit()
        assert batcher.mode is BUSY
        stepped.submit()
        assert batcher.mode is SCHEDULED
        await asyncio.sleep(0)
        assert (batcher.mode, len(batcher.queue)) == (BUSY, 0)
        await stepped.run_worker()
        assert stepped.answered == 1 + MAX_BATCH

    run(scenario)


def test_a_delay_ends_when_the_policy_changes() -> None:
    async def scenario(stepped: Stepped) -> None:
        batcher = stepped.batcher
        batcher.configure(BatchPolicy(max_delay=LONG))
        stepped.submit()
        await asyncio.sleep(0)
        assert batcher.mode is DELAYING
        batcher.configure(BatchPolicy())
        assert batcher.mode is SCHEDULED
        await asyncio.sleep(0)
        assert batcher.mode is BUSY

    run(scenario)


def test_a_policy_that_changes_while_no_request_waits_makes_a_batcher_idle_or_busy(checked_mode: CheckedMode) -> None:
    async def scenario(stepped: Stepped) -> None:
        batcher = stepped.batcher
        batcher.configure(BatchPolicy(instances=2))
        stepped.submit()
        await asyncio.sleep(0)
        assert batcher.mode is IDLE  # one more batch may run
        batcher.configure(BatchPolicy())
        assert batcher.mode is BUSY
        for instances, mode in ((2, IDLE), (1, BUSY)):
            batcher.configure(BatchPolicy(max_delay=LONG, instances=2))
            leaving = stepped.submit()
            await asyncio.sleep(0)
            assert batcher.mode is DELAYING
            batcher.cancel(leaving)
            batcher.configure(BatchPolicy(instances=instances))
            assert batcher.mode is mode

    run(scenario)
    assert checked_mode.transitions.keys() >= POLICY_CHANGES


@pytest.fixture
def _always_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InlineBudget, "allows", lambda budget, rows: True)


@pytest.mark.usefixtures("_always_inline")
def test_a_request_that_comes_while_a_coalesced_batch_is_answered_runs() -> None:
    async def scenario(stepped: Stepped) -> None:
        batcher, coalesced = stepped.batcher, stepped.events.coalesced

        def take(request: Request, outcome: Outcome) -> None:
            stepped.submit()
            assert batcher.mode is FORMING

        stepped.events.on_outcome = take  # type: ignore[method-assign]
        coalesced.join(Request(rows(1)))
        await asyncio.sleep(0)
        assert batcher.mode is SCHEDULED
        await asyncio.sleep(0)
        assert (batcher.mode, stepped.answered) == (IDLE, 1)

    run(scenario, inline=True)


@pytest.mark.usefixtures("_always_inline")
def test_an_answer_may_cancel_another_request_of_its_batch() -> None:
    """As a pipeline does whose first branch has failed: the other request has left the queue already."""

    async def scenario(stepped: Stepped) -> None:
        batcher = stepped.batcher
        entries = [stepped.submit() for _ in range(2)]
        entries[0].done = lambda outcome: batcher.cancel(entries[1])
        await asyncio.sleep(0)
        assert (batcher.admission.items, len(batcher.queue), batcher.queue.rows) == (0, 0, 0)
        assert stepped.answered == 0
        assert batcher.stats.cancelled == 1

    run(scenario, inline=True)


def test_a_refusal_may_cancel_another_request_that_is_refused_with_it() -> None:
    async def scenario(stepped: Stepped) -> None:
        batcher = stepped.batcher
        entries = [stepped.submit() for _ in range(2)]
        entries[0].done = lambda outcome: batcher.cancel(entries[1])
        for entry in entries:
            entry.deadline = 0.0  # long ago
        await asyncio.sleep(0)
        assert (batcher.admission.items, len(batcher.queue), batcher.queue.rows) == (0, 0, 0)
        assert stepped.answered == 0
        assert batcher.mode is IDLE

    run(scenario)


def test_after_an_error_the_next_request_forms_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stepped: Stepped) -> None:
        batcher, former = stepped.batcher, stepped.batcher._former
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

        def fail(wait: float) -> list[Entry]:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(former, "form", fail)
            stepped.submit()
            await asyncio.sleep(0)
        assert (batcher.mode, len(batcher.queue)) == (IDLE, 1)
        stepped.submit()
        await asyncio.sleep(0)
        assert (batcher.mode, len(batcher.queue)) == (BUSY, 0)
        await stepped.run_worker()
        assert stepped.answered == 2

    run(scenario)
