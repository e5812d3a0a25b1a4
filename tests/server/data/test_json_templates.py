"""Requests that differ from the one before them in numbers alone are answered as on a connection that keeps nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from server.api.jsontemplate import JsonTemplate, TextAround, text_around
from server.api.readers import HERE
from server.types import Tensors, TensorSpec
from tests.server.data.fakes import FakeModel, doubler, echo
from tests.server.data.running import Answer, Raw, Running, json_request, request, rows, serving, wait_for
from tests.server.data.test_json_bodies import GOOD, NUMBERS, ODD, document, mutated, tensor

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


class Pair:
    """A connection of which the server has a template, and one of which it keeps none."""

    def __init__(self, running: Running, taken: list[bool], base: bytes) -> None:
        self.running, self._taken, self._base = running, taken, base
        self._known: Raw | None = None
        self._other: Raw | None = None

    def prime(self) -> Raw:
        """Repeat the base until it is known, where the connection is not yet."""
        if self._known is None:
            self._known = self.running.connect()
            for _ in range(4):
                self._known.send(self._base)
                if self._known.answer().headers.get("connection") == "close":
                    self._known.close()
                    self._known = self.running.connect()
        return self._known

    def _plain(self) -> Raw:
        """Return the other connection."""
        if self._other is None:
            self._other = self.running.connect()
            port, connections = self._other.socket.getsockname()[1], self.running.server.server_state.connections
            wait_for(lambda: any(each.client and each.client[1] == port for each in tuple(connections)))
            found = next(each for each in tuple(connections) if each.client and each.client[1] == port)
            found._expect_again = lambda *given: None  # type: ignore[union-attr]
        return self._other

    def compare(self, data: bytes) -> bool:
        """Check that both answer alike and count alike; say whether the template took it."""
        raw, other = self.prime(), self._plain()
        before = self._counts()
        self._taken.clear()
        raw.send(data)
        answer, taken = raw.answer(), any(self._taken)
        between = self._counts()
        other.send(data)
        expected = other.answer()
        assert told(answer) == told(expected), data
        assert grown(before, between) == grown(between, self._counts()), data
        if answer.headers.get("connection") == "close":
            self.close()
        return taken

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for servable in self.running.registry.servables():
            stats, name = servable.stats, servable.ref.name
            counts |= {f"{name} {code}": count for code, count in stats.failures.items()}
            counts |= {f"{name} answered": stats.success.count, f"{name} rows": stats.inference_count}
            counts[f"{name} inside"] = servable.in_flight
        return counts

    def close(self) -> None:
        for raw in (self._known, self._other):
            if raw is not None:
                raw.close()
        self._known = self._other = None


def told(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    return answer.status, {name: value for name, value in answer.headers.items() if name != "date"}, answer.body


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a template took what it was shown."""
    found: list[bool] = []
    read = JsonTemplate.read

    def noting(template: JsonTemplate, data: bytes) -> bytes | None:
        elements = read(template, data)
        found.append(elements is not None)
        return elements

    monkeypatch.setattr(JsonTemplate, "read", noting)
    return found


def beyond_range() -> FakeModel:
    """A doubler that makes infinity of what gets too large."""

    def double(tensors: Tensors) -> Tensors:
        with np.errstate(over="ignore"):
            return {"y": tensors["x"] * 2}

    model = doubler(max_batch=16)
    model.function = double
    return model


@contextmanager
def pair(taken: list[bool], base: bytes = b"", model: Any = None, **settings: Any) -> Iterator[Pair]:
    models = {"doubler": model or beyond_range(), "other": beyond_range()}
    with serving(models, **settings) as running:
        found = Pair(running, taken, base or request("POST", PATH, BODY))
        try:
            yield found
        finally:
            found.close()


def with_list(text: str, body: bytes = BODY) -> bytes:
    return body.replace(LIST, text.encode())


def test_lists_are_read_by_the_template_or_in_the_usual_way(taken: list[bool]) -> None:
    with pair(taken) as both:
        for text in TAKEN * 2 + LEFT + TAKEN:
            assert both.compare(request("POST", PATH, with_list(text))) is (text in TAKEN), text


@pytest.mark.parametrize("name", GOOD)
def test_templates_of_all_kinds_of_requests(name: str, taken: list[bool]) -> None:
    """Those whose answer is binary, those with parameters, and those of which there is no template."""
    body = GOOD[name]
    base = request("POST", PATH, body)
    with pair(taken, base) as both:
        found = [both.compare(base)]
        for old, new in ((b"0.5", b"7.25"), (b"1", b"3"), (b"16777217", b"0.125"), (b"4.5", b"-1e-3")):
            found.append(both.compare(request("POST", PATH, body.replace(old, new))))
    has_id = b'"id"' in body and b'"id": ""' not in body
    assert any(found) is not (has_id and "escapes" not in name) or "parameters" in name


