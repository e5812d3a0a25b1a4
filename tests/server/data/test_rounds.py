"""Repeated requests that come together run as one batch that was never queued, and nobody can tell but by the time."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from server.access.quotas import Quota, Quotas
from server.access.scopes import Scope
from server.api.infer import InferCall
from server.api.jsonanswer import JsonAnswer
from server.api.lane import Lane
from server.api.reply import Reply
from server.api.round import Repeats
from server.batching.entry import Entry
from server.batching.queue import Queue
from server.errors import Forbidden
from server.types import Tensors
from tests.server.data.fakes import FakeModel, doubler
from tests.server.data.running import (
    Asked,
    Raw,
    Running,
    infer_request,
    json_request,
    request,
    rows,
    serving,
    tensor_of,
    wait_for,
)

FORMS = {"binary": [infer_request], "JSON": [json_request], "both": [json_request, infer_request]}
each_form = pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
HERE = {"inline_budget_us": 1_000_000_000}  # short enough for the event loop's thread, however long the gate is closed


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """What was queued."""
    found: list[Entry] = []
    push = Queue.push

    def noting(queue: Queue, entry: Entry) -> None:
        found.append(entry)
        push(queue, entry)

    monkeypatch.setattr(Queue, "push", noting)
    return found


class Crowd:
    """Connections whose requests repeat themselves; what they send while one of them is answered comes together."""

    def __init__(
        self, running: Running, model: FakeModel, raws: list[Raw], sizes: list[int], forms: Sequence[Asked]
    ) -> None:
        self.running, self.model, self.raws, self.sizes, self.forms = running, model, raws, sizes, forms

    def ask(self, index: int, start: int) -> None:
        self.raws[index].send(self.forms[index % len(self.forms)]("doubler", rows(self.sizes[index], start=start)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is sent in the block is there before the event loop looks again: it runs the first one's request."""
        self.model.entered.clear()
        self.model.gate.clear()
        self.ask(0, 0)
        assert self.model.entered.wait(20)
        try:
            yield
        finally:
            self.running.registry.resolve("doubler").batcher._lonely = 0  # else the next one, too, might run at once
            self.model.gate.set()

    def expect(self, index: int, start: int, factor: int = 2) -> None:
        answer = tensor_of(self.raws[index].answer())
        np.testing.assert_array_equal(answer, rows(self.sizes[index], start=start) * factor)


@contextmanager
def crowd(
    sizes: list[int], model: FakeModel | None = None, forms: Sequence[Asked] = (infer_request,), **settings: int
) -> Iterator[Crowd]:
    """One connection for each number of rows, after requests enough to be known."""
    model, tripler = model or doubler(max_batch=16), doubler(max_batch=16)
    tripler.function = lambda tensors: {"y": tensors["x"] * 3}
    with ExitStack() as stack:
        running = stack.enter_context(serving({"doubler": model, "tripler": tripler}, **{**HERE, **settings}))
        raws = [stack.enter_context(running.connect()) for _ in sizes]
        found = Crowd(running, model, raws, sizes, forms)
        for _ in range(4):
            for index in range(len(sizes)):
                found.ask(index, 0)
                found.expect(index, 0)
        yield found


@each_form
def test_what_comes_together_runs_together_unqueued_and_each_gets_its_own_rows(
    queued: list[Entry], forms: list[Asked]
) -> None:
    with crowd([1, 2, 1, 3, 2], forms=forms) as here:
        stats = here.running.registry.resolve("doubler").stats
        queued.clear()
        before = stats.success.count, stats.inference_count, stats.queue_times.cumulative()[-1][1]
        with here.together():
            for index in range(1, 5):
                here.ask(index, index * 10)
        for index in range(5):
            here.expect(index, index * 10)
        assert here.model.batches[-2:] == [1, 8]
        assert not queued
        after = stats.success.count, stats.inference_count, stats.queue_times.cumulative()[-1][1]
        assert [now - then for now, then in zip(after, before, strict=True)] == [5, 9, 5]
        assert stats.batches[8].compute_infer.count == 1
        assert here.running.registry.resolve("doubler").in_flight == 0


