"""Repeated requests that arrive together run as one coalesced batch without being queued, with unchanged results."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from lathe.server.access.quotas import Quota, Quotas
from lathe.server.access.scopes import Scope
from lathe.server.api.codec.json_answer import JsonAnswer
from lathe.server.api.codec.reply import Reply
from lathe.server.api.connection.repeated_requests import RepeatedRequests
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.api.inference.infer import InferCall
from lathe.server.batching.entry import Entry
from lathe.server.batching.queue import Queue
from lathe.server.errors import Forbidden
from lathe.server.types import Tensors
from tests.server.fakes import FakeModel, doubler
from tests.server.running import (
    Raw,
    RequestMaker,
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
# short enough for the event loop's thread, however long the gate is closed
ON_LOOP = {"inline_budget_us": 1_000_000_000}


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """The entries that were queued."""
    found: list[Entry] = []
    push = Queue.push

    def noting(queue: Queue, entry: Entry) -> None:
        found.append(entry)
        push(queue, entry)

    monkeypatch.setattr(Queue, "push", noting)
    return found


class RepeatingClients:
    """Connections that repeat their requests; requests sent while one of them runs are coalesced."""

    def __init__(
        self, running: Running, model: FakeModel, raws: list[Raw], sizes: list[int], forms: Sequence[RequestMaker]
    ) -> None:
        self.running, self.model, self.raw_contents, self.sizes, self.forms = running, model, raws, sizes, forms

    def ask(self, index: int, start: int) -> None:
        self.raw_contents[index].send(
            self.forms[index % len(self.forms)]("doubler", rows(self.sizes[index], start=start))
        )

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Requests sent in the block arrive before the event loop polls again, because it runs a first request."""
        self.model.entered.clear()
        self.model.gate.clear()
        self.ask(0, 0)
        assert self.model.entered.wait(20)
        try:
            yield
        finally:
            # otherwise the next request also runs at once
            self.running.registry.resolve("doubler").batcher._singles.reset()
            self.model.gate.set()

    def expect(self, index: int, start: int, factor: int = 2) -> None:
        answer = tensor_of(self.raw_contents[index].answer())
        np.testing.assert_array_equal(answer, rows(self.sizes[index], start=start) * factor)


@contextmanager
def repeating_clients(
    sizes: list[int], model: FakeModel | None = None, forms: Sequence[RequestMaker] = (infer_request,), **settings: int
) -> Iterator[RepeatingClients]:
    """One connection for each number of rows, after enough requests for the server to recognise them."""
    model, tripler = model or doubler(max_batch=16), doubler(max_batch=16)
    tripler.function = lambda tensors: {"y": tensors["x"] * 3}
    with ExitStack() as stack:
        running = stack.enter_context(serving({"doubler": model, "tripler": tripler}, **{**ON_LOOP, **settings}))
        raws = [stack.enter_context(running.connect()) for _ in sizes]
        found = RepeatingClients(running, model, raws, sizes, forms)
        for _ in range(4):
            for index in range(len(sizes)):
                found.ask(index, 0)
                found.expect(index, 0)
        yield found


@each_form
def test_repeated_requests_that_arrive_together_run_as_one_batch_unqueued(
    queued: list[Entry], forms: list[RequestMaker]
) -> None:
    with repeating_clients([1, 2, 1, 3, 2], forms=forms) as here:
        stats = here.running.registry.resolve("doubler").stats
        queued.clear()
        before = stats.success.count, stats.inference_count, stats.queue_times.cumulative()[-1][1]
        with here.coalesced():
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
def test_requests_beyond_one_batch_are_queued(queued: list[Entry], forms: list[RequestMaker]) -> None:
    with repeating_clients([1, 4, 4, 4, 4], doubler(max_batch=8), forms=forms) as here:
        queued.clear()
        with here.coalesced():
            for index in range(1, 5):
                here.ask(index, index * 10)
        for index in range(5):
            here.expect(index, index * 10)
        assert here.model.batches[-2:] == [8, 8]
        assert len(queued) == 4


