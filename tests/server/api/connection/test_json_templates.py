"""Requests that differ only in numbers from the one before are answered as on a connection that remembers nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lathe.server.api.connection.json_template import JsonTemplate, TextAround, text_around
from lathe.server.api.connection.template_matcher import TemplateMatcher
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.types import Tensors, TensorSpec
from tests.server.api.codec.test_json_bodies import GOOD, NUMBERS, ODD, document, mutate, tensor
from tests.server.fakes import FakeModel, doubler, echo
from tests.server.running import Answer, Raw, Running, json_request, request, rows, serving, wait_for

PATH = "/v2/models/doubler/infer"
X = [0.5, -1, 2e-3, 1.25]
BODY = document(tensor(X))
LIST = json.dumps(X).encode()

TAKEN = [
    "[1,2,3,4]", "[0.1234, 0.5, 9.99999, -0.0]", "[ 1 , 2 ,\n3\t,\r4 ]", "[[1, 2, 3, 4]]", "[ [1,2, 3, 4 ] ]",
    "[1e5, 2E-7, 3e+2, -4e0]", "[3e38, NaN, -Infinity, Infinity]", "[1e39, -1e300, 1e-60, 0]", "[-0, 0, -0.0, 0e5]",
    "[0.85062464, 0.8506246209144592, 123456789.125, 1e-45]",
]  # fmt: skip
LEFT = [
    "[1,2,3]", "[1,2,3,4,5]", "[]", "[[]]", "[[1,2],[3,4]]", "[[[1,2,3,4]]]", "[[1,2,3,4],[1]]", "[[1,2,3,4]",
    "[1,2,3,4]]", "[1,2,3,4],", "[1,2,3,4]}", "[1,2,3,4] x", "[1,2,3,]", "[,1,2,3,4]", "[1 2,3,4]", "[01,2,3,4]",
    "[1.,2,3,4]", "[.5,2,3,4]", "[+1,2,3,4]", "[1e,2,3,4]", "[1e400,2,3,4]", "[1,2,3,true]", "[1,2,3,null]",
    '[1,2,3,"4"]', "[1,2,3,{}]", "[nan,2,3,4]", "[1,2,3,0x4]", "[9007199254740993.00000000000000000,2,3,4]", "null",
    '"[1,2,3,4]"', "{}", "7", "", "[1,2,3,4\x00]", '[1,2,3,4], "data": [1,2,3,4]', '[1,2,3,4], "id": "b"',
    '[1,2,3,4], "shape": [4]', '[1,2,3,4], "more": [1]', '[1,2,3,4]}, {"name": "x", "data": [1,2,3,4]',
]  # fmt: skip


class NoTemplates(TemplateMatcher):
    """Makes no templates."""

    def observe(self, *given: object) -> None:
        pass


class Pair:
    """A connection for which the server has a template, and one for which it has none."""

    def __init__(self, running: Running, template_hits: list[bool], base: bytes) -> None:
        self.running, self._taken, self._base = running, template_hits, base
        self._known: Raw | None = None
        self._other: Raw | None = None

    def prime(self) -> Raw:
        """Connect if needed, and repeat the base request until the server has a template of it."""
        if self._known is None:
            self._known = self.running.connect()
            for _ in range(4):
                self._known.send(self._base)
                if self._known.answer().headers.get("connection") == "close":
                    self._known.close()
                    self._known = self.running.connect()
        return self._known

    def _plain(self) -> Raw:
        """The connection without templates."""
        if self._other is None:
            self._other = self.running.connect()
            port, connections = self._other.socket.getsockname()[1], self.running.hub.connections
            wait_for(lambda: any(each.client and each.client[1] == port for each in tuple(connections)))
            found = next(each for each in tuple(connections) if each.client and each.client[1] == port)
            found.inbox.templates = NoTemplates()  # type: ignore[union-attr]
        return self._other

    def compare(self, data: bytes) -> bool:
        """Check that both connections answer and count alike; return whether the template read the request."""
        raw, other = self.prime(), self._plain()
        before = self._counts()
        self._taken.clear()
        raw.send(data)
        answer, template_hits = raw.answer(), any(self._taken)
        between = self._counts()
        other.send(data)
        expected = other.answer()
        assert comparable(answer) == comparable(expected), data
        assert difference(before, between) == difference(between, self._counts()), data
        if answer.headers.get("connection") == "close":
            self.close()
        return template_hits

    def _counts(self) -> dict[str, int]:
        servables = self.running.registry.servables()
        # an answer arrives before it is counted
        wait_for(lambda: not any(servable.in_flight for servable in servables))
        counts: dict[str, int] = {}
        for servable in servables:
            stats, name = servable.stats, servable.ref.name
            counts |= {f"{name} {code}": count for code, count in stats.failures.items()}
            counts |= {f"{name} answered": stats.success.count, f"{name} rows": stats.inference_count}
        return counts

    def close(self) -> None:
        for raw in (self._known, self._other):
            if raw is not None:
                raw.close()
        self._known = self._other = None


def comparable(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    return answer.status, {name: value for name, value in answer.headers.items() if name != "date"}, answer.body


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


@pytest.fixture
def template_hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request that a template tried to read, whether it could."""
    found: list[bool] = []
    read = JsonTemplate.read

    def noting(template: JsonTemplate, data: bytes) -> bytes | None:
        elements = read(template, data)
        found.append(elements is not None)
        return elements

    monkeypatch.setattr(JsonTemplate, "read", noting)
    return found