@each_form
def test_more_than_a_batch_holds_is_queued(queued: list[Entry], forms: list[Asked]) -> None:
    with crowd([1, 4, 4, 4, 4], doubler(max_batch=8), forms=forms) as here:
        queued.clear()
        with here.together():
            for index in range(1, 5):
                here.ask(index, index * 10)
        for index in range(5):
            here.expect(index, index * 10)
        assert here.model.batches[-2:] == [8, 8]
        assert len(queued) == 4


@each_form
def test_beside_others_that_wait_it_waits_too(queued: list[Entry], forms: list[Asked]) -> None:
    """Another kind of request comes with them: all are one batch."""
    with crowd([1, 1, 1], forms=forms) as here, here.running.connect() as other:
        other.send(request("GET", "/v2/health/live"))
        assert other.answer().status == 200  # the server has accepted the connection before its loop is held up
        queued.clear()
        with here.together():
            other.send(infer_request("doubler", rows(2, start=70), **{"X-New": "1"}))
            here.ask(1, 10)
            here.ask(2, 20)
        for index in range(3):
            here.expect(index, index * 10)
        np.testing.assert_array_equal(tensor_of(other.answer()), rows(2, start=70) * 2)
        assert here.model.batches[-2:] == [1, 4]


@pytest.mark.parametrize("leaving", [{2}, {1, 2, 4}])
@each_form
def test_who_leaves_before_it_runs_is_not_run_for(
    leaving: set[int], monkeypatch: pytest.MonkeyPatch, forms: list[Asked]
) -> None:
    """By the number of rows: some, or all of them."""
    join = Repeats.join

    def joining(repeats: Repeats, call: InferCall, lane: Lane, data: bytes) -> None:
        join(repeats, call, lane, data)
        if here.model.batches[-1] == 3 and lane.rows in leaving:
            call.deliver.__self__.connection_lost(None)  # type: ignore[attr-defined]

    with crowd([3, 1, 2, 4], forms=forms) as here:
        stats = here.running.registry.resolve("doubler").stats
        monkeypatch.setattr(Repeats, "join", joining)
        with here.together():
            for index in (1, 2, 3):
                here.ask(index, index * 10)
        here.expect(0, 0)
        for index in (1, 2, 3):
            if here.sizes[index] not in leaving:
                here.expect(index, index * 10)
            else:
                here.raws[index].close()
        wait_for(lambda: stats.cancelled == len(leaving))
        assert here.model.batches[-1] == (5 if leaving == {2} else 3)
        assert here.running.registry.resolve("doubler").in_flight == 0
        here.ask(0, 5)
        here.expect(0, 5)


@each_form
def test_only_those_at_fault_fail(forms: list[Asked]) -> None:
    def double(tensors: Tensors) -> Tensors:
        if (tensors["x"] == 10).any():
            raise RuntimeError("a ten")
        return {"y": tensors["x"] * 2}

    model = doubler(max_batch=16)
    model.function = double
    with crowd([1, 1, 1], model, forms=forms) as here:
        with here.together():
            here.ask(1, 10)
            here.ask(2, 20)
        here.expect(0, 0)
        assert here.raws[1].answer().status == 500
        here.expect(2, 20)
        assert here.running.registry.resolve("doubler").stats.failures["internal"] == 1


@each_form
def test_without_the_memory_to_run_together_they_run_alone(monkeypatch: pytest.MonkeyPatch, forms: list[Asked]) -> None:
    def stack(repeats: Repeats) -> Tensors:
        raise MemoryError

    with crowd([1, 1, 1], forms=forms) as here:
        monkeypatch.setattr(Repeats, "stack", stack)
        for start in (10, 50):
            with here.together():
                here.ask(1, start + 1)
                here.ask(2, start + 2)
            here.expect(0, 0)
            here.expect(1, start + 1)
            here.expect(2, start + 2)