@each_form
def test_repeated_requests_join_the_queue_if_others_wait_there(queued: list[Entry], forms: list[RequestMaker]) -> None:
    """Another kind of request arrives with them: all are one batch."""
    with repeating_clients([1, 1, 1], forms=forms) as here, here.running.connect() as other:
        other.send(request("GET", "/v2/health/live"))
        assert other.answer().status == 200  # the server accepts the connection before its loop is blocked
        queued.clear()
        with here.coalesced():
            other.send(infer_request("doubler", rows(2, start=70), **{"X-New": "1"}))
            here.ask(1, 10)
            here.ask(2, 20)
        for index in range(3):
            here.expect(index, index * 10)
        np.testing.assert_array_equal(tensor_of(other.answer()), rows(2, start=70) * 2)
        assert here.model.batches[-2:] == [1, 4]


@pytest.mark.parametrize("leaving", [{2}, {1, 2, 4}])
@each_form
def test_requests_of_disconnected_clients_are_not_run(
    leaving: set[int], monkeypatch: pytest.MonkeyPatch, forms: list[RequestMaker]
) -> None:
    """`leaving` is by number of rows: some of the clients, or all of them."""
    join = RepeatedRequests.join

    def joining(repeats: RepeatedRequests, call: InferCall, template: RequestTemplate, data: bytes) -> None:
        join(repeats, call, template, data)
        if here.model.batches[-1] == 3 and template.rows in leaving:
            outbox = call.deliver.__self__  # type: ignore[attr-defined]
            connection = next(each for each in here.running.hub.connections if each.outbox is outbox)  # type: ignore[attr-defined]
            connection.connection_lost(None)
            connection.connection_lost = lambda exc: None  # by the transport

    with repeating_clients([3, 1, 2, 4], forms=forms) as here:
        stats = here.running.registry.resolve("doubler").stats
        monkeypatch.setattr(RepeatedRequests, "join", joining)
        with here.coalesced():
            for index in (1, 2, 3):
                here.ask(index, index * 10)
        here.expect(0, 0)
        for index in (1, 2, 3):
            if here.sizes[index] not in leaving:
                here.expect(index, index * 10)
            else:
                here.raw_contents[index].close()
        wait_for(lambda: stats.cancelled == len(leaving))
        assert here.model.batches[-1] == (5 if leaving == {2} else 3)
        assert here.running.registry.resolve("doubler").in_flight == 0
        here.ask(0, 5)
        here.expect(0, 5)


@each_form
def test_only_the_requests_that_cause_an_error_fail(forms: list[RequestMaker]) -> None:
    def double(tensors: Tensors) -> Tensors:
        if (tensors["x"] == 10).any():
            raise RuntimeError("a ten")
        return {"y": tensors["x"] * 2}

    model = doubler(max_batch=16)
    model.function = double
    with repeating_clients([1, 1, 1], model, forms=forms) as here:
        with here.coalesced():
            here.ask(1, 10)
            here.ask(2, 20)
        here.expect(0, 0)
        assert here.raw_contents[1].answer().status == 500
        here.expect(2, 20)
        assert here.running.registry.resolve("doubler").stats.failures["internal"] == 1


@each_form
def test_without_memory_for_a_batch_the_requests_run_alone(
    monkeypatch: pytest.MonkeyPatch, forms: list[RequestMaker]
) -> None:
    def stack(repeats: RepeatedRequests) -> Tensors:
        raise MemoryError

    with repeating_clients([1, 1, 1], forms=forms) as here:
        monkeypatch.setattr(RepeatedRequests, "stack", stack)
        for start in (10, 50):
            with here.coalesced():
                here.ask(1, start + 1)
                here.ask(2, start + 2)
            here.expect(0, 0)
            here.expect(1, start + 1)
            here.expect(2, start + 2)


