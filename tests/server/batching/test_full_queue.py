"""A full queue is shared fairly: a client below its share displaces the newest request of the client with the most."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.batching.admission import Admission
from lathe.server.batching.admission_control import AdmissionControl
from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.entry import WAITING, Entry, Outcome
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.queue import Queue
from lathe.server.batching.signature import BatchGroup
from lathe.server.errors import Overloaded
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import Statistics, StatsBook
from lathe.server.types import ModelRef
from tests.server.fakes import FakeModel, doubler
from tests.server.running import infer_request, rows, serving, wait_for


class OccupiedModel:
    """A model whose worker is occupied by one request, so that all others wait."""

    def __init__(self, queue_items: int = 8, queue_bytes: int = 1 << 20) -> None:
        self.model: FakeModel = doubler(max_batch=4)
        self.pool = WorkerPool(1)
        settings = Settings(inline_budget_us=0, queue_items=queue_items, queue_bytes=queue_bytes)
        self.servable: Servable = ServableFactory(settings, self.pool, StatsBook()).make(ModelRef("m", 1), self.model)
        self.outcomes: list[tuple[str, int, Outcome]] = []
        self.count = 0

    async def start(self) -> None:
        self.model.gate.clear()
        self.submit("first")
        await asyncio.to_thread(self.model.entered.wait, 20)

    def submit(self, client: str, count: int = 1, priority: int = 0) -> None:
        x, self.count = {"x": rows(count)}, self.count + 1
        number = self.count

        def done(outcome: Outcome) -> None:
            self.outcomes.append((client, number, outcome))

        entry = Entry(x, self.servable.signature.group_of(x), done, None, priority)
        entry.client = client
        self.servable.submit(entry)

    @property
    def displaced(self) -> list[tuple[str, int]]:
        return [(client, number) for client, number, outcome in self.outcomes if isinstance(outcome, Overloaded)]

    async def end(self) -> Counter[str]:
        """Open the gate; return the number of answered requests of each client."""
        self.model.gate.set()
        await self.servable.batcher.drained()
        await asyncio.to_thread(self.pool.close)
        return Counter(client for client, _, outcome in self.outcomes if isinstance(outcome, dict))


def test_one_client_may_fill_the_queue_and_another_still_gets_its_share() -> None:
    async def scenario() -> None:
        held = OccupiedModel(queue_items=13)
        await held.start()
        for _ in range(12):
            held.submit("a")
        with pytest.raises(Overloaded, match="the queue is full"):
            held.submit("a")
        for _ in range(6):
            held.submit("b")
        assert held.displaced == [("a", number) for number in (13, 12, 11, 10, 9, 8)]
        with pytest.raises(Overloaded, match="the queue is full"):
            held.submit("b")
        for _ in range(2):
            held.submit("c")
        lost = Counter(client for client, _ in held.displaced)
        assert lost == {"a": 7, "b": 1}
        assert held.servable.in_flight == 13
        answered = await held.end()
        assert sum(answered.values()) == 13
        assert answered["c"] == 2

    asyncio.run(scenario())


def test_bytes_are_shared_like_places() -> None:
    async def scenario() -> None:
        size = rows(1).nbytes
        held = OccupiedModel(queue_bytes=29 * size, queue_items=100)
        await held.start()
        for _ in range(7):
            held.submit("a", 4)
        with pytest.raises(Overloaded):
            held.submit("a")
        held.submit("b", 4)
        held.submit("b", 4)
        held.submit("b", 4)
        assert held.displaced == [("a", 8), ("a", 7), ("a", 6)]
        with pytest.raises(Overloaded):
            held.submit("b", 4)
        assert await held.end() == {"first": 1, "a": 4, "b": 3}

    asyncio.run(scenario())


def test_the_least_urgent_request_is_displaced_first() -> None:
    async def scenario() -> None:
        held = OccupiedModel(queue_items=5)
        held.servable.configure(BatchPolicy(priority_levels=3, default_priority=2))
        await held.start()
        for priority in (3, 3, 1, 1):
            held.submit("a", priority=priority)
        held.submit("b", priority=3)
        held.submit("b", priority=3)
        assert held.displaced == [("a", 3), ("a", 2)]
        assert await held.end() == {"first": 1, "a": 2, "b": 2}

    asyncio.run(scenario())


def test_a_displaced_request_of_many_rows_fails_as_a_whole() -> None:
    """Its parts are queued one by one; displacing one ends all."""

    async def scenario() -> None:
        held = OccupiedModel(queue_items=5)
        await held.start()
        held.submit("a", 16)
        held.submit("b")
        assert held.displaced == [("a", 2)]
        assert held.servable.in_flight == 2
        assert await held.end() == {"first": 1, "b": 1}

    asyncio.run(scenario())


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(20))
def test_batches_and_counts_agree_with_the_queue_after_any_sequence_of_events(seed: int) -> None:
    chance, queue = random.Random(seed), Queue()
    waiting: list[Entry] = []
    clock = 0.0
    for _ in range(1500):
        clock += 1
        match chance.randrange(6):
            case 0 | 1 | 2:
                group = BatchGroup(1, ((chance.randrange(2),),), 1)
                if chance.random() < 0.1:
                    group = BatchGroup(0, group.key, 1, True)  # runs alone; on a model that packs, all keys are equal
                entry = Entry({}, group, lambda outcome: None)
                entry.client, entry.since, entry.nbytes = chance.choice("abcd"), clock, chance.randrange(100)
                entry.priority = chance.randrange(2)
                queue.push(entry)
                waiting.append(entry)
            case 3:
                most = chance.randrange(1, 5)
                taken = queue.take(most, clock)
                assert len(taken) == 1 or all(entry.group.rows for entry in taken)
                assert len({entry.group.key for entry in taken}) == bool(taken)
                assert len(taken) <= most
                back = taken[chance.randrange(len(taken) + 1) :]
                queue.put_back(back)
                waiting = [entry for entry in waiting if entry not in taken or entry in back]
            case 4 if waiting:
                gone = waiting.pop(chance.randrange(len(waiting)))
                gone.abandon()
                queue.forget(gone)
            case 5 if len({entry.client for entry in waiting}) > 1:
                admission: Any = SimpleNamespace(max_items=0, max_bytes=0, missing=lambda nbytes: (0, 0))
                queue.is_entitled("nobody", 0, admission)
                by_bytes = chance.random() < 0.5
                entry_found = queue.entry_to_drop(by_bytes=by_bytes)
                held = Counter[str]()
                for entry in waiting:
                    held[entry.client] += entry.nbytes if by_bytes else 1
                if entry_found is not None:
                    assert held[entry_found.client] == max(held.values())
                    assert entry_found in waiting
                    waiting.remove(entry_found)
                    entry_found.abandon()
                    queue.forget(entry_found)
        assert len(queue) == len(waiting)
        if queue._client is None and waiting:
            counted = Counter(entry.client for entry in waiting)
            assert {client: own[0] for client, own in queue._backlog._clients.items()} == counted
        assert all(entry.state is WAITING for entry in queue)


def test_a_request_that_runs_alone_gets_no_less_urgent_companion() -> None:
    queue = Queue()
    for priority, group in ((1, BatchGroup(0, (), 1, True)), (2, BatchGroup(1, (), 1))):
        entry = Entry({}, group, lambda outcome: None, priority=priority)
        queue.push(entry)
    assert [entry.priority for entry in queue.take(32, 0.0)] == [1]
    assert [entry.priority for entry in queue.take(32, 0.0)] == [2]


def test_a_request_is_counted_as_refused_if_no_room_can_be_made() -> None:
    """Requests that were taken and put back cannot be dropped any more, although their client has most of the queue."""
    held, stats = Queue(), Statistics(ModelRef("m", 1))
    admission = Admission(4, 1 << 20)
    control = AdmissionControl(admission, held, CostModel(), SimpleNamespace(remaining=lambda now: 0.0), stats)  # type: ignore[arg-type]
    for client in "aaab":
        entry = Entry({}, BatchGroup(1, (), 1), lambda outcome: None)
        entry.client = client
        control.admit(entry, 0.0)
        held.push(entry)
    held.put_back(held.take(4, 0.0))
    late = Entry({}, BatchGroup(1, (), 1), lambda outcome: None)
    late.client = "c"
    with pytest.raises(Overloaded, match="the queue is full"):
        control.admit(late, 0.0)
    assert stats.failures == {"overloaded": 1}
    assert (stats.fail.count, admission.items) == (1, 4)


@pytest.mark.parametrize("seed", range(10))
def test_no_request_is_displaced_in_vain(seed: int) -> None:
    """A client below its share finds room; a client at or below its share is never displaced."""

    async def scenario() -> None:
        chance, held = random.Random(seed), OccupiedModel(queue_items=12, queue_bytes=rows(1).nbytes * 24)
        await held.start()
        admission: Admission = held.servable.batcher.admission
        for _ in range(300):
            client, count = chance.choice("aaaabcde"), chance.randrange(1, 5)
            before, lost = Counter(entry.client for entry in held.servable.batcher.queue), len(held.displaced)  # type: ignore[attr-defined]
            try:
                held.submit(client, count)
            except Overloaded:
                assert len(held.displaced) == lost
                continue
            assert admission.items <= 12
            assert admission.nbytes <= rows(1).nbytes * 24
            for victim, _ in held.displaced[lost:]:
                assert victim != client
                assert before[victim] > 1
        await held.end()

    asyncio.run(scenario())


def test_over_http_a_key_gets_its_share_although_requests_are_refused_unread(tmp_path: Path) -> None:
    keys, shown = zip(*(make_key(name, [Scope.INFER], ["*"], 0, None) for name in "ab"), strict=True)
    write_keys(tmp_path / "keys.json", list(keys))
    model = doubler()
    model.gate.clear()

    def asks(key: str) -> bytes:
        return infer_request("doubler", rows(1), authorization=f"Bearer {key}")

    with (
        serving({"doubler": model}, queue_items=6, inline_budget_us=0, keys_file=tmp_path / "keys.json") as running,
        ExitStack() as stack,
    ):
        servable = running.registry.resolve("doubler")
        mine = [stack.enter_context(running.connect()) for _ in range(8)]
        for count, raw in enumerate(mine, 1):
            raw.send(asks(shown[0]))
            if count <= 6:
                wait_for(lambda count=count: servable.in_flight == count)
        assert [raw.answer().status for raw in mine[6:]] == [503, 503]
        others = [stack.enter_context(running.connect()) for _ in range(2)]
        for raw in others:
            raw.send(asks(shown[1]))
        refused = [raw.answer() for raw in mine[4:6]]
        assert [answer.status for answer in refused] == [503, 503]
        assert "made room for another" in refused[0].error
        model.gate.set()
        assert [raw.answer().status for raw in (*mine[:4], *others)] == [200] * 6