@each_form
def test_answers_that_cannot_be_made_are_told_and_the_model_goes_on(
    monkeypatch: pytest.MonkeyPatch, forms: list[Asked]
) -> None:
    def reply(answer: object, given: object, id: str = "") -> Reply:
        raise MemoryError

    with crowd([1, 1, 1], forms=forms) as here:
        with here.together(), monkeypatch.context() as patch:
            patch.setattr(Lane, "reply", reply)
            patch.setattr(JsonAnswer, "reply", reply)
            here.ask(1, 10)
            here.ask(2, 20)
            here.model.gate.set()
            assert [here.raws[index].answer().status for index in range(3)] == [500] * 3
        for index in range(3):
            here.ask(index, 30)
            here.expect(index, 30)


@each_form
def test_outputs_without_the_rows_are_an_error_for_each(forms: list[Asked]) -> None:
    model = doubler(max_batch=16)
    with crowd([1, 1, 1], model, forms=forms) as here:
        with here.together():
            here.ask(1, 10)
            here.ask(2, 20)
            model.function = lambda tensors: {"y": tensors["x"][:1] * 2}
        here.expect(0, 0)
        assert [here.raws[index].answer().status for index in (1, 2)] == [200, 200]  # run alone they have them
        model.function = lambda tensors: {"y": np.zeros((0, 4), np.float32)}
        here.ask(1, 10)
        assert tensor_of(here.raws[1].answer()).shape == (0, 4)


@each_form
def test_the_queues_bounds_hold(forms: list[Asked]) -> None:
    with crowd([1, 1, 1, 1], forms=forms, queue_items=2) as here:
        with here.together():
            for index in (1, 2, 3):
                here.ask(index, index * 10)
        here.expect(0, 0)
        assert sorted(here.raws[index].answer().status for index in (1, 2, 3)) == [200, 200, 503]
        assert here.running.registry.resolve("doubler").stats.failures["overloaded"] == 1


@each_form
def test_a_key_that_is_taken_away_or_a_quota_counts_for_each(
    monkeypatch: pytest.MonkeyPatch, forms: list[Asked]
) -> None:
    with crowd([1, 1, 1], forms=forms) as here:
        plane = here.running.engine.plane
        refusals: list[Exception] = []

        def check(authorization: str, scope: Scope, model: str) -> str:
            if refusals:
                raise refusals[0]
            return "its id"

        monkeypatch.setattr(plane.authority, "check", check)
        with here.together():
            here.ask(1, 10)
            here.ask(2, 20)
            refusals.append(Forbidden("no"))
        here.expect(0, 0)
        assert [here.raws[index].answer().status for index in (1, 2)] == [403, 403]
        refusals.clear()
        monkeypatch.setattr(plane, "quotas", Quotas(Quota(rate=0.001, burst=2)))
        with here.together():
            here.ask(1, 10)
            here.ask(2, 20)
        here.expect(0, 0)
        assert sorted(here.raws[index].answer().status for index in (1, 2)) == [200, 429]


@each_form
def test_another_version_answers_what_came_while_it_went_live(forms: list[Asked]) -> None:
    with crowd([1, 1, 1], forms=forms) as here:
        registry = here.running.registry
        with here.together():
            here.ask(1, 10)
            here.ask(2, 20)
            registry.found["doubler"][""] = registry.found["tripler"][""]
        here.expect(0, 0)
        here.expect(1, 10, factor=3)
        here.expect(2, 20, factor=3)


@each_form
def test_a_client_may_close_its_sending_side_at_once(forms: list[Asked]) -> None:
    with crowd([1, 1], forms=forms) as here:
        with here.together():
            here.ask(1, 10)
            here.raws[1].socket.shutdown(socket.SHUT_WR)
        here.expect(1, 10)


@each_form
def test_other_requests_behind_it_keep_their_order(forms: list[Asked]) -> None:
    with crowd([1, 1], forms=forms) as here:
        with here.together():
            here.ask(1, 10)
            here.raws[1].send(request("GET", "/v2/models/doubler/ready"))
        here.expect(1, 10)
        assert here.raws[1].answer().status == 200