def beyond_range() -> FakeModel:
    """A doubler whose large outputs become infinity."""

    def double(tensors: Tensors) -> Tensors:
        with np.errstate(over="ignore"):
            return {"y": tensors["x"] * 2}

    model = doubler(max_batch=16)
    model.function = double
    return model


@contextmanager
def pair(template_hits: list[bool], base: bytes = b"", model: Any = None, **settings: Any) -> Iterator[Pair]:
    models = {"doubler": model or beyond_range(), "other": beyond_range()}
    with serving(models, **settings) as running:
        found = Pair(running, template_hits, base or request("POST", PATH, BODY))
        try:
            yield found
        finally:
            found.close()


def with_list(text: str, body: bytes = BODY) -> bytes:
    return body.replace(LIST, text.encode())


def test_lists_that_the_template_cannot_read_are_read_in_the_usual_way(template_hits: list[bool]) -> None:
    with pair(template_hits) as both:
        for text in TAKEN * 2 + LEFT + TAKEN:
            assert both.compare(request("POST", PATH, with_list(text))) is (text in TAKEN), text


@pytest.mark.parametrize("name", GOOD)
def test_all_kinds_of_requests_are_answered_alike(name: str, template_hits: list[bool]) -> None:
    """Requests with binary answers, with parameters, and requests without a template."""
    body = GOOD[name]
    base = request("POST", PATH, body)
    with pair(template_hits, base) as both:
        found = [both.compare(base)]
        for old, new in ((b"0.5", b"7.25"), (b"1", b"3"), (b"16777217", b"0.125"), (b"4.5", b"-1e-3")):
            found.append(both.compare(request("POST", PATH, body.replace(old, new))))
    has_id = b'"id"' in body and b'"id": ""' not in body
    assert any(found) is not (has_id and "escapes" not in name) or "parameters" in name


def test_unusual_bodies_leave_the_template_in_place(template_hits: list[bool]) -> None:
    with pair(template_hits) as both:
        for body in (*GOOD.values(), *ODD.values()):
            both.compare(request("POST", PATH, body))
            assert both.compare(request("POST", PATH, BODY)), "the template is there all the time"


def compare_mutated(template_hits: list[bool], seed: int, count: int) -> None:
    rng, hits = random.Random(seed), 0
    with pair(template_hits) as both:
        for _ in range(count):
            body = mutate(rng, with_list(rng.choice(TAKEN)))
            hits += both.compare(request("POST", PATH, body))
    assert count // 20 < hits < count * 9 // 10


