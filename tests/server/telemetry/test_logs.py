"""The log: one format for every line, the request that a line belongs to, and an optional line per request."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lathe.server.telemetry import access_log, logs
from lathe.server.telemetry.access_log import AccessLog, ServedRequest
from lathe.server.telemetry.logs import CALLER, Caller, configure, log_fields
from tests.server.fakes import FakeModel, doubler
from tests.server.running import (
    CONNECTIONS,
    RequestMaker,
    Running,
    each_form,
    infer_request,
    rows,
    serving,
    wait_for,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-00"
BODY: dict[str, Any] = {
    "id": "call 7",
    "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
}


@contextmanager
def logged(form: logs.LogFormat = "json", level: str = "info") -> Iterator[io.StringIO]:
    """Collect the process's log in the server's format."""
    root, stream = logging.getLogger(), io.StringIO()
    named = (*logs.LOGGERS, "uvicorn.error")  # the logger of uvicorn has its own level once a server ran in a thread
    before = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in named}
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)
    configure(form, level, stream)
    try:
        yield stream
    finally:
        root.handlers[:], root.level = before[0], before[1]
        for name, was in before[2].items():
            logging.getLogger(name).setLevel(was)


def lines(stream: io.StringIO, event: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert all(list(line)[:4] == ["timestamp", "level", "logger", "event"] for line in found)
    return [line for line in found if not event or line["event"] == event]


def request_lines(stream: io.StringIO, count: int) -> list[dict[str, Any]]:
    """The request lines, once there are `count`: a line is written just after the answer was sent."""
    wait_for(lambda: len(lines(stream, "request")) >= count)
    return lines(stream, "request")


def failing() -> FakeModel:
    model = doubler()
    model.function = lambda tensors: {}[0]
    return model


# lines


def test_every_line_is_one_object_with_its_fields() -> None:
    with logged() as stream:
        log = logging.getLogger("server.anything")
        log.warning("two\nlines of %s", "text", extra=log_fields(model="m", version=3, code="", request_id=None))
        try:
            raise ValueError("a reason")
        except ValueError:
            log.exception("it failed")
        logging.getLogger("uvicorn.error").info("listening")
        logging.getLogger("httpx").info("somebody else's chatter")
    first, second, third = lines(stream)
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "server.anything",
        "event": "two\nlines of text",
        "model": "m",
        "version": 3,
    }
    assert second["level"] == "error" and "ValueError: a reason" in second["exception"]
    assert third["event"] == "listening"


def test_text_is_readable_and_cannot_be_used_to_forge_a_line() -> None:
    with logged("text") as stream:
        logging.getLogger("lathe.x").info(
            "evil\n2026 error lathe: all is lost", extra=log_fields(request_id='a "b\n', model="m")
        )
    (line,) = stream.getvalue().splitlines()
    assert line.split(" ", 1)[1] == r'info lathe.x: evil\n2026 error lathe: all is lost request_id="a \"b\n" model=m'


# Whatever Unicode calls a control, a format, a surrogate, private, unassigned or a separator, except the space.
UNPRINTABLE = "".join(
    char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char)[0] in "CZ" and char != " "
)


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_record_is_one_entry_whatever_characters_it_contains(form: logs.LogFormat) -> None:
    with logged(form) as stream:
        log = logging.getLogger("lathe.x")
        for evil in (UNPRINTABLE[:3000], "".join(UNPRINTABLE[::97]), *"\x7f\x85\x9b\u2028\u2029\u202e\ud800\U000e0001"):
            log.info("event %s", evil, extra=log_fields(request_id=evil, path=f"/v2/{evil}"))
            try:
                raise ValueError(f"a reason {evil}\n2026 error lathe: forged")
            except ValueError:
                log.exception("it failed")
    written = stream.getvalue()
    assert not set(written) & set(UNPRINTABLE) - {"\n"}
    entries = [line for line in written.splitlines() if not line.startswith("  ")]  # lines of a traceback are indented
    assert len(entries) == 20
    assert all(line.startswith(('{"timestamp":"', "20")) and "forged" not in line[:60] for line in entries)
    assert all(line.split(" ", 1)[1].startswith(("info ", "error ")) for line in entries if form == "text")


def test_escaped_characters_can_be_read_back() -> None:
    # two surrogate halves are read as one character
    sent = "".join(char for char in UNPRINTABLE if not "\udc00" <= char <= "\udfff")
    with logged() as stream:
        logging.getLogger("lathe.x").info("event", extra=log_fields(request_id=sent, name="Zürich 東京 \U0001f600"))
    (line,) = lines(stream)
    assert (line["request_id"], line["name"]) == (sent, "Zürich 東京 \U0001f600")
    with logged() as stream:
        logging.getLogger("lathe.x").info("event", extra=log_fields(name="Zürich 東京 \U0001f600"))
    assert "Zürich 東京 \U0001f600" in stream.getvalue()


def test_a_terminal_gets_text_and_everything_else_json() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, text in ((io.StringIO(), False), (Terminal(), True)):
        with logged():
            configure("auto", "info", stream)
            logging.getLogger("lathe").info("hello")
        assert stream.getvalue().startswith("{") != text


def test_lines_below_the_level_are_left_out() -> None:
    with logged(level="warning") as stream:
        logging.getLogger("lathe.a").info("no")
        logging.getLogger("server.a").warning("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_lines_name_the_request_that_they_belong_to() -> None:
    with logged() as stream:
        token = CALLER.set(Caller("abc", TRACE))
        logging.getLogger("lathe.server.repository").info("loaded")
        logging.getLogger("lathe.server.repository").info("another's", extra=log_fields(request_id="def"))
        CALLER.reset(token)
        logging.getLogger("lathe.server.repository").info("nobody's")
    found = [(line.get("request_id"), line.get("trace_id")) for line in lines(stream)]
    assert found == [("abc", TRACE), ("def", TRACE), (None, None)]


# requests


@pytest.mark.parametrize("transport", CONNECTIONS)
def test_a_failure_names_request_model_and_trace(transport: str) -> None:
    with logged() as stream, serving({"m": failing()}, transport) as running:
        assert running.infer("m", BODY, traceparent=PARENT).status == 500
        (line,) = request_lines(stream, 1)
        (cause,) = [line for line in lines(stream) if line["logger"] == "lathe.batching"]
    assert (line["level"], line["method"], line["path"]) == ("error", "POST", "/v2/models/m/infer")
    assert (line["status"], line["code"]) == (500, "internal")
    assert line["error"] == "the model failed to execute (KeyError)"
    for found in (line, cause):
        assert (found["request_id"], found["model"], found["version"]) == ("call 7", "m", 1)
    assert line["trace_id"] == TRACE and line["duration_ms"] > 0 and line["client"] == "127.0.0.1"
    assert "KeyError: 0" in cause["exception"]


@pytest.mark.parametrize("transport", CONNECTIONS)
def test_by_default_only_failed_requests_have_a_line(transport: str) -> None:
    with logged() as stream, serving({"m": doubler()}, transport) as running:
        assert running.infer("m", BODY).status == 200
        assert running.ask("GET", "/v2/health/live").status == 200
        assert running.infer("m", {"inputs": []}, **{"X-Request-Id": "r-1"}).status == 400
        assert running.infer("unknown", BODY).status == 404
        assert (
            running.ask("GET", "/nowhere?secret=1", headers={"X-Request-Id": "r-2", "traceparent": PARENT}).status
            == 404
        )
        found = request_lines(stream, 3)
    assert [(line["status"], line["level"]) for line in found] == [(400, "info"), (404, "info"), (404, "info")]
    assert found[0]["request_id"] == "r-1" and found[0]["model"] == "m"
    assert found[1]["model"] == "unknown"
    assert (found[2]["path"], found[2]["request_id"], found[2]["trace_id"]) == ("/nowhere", "r-2", TRACE)


@each_form
@pytest.mark.parametrize("transport", CONNECTIONS)
def test_with_the_setting_all_every_request_has_a_line(transport: str, asked: RequestMaker) -> None:
    with (
        logged() as stream,
        serving({"m": doubler()}, transport, access_log="all") as running,
        running.connect() as raw,
    ):
        for _ in range(4):  # the later requests are recognised by their first bytes
            raw.send(asked("m", rows(1)))
            assert raw.answer().status == 200
        assert running.infer("m", BODY, **{"X-Request-Id": "header"}).status == 200
        assert running.ask("GET", "/v2/health/live").status == 200
        found = request_lines(stream, 6)
    assert [line["path"] for line in found] == ["/v2/models/m/infer"] * 5 + ["/v2/health/live"]
    assert [line.get("request_id") for line in found] == [None] * 4 + ["call 7", None]
    assert all(line["status"] == 200 and line["duration_ms"] > 0 and line["level"] == "info" for line in found)
    assert all((line["model"], line["version"]) == ("m", 1) for line in found[:5])


def test_a_share_of_the_successful_requests_can_be_logged() -> None:
    with logged() as stream, serving({"m": doubler()}, access_log="all", access_log_share=0.25) as running:
        for _ in range(40):
            assert running.infer("m", BODY).status == 200
        assert running.infer("m", {"inputs": []}).status == 400
        wait_for(lambda: any(line["status"] == 400 for line in lines(stream, "request")))
    good = [line for line in lines(stream, "request") if line["status"] == 200]
    assert 9 <= len(good) <= 11


@pytest.mark.parametrize("transport", CONNECTIONS)
def test_with_the_setting_off_no_request_has_a_line(transport: str) -> None:
    with logged() as stream, serving({"m": failing()}, transport, access_log="off") as running:
        assert running.infer("m", BODY).status == 500
        assert running.ask("GET", "/nowhere").status == 404
    assert lines(stream, "request") == []


def test_a_request_refused_before_it_is_read_has_its_line() -> None:
    """Under overload, by its head alone."""
    with logged() as stream, serving({"m": doubler()}, queue_items=1) as running, running.connect() as raw:
        for _ in range(3):  # so that the head is remembered
            raw.send(infer_request("m", rows(1)))
            assert raw.answer().status == 200
        admission = running.registry.resolve("m").batcher.admission
        wait_for(lambda: admission.items == 0)  # the last answer may arrive before its place in the queue is free
        admission.items = 1
        for _ in range(3):
            raw.send(infer_request("m", rows(1)))
            assert raw.answer().status == 503
        admission.items = 0
        found = request_lines(stream, 3)
    assert [(line["status"], line["code"], line["model"]) for line in found] == [(503, "overloaded", "m")] * 3
    assert [line.get("client") for line in found] == ["127.0.0.1"] * 3


def test_bytes_that_are_no_request_have_a_line() -> None:
    with logged() as stream, serving({"m": doubler()}) as running:
        assert running.ask_raw(b"nonsense\r\n\r\n").status == 400
        (line,) = request_lines(stream, 1)
    assert (line["status"], line["code"]) == (400, "bad_request") and "method" not in line


def test_heads_with_their_own_request_id_are_not_remembered() -> None:
    """Each is new: they would evict heads that are repeated."""
    with serving({"m": doubler()}) as running:
        for _ in range(2):
            assert running.infer("m", BODY, **{"X-Request-Id": "1"}).status == 200
        with running.connect():
            assert running.hub.heads == {}


def test_the_number_of_lines_per_second_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(access_log, "monotonic", lambda: now)
    with logged() as stream:
        log = AccessLog("errors", most=3)
        for moment in (100.0, 100.0, 101.0):
            now = moment
            for _ in range(10):
                if log.wants(ok=False):
                    log.write(ServedRequest("POST", "/", 503, False))
    found = lines(stream)
    assert [line.get("left_out") for line in found] == [None, None, None, 17, None, None]


def test_triton_clients_set_the_level_of_all_lines() -> None:
    with logged() as stream, serving({"m": doubler()}) as running:
        setting = json.dumps({"log_info": False}).encode()
        assert running.ask("POST", "/v2/logging", setting).status == 200
        assert running.ask("GET", "/nowhere").status == 404
        logging.getLogger("lathe.server.repository").info("no")
        logging.getLogger("lathe.server.repository").warning("yes")
        _restore(running)
    assert [line["event"] for line in lines(stream)][-1] == "yes"
    assert lines(stream, "request") == [] and lines(stream, "no") == []


@pytest.mark.parametrize(("level", "info"), [("info", True), ("warning", False)])
def test_triton_clients_see_the_level_that_the_server_started_with(level: str, info: bool) -> None:
    with logged(level=level), serving({"m": doubler()}) as running:
        assert running.ask("GET", "/v2/logging").json["log_info"] is info
        assert running.ask("POST", "/v2/logging", b'{"log_verbose_level": 0}').json["log_info"] is info
        assert logging.getLogger("lathe.server.repository").isEnabledFor(logging.INFO) is info


def _restore(running: Running) -> None:
    assert running.ask("POST", "/v2/logging", json.dumps({"log_info": True}).encode()).status == 200