def test_bodies_of_every_kind_on_a_connection_with_a_template(taken: list[bool]) -> None:
    with pair(taken) as both:
        for body in (*GOOD.values(), *ODD.values()):
            both.compare(request("POST", PATH, body))
            assert both.compare(request("POST", PATH, BODY)), "the template is there all the time"


def compare_mutated(taken: list[bool], seed: int, count: int) -> None:
    rng, hits = random.Random(seed), 0
    with pair(taken) as both:
        for _ in range(count):
            body = mutated(rng, with_list(rng.choice(TAKEN)))
            hits += both.compare(request("POST", PATH, body))
    assert count // 20 < hits < count * 9 // 10


def test_mutated_bodies_are_answered_alike(taken: list[bool]) -> None:
    compare_mutated(taken, 1, 1_500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_mutated_bodies_are_answered_alike(taken: list[bool], seed: int) -> None:
    compare_mutated(taken, seed, 20_000)


def headed(*lines: str, path: str = PATH, length: str = "Content-Length: {}") -> Callable[[bytes], bytes]:
    """Makes requests with these header lines."""

    def make(body: bytes) -> bytes:
        fields = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", length.format(len(body)), *lines])
        return f"{fields}\r\n\r\n".encode() + body

    return make


# Each, and whether there is a template of it.
HEADS: dict[str, tuple[Callable[[bytes], bytes], bool]] = {
    "plain": (headed(), True),
    "small letters": (headed(length="content-length: {}"), True),
    "blanks around the length": (headed(length="Content-Length: \t{} \t"), True),
    "no blank": (headed(length="Content-Length:{}"), True),
    "zeros before the length": (headed(length="Content-Length: 00{}"), False),
    "another field like it": (headed("X-Content-Length: 7", "Y: \tContent-Length: 9"), True),
    "a version": (headed(path="/v2/models/doubler/versions/1/infer"), True),
    "a query": (headed(path=f"{PATH}?a=b"), False),
    "another model": (headed(path="/v2/models/other/infer"), True),
    "no such model": (headed(path="/v2/models/none/infer"), False),
    "authorization": (headed("Authorization: Bearer x"), True),
    "a sticky key": (headed("Lathe-Sticky-Key: k"), True),
    "a trace": (headed("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), False),
    "an id": (headed("X-Request-Id: a"), False),
    "compressed answers": (headed("Accept-Encoding: gzip"), True),
    "compressed bodies": (headed("Content-Encoding: gzip"), False),
    "identity": (headed("Content-Encoding: identity"), True),
    "the end": (headed("Connection: close"), False),
    "of a page": (headed("Origin: http://localhost"), False),
    "JSON of no length": (headed("Inference-Header-Content-Length: 0"), False),
    "two lengths": (headed("Content-Length: 7"), False),
    "chunked, too": (headed("Transfer-Encoding: chunked"), False),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, taken: list[bool]) -> None:
    """On a connection that knows a plain one, and on one that knows this one."""
    make, has_template = HEADS[name]
    others = [make(with_list(text)) for text in TAKEN]
    with pair(taken) as both:
        for data in others:
            assert both.compare(data) is (name == "plain")
    with pair(taken, make(BODY)) as both:
        assert {both.compare(data) for data in others} == {has_template}


@pytest.mark.parametrize("datatype", NUMBERS)
def test_every_datatype(datatype: str, taken: list[bool]) -> None:
    def body(words: str) -> bytes:
        text = json.dumps({"inputs": [tensor([0], (1, 4), datatype)]})
        return request("POST", PATH, text.replace("[0]", f"[{words}]").encode())

    base = "true, true, true, true" if datatype == "BOOL" else "1, 2, 3, 4"
    lists = [
        "1, 2, 3, 100", "0, 1, 0, 1", "-1, 0, 0, 0", "127, 128, 255, 256", "1, 2, 3, 4.0", "true, false, true, true",
        "9223372036854775807, 9223372036854775808, 18446744073709551615, 0", "1, 2, 3",
    ]  # fmt: skip
    with pair(taken, body(base), echo(datatype)) as both:
        found = [both.compare(body(words)) for words in lists]
    assert any(found) is (datatype != "BOOL")


def test_limits_hold(taken: list[bool]) -> None:
    """What is too long for a limit, or for the event loop, is answered as ever."""
    long = with_list("[0." + "3" * 300 + ",2,3,4]")
    for settings in ({"max_json": len(BODY) + 100}, {"max_body": len(BODY) + 100}):
        with pair(taken, **settings) as both:
            assert both.compare(request("POST", PATH, with_list("[1.0000000000000001,2,3,4]")))
            assert not both.compare(request("POST", PATH, long))
    count = HERE // 10
    with pair(taken, json_request("doubler", np.ones((1, count), np.float32)), echo("FP32")) as both:
        values = np.linspace(0, 1, count, dtype=np.float32)[None]
        assert both.compare(json_request("doubler", np.round(values * 8) / 8))
        assert not both.compare(json_request("doubler", values)), "longer than what is read on the event loop"
    with pair(taken, headed(f"X: {'x' * 900}")(BODY), max_header=1024) as both:
        assert not both.compare(headed(f"X: {'x' * 900}")(with_list("[1,2,3,4]"))), "a longer head might be too long"


def test_requests_that_come_at_once_or_in_pieces(taken: list[bool]) -> None:
    stream = [json_request("doubler", rows(1, start=start)) for start in (0, 7, 100, 3, 12345)]
    with pair(taken, json_request("doubler", rows(1))) as both:
        raw = both.prime()
        whole = b"".join(stream)
        for size in (len(whole), len(stream[0]) + 10, 50):
            for at in range(0, len(whole), size):
                raw.send(whole[at : at + size])
            for start in (0, 7, 100, 3, 12345):
                assert raw.answer().json["outputs"][0]["data"] == (rows(1, start=start) * 2).ravel().tolist()


def test_connections_that_say_the_same_share_a_template(taken: list[bool]) -> None:
    with pair(taken) as one:
        raw = one.prime()
        with one.running.connect() as other:
            for start in range(6):
                for each in (raw, other):
                    each.send(request("POST", PATH, with_list(f"[{start}.5,2,3,4]")))
                    assert each.answer().json["outputs"][0]["data"][0] == 2 * start + 1
            templates = {connection.json_template for connection in one.running.server.server_state.connections}  # type: ignore[attr-defined]
            assert len(templates) == 1


def test_lengths_that_no_request_has() -> None:
    """A length of one digit more than that of the length before it leaves a gap between the sizes of requests."""
    data = request("POST", PATH, BODY)
    around = text_around(data, data.index(b"\r\n\r\n") + 4)
    assert around is not None
    template = JsonTemplate.__new__(JsonTemplate)
    template._around, template._most, template.size = around, 20_000, -1
    fixed = len(around.before_length) + len(around.behind_length)
    lengths = {size: length for length in range(1, 20_001) for size in [fixed + length + len(str(length))]}
    for size in range(fixed + 20_010):
        assert template._fit(size) == (size in lengths), size
        if size in lengths:
            expected = b"%d%b%b" % (lengths[size], around.behind_length, around.before_list)
            assert template.prefix == around.before_length + expected
    template.size = 0  # of no use any more
    assert not any(map(template._fit, lengths))


def test_what_is_around_the_list() -> None:
    start = len(headed()(b"")) + len(str(len(BODY))) - 1
    data = headed()(BODY)
    around = text_around(data, start)
    assert isinstance(around, TextAround)
    digits = str(len(BODY)).encode()
    parts = around.before_length, digits, around.behind_length, around.before_list, LIST, around.behind_list
    assert b"".join(parts) == data
    assert around.size == len(data) - len(digits) - len(LIST)
    assert text_around(headed()(b'{"inputs": []}'), start - 1) is None


def test_requests_without_inputs(taken: list[bool]) -> None:
    model = FakeModel(lambda _: {"y": np.ones(3, np.float32)}, [], [TensorSpec("y", "FP32", (3,))], batchable=False)
    data = request("POST", PATH, b'{"inputs": []}')
    with pair(taken, data, model) as both:
        assert not both.compare(data)


def test_a_model_whose_rows_are_no_requests(taken: list[bool]) -> None:
    """Each request runs alone."""
    spec = TensorSpec("x", "FP32", (-1, 4))
    model = FakeModel(lambda t: {"y": t["x"] * 2}, [spec], [TensorSpec("y", "FP32", (-1, 4))], batchable=False)
    with pair(taken, model=model) as both:
        for text in TAKEN[:2]:
            assert both.compare(request("POST", PATH, with_list(text)))


def test_answers_too_long_for_the_event_loop(taken: list[bool]) -> None:
    """A few numbers in, many out: they are written on threads, and never by the batch."""
    spec = TensorSpec("x", "FP32", (-1, 4))
    model = FakeModel(
        lambda t: {"y": np.repeat(t["x"], HERE // 8, 1)}, [spec], [TensorSpec("y", "FP32", (-1, HERE // 2))]
    )
    with pair(taken, model=model) as both:
        for text in TAKEN[:2]:
            assert both.compare(request("POST", PATH, with_list(text)))
        templates = [each.json_template for each in both.running.server.server_state.connections]  # type: ignore[attr-defined]
        assert [each.round for each in templates if each is not None] == [None]