@each_form
def test_answers_without_memory_are_errors_and_the_model_goes_on(
    monkeypatch: pytest.MonkeyPatch, forms: list[RequestMaker]
) -> None:
    def reply(answer: object, given: object, id: str = "") -> Reply:
        raise MemoryError

    with repeating_clients([1, 1, 1], forms=forms) as here:
        with here.coalesced(), monkeypatch.context() as patch:
            patch.setattr(RequestTemplate, "reply", reply)
            patch.setattr(JsonAnswer, "reply", reply)
            here.ask(1, 10)
            here.ask(2, 20)
            here.model.gate.set()
            assert [here.raw_contents[index].answer().status for index in range(3)] == [500] * 3
        for index in range(3):
            here.ask(index, 30)
            here.expect(index, 30)


@each_form
def test_outputs_with_missing_rows_fall_back_to_running_alone(forms: list[RequestMaker]) -> None:
    model = doubler(max_batch=16)
    with repeating_clients([1, 1, 1], model, forms=forms) as here:
        with here.coalesced():
            here.ask(1, 10)
            here.ask(2, 20)
            model.function = lambda tensors: {"y": tensors["x"][:1] * 2}
        here.expect(0, 0)
        assert [here.raw_contents[index].answer().status for index in (1, 2)] == [
            200,
            200,
        ]  # run alone, each has its row
        model.function = lambda tensors: {"y": np.zeros((0, 4), np.float32)}
        here.ask(1, 10)
        assert tensor_of(here.raw_contents[1].answer()).shape == (0, 4)


@each_form
def test_the_bounds_of_the_queue_hold(forms: list[RequestMaker]) -> None:
    with repeating_clients([1, 1, 1, 1], forms=forms, queue_items=2) as here:
        with here.coalesced():
            for index in (1, 2, 3):
                here.ask(index, index * 10)
        here.expect(0, 0)
        assert sorted(here.raw_contents[index].answer().status for index in (1, 2, 3)) == [200, 200, 503]
        assert here.running.registry.resolve("doubler").stats.failures["overloaded"] == 1


@each_form
def test_revoked_keys_and_quotas_count_for_each_request(
    monkeypatch: pytest.MonkeyPatch, forms: list[RequestMaker]
) -> None:
    with repeating_clients([1, 1, 1], forms=forms) as here:
        plane = here.running.engine.plane
        refusals: list[Exception] = []

        def check(authorization: str, scope: Scope, model: str) -> str:
            if refusals:
                raise refusals[0]
            return "its id"

        monkeypatch.setattr(plane.authority, "check", check)
        with here.coalesced():
            here.ask(1, 10)
            here.ask(2, 20)
            refusals.append(Forbidden("no"))
        here.expect(0, 0)
        assert [here.raw_contents[index].answer().status for index in (1, 2)] == [403, 403]
        refusals.clear()
        monkeypatch.setattr(plane, "quotas", Quotas(Quota(rate=0.001, burst=2)))
        with here.coalesced():
            here.ask(1, 10)
            here.ask(2, 20)
        here.expect(0, 0)
        assert sorted(here.raw_contents[index].answer().status for index in (1, 2)) == [200, 429]


@each_form
def test_a_version_that_goes_live_answers_requests_that_wait(forms: list[RequestMaker]) -> None:
    with repeating_clients([1, 1, 1], forms=forms) as here:
        registry = here.running.registry
        with here.coalesced():
            here.ask(1, 10)
            here.ask(2, 20)
            registry.found["doubler"][""] = registry.found["tripler"][""]
        here.expect(0, 0)
        here.expect(1, 10, factor=3)
        here.expect(2, 20, factor=3)


@each_form
def test_a_client_may_shut_down_its_sending_side_at_once(forms: list[RequestMaker]) -> None:
    with repeating_clients([1, 1], forms=forms) as here:
        with here.coalesced():
            here.ask(1, 10)
            here.raw_contents[1].socket.shutdown(socket.SHUT_WR)
        here.expect(1, 10)


@each_form
def test_other_requests_behind_a_repeated_one_keep_their_order(forms: list[RequestMaker]) -> None:
    with repeating_clients([1, 1], forms=forms) as here:
        with here.coalesced():
            here.ask(1, 10)
            here.raw_contents[1].send(request("GET", "/v2/models/doubler/ready"))
        here.expect(1, 10)
        assert here.raw_contents[1].answer().status == 200