def test_mutated_bodies_are_answered_alike(template_hits: list[bool]) -> None:
    compare_mutated(template_hits, 1, 1_500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_mutated_bodies_are_answered_alike(template_hits: list[bool], seed: int) -> None:
    compare_mutated(template_hits, seed, 20_000)


def request_maker(*lines: str, path: str = PATH, length: str = "Content-Length: {}") -> Callable[[bytes], bytes]:
    """A function that makes requests with these header lines."""

    def make(body: bytes) -> bytes:
        fields = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", length.format(len(body)), *lines])
        return f"{fields}\r\n\r\n".encode() + body

    return make


# Each head, and whether the server makes a template of it.
HEADS: dict[str, tuple[Callable[[bytes], bytes], bool]] = {
    "plain": (request_maker(), True),
    "lower case": (request_maker(length="content-length: {}"), True),
    "spaces around the length": (request_maker(length="Content-Length: \t{} \t"), True),
    "no space before the length": (request_maker(length="Content-Length:{}"), True),
    "zeros before the length": (request_maker(length="Content-Length: 00{}"), False),
    "a similar field": (request_maker("X-Content-Length: 7", "Y: \tContent-Length: 9"), True),
    "a version": (request_maker(path="/v2/models/doubler/versions/1/infer"), True),
    "a query": (request_maker(path=f"{PATH}?a=b"), False),
    "another model": (request_maker(path="/v2/models/other/infer"), True),
    "no such model": (request_maker(path="/v2/models/none/infer"), False),
    "authorization": (request_maker("Authorization: Bearer x"), True),
    "a sticky key": (request_maker("Lathe-Sticky-Key: k"), True),
    "a trace": (request_maker("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), False),
    "an id": (request_maker("X-Request-Id: a"), False),
    "compressed answers": (request_maker("Accept-Encoding: gzip"), True),
    "compressed bodies": (request_maker("Content-Encoding: gzip"), False),
    "identity": (request_maker("Content-Encoding: identity"), True),
    "connection: close": (request_maker("Connection: close"), False),
    "an origin": (request_maker("Origin: http://localhost"), False),
    "an empty JSON part": (request_maker("Inference-Header-Content-Length: 0"), False),
    "two lengths": (request_maker("Content-Length: 7"), False),
    "also chunked": (request_maker("Transfer-Encoding: chunked"), False),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", HEADS)
def test_which_heads_get_a_template(name: str, template_hits: list[bool]) -> None:
    """On a connection with a template of a plain head, and on one whose requests all have this head."""
    make, has_template = HEADS[name]
    others = [make(with_list(text)) for text in TAKEN]
    with pair(template_hits) as both:
        for data in others:
            assert both.compare(data) is (name == "plain")
    with pair(template_hits, make(BODY)) as both:
        assert {both.compare(data) for data in others} == {has_template}


@pytest.mark.parametrize("datatype", NUMBERS)
def test_every_datatype_is_answered_alike(datatype: str, template_hits: list[bool]) -> None:
    def body(words: str) -> bytes:
        text = json.dumps({"inputs": [tensor([0], (1, 4), datatype)]})
        return request("POST", PATH, text.replace("[0]", f"[{words}]").encode())

    base = "true, true, true, true" if datatype == "BOOL" else "1, 2, 3, 4"
    lists = [
        "1, 2, 3, 100", "0, 1, 0, 1", "-1, 0, 0, 0", "127, 128, 255, 256", "1, 2, 3, 4.0", "true, false, true, true",
        "9223372036854775807, 9223372036854775808, 18446744073709551615, 0", "1, 2, 3",
    ]  # fmt: skip
    with pair(template_hits, body(base), echo(datatype)) as both:
        found = [both.compare(body(words)) for words in lists]
    assert any(found) is (datatype != "BOOL")


def test_limits_hold_for_templates(template_hits: list[bool]) -> None:
    """Requests over a limit, or too long for the event loop, are answered in the usual way."""
    long = with_list("[0." + "3" * 300 + ",2,3,4]")
    for settings in ({"max_json": len(BODY) + 100}, {"max_body": len(BODY) + 100}):
        with pair(template_hits, **settings) as both:
            assert both.compare(request("POST", PATH, with_list("[1.0000000000000001,2,3,4]")))
            assert not both.compare(request("POST", PATH, long))
    count = INLINE_BYTES // 10
    with pair(template_hits, json_request("doubler", np.ones((1, count), np.float32)), echo("FP32")) as both:
        values = np.linspace(0, 1, count, dtype=np.float32)[None]
        assert both.compare(json_request("doubler", np.round(values * 8) / 8))
        assert not both.compare(json_request("doubler", values)), "longer than what is read on the event loop"
    with pair(template_hits, request_maker(f"X: {'x' * 900}")(BODY), max_header=1024) as both:
        assert not both.compare(request_maker(f"X: {'x' * 900}")(with_list("[1,2,3,4]"))), (
            "a longer head might be too long"
        )


def test_requests_may_arrive_together_or_in_pieces(template_hits: list[bool]) -> None:
    stream = [json_request("doubler", rows(1, start=start)) for start in (0, 7, 100, 3, 12345)]
    with pair(template_hits, json_request("doubler", rows(1))) as both:
        raw = both.prime()
        whole = b"".join(stream)
        for size in (len(whole), len(stream[0]) + 10, 50):
            for at in range(0, len(whole), size):
                raw.send(whole[at : at + size])
            for start in (0, 7, 100, 3, 12345):
                assert raw.answer().json["outputs"][0]["data"] == (rows(1, start=start) * 2).ravel().tolist()


def test_connections_with_equal_requests_share_a_template(template_hits: list[bool]) -> None:
    with pair(template_hits) as one:
        raw = one.prime()
        with one.running.connect() as other:
            for start in range(6):
                for each in (raw, other):
                    each.send(request("POST", PATH, with_list(f"[{start}.5,2,3,4]")))
                    assert each.answer().json["outputs"][0]["data"][0] == 2 * start + 1
            templates = {each.templates.json_template for each in one.running.server.server_state.connections}  # type: ignore[attr-defined]
            assert len(templates) == 1


def test_lengths_at_which_the_number_of_digits_changes() -> None:
    """A length of one more digit leaves a gap between the possible sizes of requests."""
    data = request("POST", PATH, BODY)
    around = text_around(data, data.index(b"\r\n\r\n") + 4)
    assert around is not None
    template = JsonTemplate.__new__(JsonTemplate)
    template._around, template._max_body, template.size = around, 20_000, -1
    fixed = len(around.before_length) + len(around.after_length)
    lengths = {size: length for length in range(1, 20_001) for size in [fixed + length + len(str(length))]}
    for size in range(fixed + 20_010):
        assert template._prepare(size) == (size in lengths), size
        if size in lengths:
            expected = b"%d%b%b" % (lengths[size], around.after_length, around.before_list)
            assert template.prefix == around.before_length + expected
    template.size = 0  # the template is useless from here on
    assert not any(map(template._prepare, lengths))


def test_changes_around_the_list_are_read_in_the_usual_way() -> None:
    start = len(request_maker()(b"")) + len(str(len(BODY))) - 1
    data = request_maker()(BODY)
    around = text_around(data, start)
    assert isinstance(around, TextAround)
    digits = str(len(BODY)).encode()
    parts = around.before_length, digits, around.after_length, around.before_list, LIST, around.after_list
    assert b"".join(parts) == data
    assert around.size == len(data) - len(digits) - len(LIST)
    assert text_around(request_maker()(b'{"inputs": []}'), start - 1) is None


def test_requests_without_inputs(template_hits: list[bool]) -> None:
    model = FakeModel(lambda _: {"y": np.ones(3, np.float32)}, [], [TensorSpec("y", "FP32", (3,))], batchable=False)
    data = request("POST", PATH, b'{"inputs": []}')
    with pair(template_hits, data, model) as both:
        assert not both.compare(data)


def test_a_model_without_batching_runs_each_request_alone(template_hits: list[bool]) -> None:
    spec = TensorSpec("x", "FP32", (-1, 4))
    model = FakeModel(lambda t: {"y": t["x"] * 2}, [spec], [TensorSpec("y", "FP32", (-1, 4))], batchable=False)
    with pair(template_hits, model=model) as both:
        for text in TAKEN[:2]:
            assert both.compare(request("POST", PATH, with_list(text)))


def test_large_answers_are_written_on_threads(template_hits: list[bool]) -> None:
    """A few numbers in, many out: the event loop writes none of them, and never a batch at once."""
    spec = TensorSpec("x", "FP32", (-1, 4))
    model = FakeModel(
        lambda t: {"y": np.repeat(t["x"], INLINE_BYTES // 8, 1)},
        [spec],
        [TensorSpec("y", "FP32", (-1, INLINE_BYTES // 2))],
    )
    with pair(template_hits, model=model) as both:
        for text in TAKEN[:2]:
            assert both.compare(request("POST", PATH, with_list(text)))
        templates = [each.templates.json_template for each in both.running.server.server_state.connections]  # type: ignore[attr-defined]
        assert [each.repeated_requests for each in templates if each is not None] == [None]
