"""Thousands of ambiguous HTTP streams, read by Lathe, by h11 and by gunicorn's parser.

Where Lathe accepts a request, the others must read the same request or refuse; where the others read more, Lathe
must have refused or closed. Then a proxy in front that reads as they do cannot be made to see other requests than
Lathe (RFC 9112, section 11.2). How the bytes are split into reads changes nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.server.api.connection.differential.grammar import MUTATIONS, make_case
from tests.server.api.connection.differential.lathe import Lathe, Outcome, observed_lathe
from tests.server.api.connection.differential.readers import End, Reading, Request, read_by_gunicorn, read_by_h11
from tests.server.running import infer_request, rows

AT_ONCE = 48  # streams, each on a connection of its own
# SHORT: streams up to this size are also read byte by byte. PIECE: bytes per read of longer streams.
SHORT, PIECE = 2000, 97

# What Lathe refuses although both others accept it: the beginning of its error, and the reason.
REFUSED_ALONE = {
    "request line: CONNECT is not supported": "Lathe is no proxy",
    "request line: not valid HTTP/1.1 (Invalid method": "llhttp knows the registered methods only",
    "request line: not valid HTTP/1.1 (Expected": "methods of other protocols",
    "request line: not valid HTTP/1.1 (Invalid HTTP version": "HTTP/1.2 and the like",
    "request line: expected a path": "fragments, other schemes, users before the host, and targets that are no path",
    "request line: expected the host that the Host header names": "a whole URL for another host than Host names",
    "expected HTTP/1.1 or HTTP/1.0, got HTTP/2": "PRI is the preface of HTTP/2",
    "headers: Host": "values that are no name or address with a port (h11 and gunicorn take any)",
    "headers: expected at most": "32 KiB of request line and headers together",
    "headers: proxy-connection": "in HTTP/1.0: llhttp takes it for Connection",
    "headers: connection": "in HTTP/1.0 both close and keep-alive: llhttp lets the connection stay",
    "headers: expect: expected one at most": "what may be said once",
    "headers: content-type: expected one at most": "what may be said once",
    "headers: upgrade: expected one at most": "what may be said once",
    "body: Invalid character in chunk extensions": "blanks around a chunk's extension (RFC 9112, section 7.1.1)",
    "body: expected at most": "32 KiB of chunk sizes and trailers",
}


@pytest.fixture(scope="module")
def lathe() -> Iterator[Lathe]:
    with observed_lathe() as running:
        yield running


def conflict(mine: Reading, other: Reading) -> str:
    """What Lathe read differently from another reader; "" if that reader refused or closed before it could."""
    for number, (one, two) in enumerate(zip(mine.requests, other.requests, strict=False)):
        if one != two:
            return f"request {number} is {one}, to the other {two}"
    seen, found = len(mine.requests), len(other.requests)
    if seen > found and other.end in (End.IDLE, End.WAITING):
        return f"request {found} is {mine.requests[found]}; of the other {other.end.value}"
    if found > seen and mine.end in (End.IDLE, End.WAITING):
        return f"{mine.end.value}; to the other request {seen} is {other.requests[seen]}"
    return ""


def goes_on_alone(mine: Reading, *others: Reading) -> bool:
    """Whether all others closed the connection after a request, and Lathe read another request after it."""
    return all(other.end is End.CLOSED and len(other.requests) < len(mine.requests) for other in others)


def problems(data: bytes, whole: Outcome, pieces: Outcome) -> Iterator[str]:
    """The errors in how Lathe read a stream, once whole and once in pieces."""
    h11, gunicorn = read_by_h11(data), read_by_gunicorn(data)
    for name, other in (("h11", h11), ("gunicorn", gunicorn)):
        if found := conflict(whole.reading, other):
            yield f"{name}: {found}"
    if goes_on_alone(whole.reading, h11, gunicorn):
        yield "a request behind one that ends the connection"
    if whole.reading != pieces.reading:
        yield f"whole {whole.reading}, in pieces {pieces.reading}"
    status, closes = whole.answered
    if whole.reading.end is End.REFUSED and not (status >= 400 and closes):
        yield f"refused with {status}, closing: {closes}"
    alone = all(len(other.requests) > len(whole.reading.requests) for other in (h11, gunicorn))
    if whole.reading.end is End.REFUSED and alone and not whole.error.startswith(tuple(REFUSED_ALONE)):
        yield f"refused by a rule that is not listed: {whole.error}"


def campaign(lathe: Lathe, seeds: range, caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """Fail for the first stream that is read wrongly; return how often each ending and each mutation occurred."""
    counts: Counter[str] = Counter()
    with caplog.at_level(logging.ERROR):
        for first in range(seeds.start, seeds.stop, AT_ONCE):
            cases = [make_case(seed) for seed in range(first, min(first + AT_ONCE, seeds.stop))]
            streams = [case.data for case in cases]
            small = [1 if len(stream) <= SHORT else PIECE for stream in streams]
            read = zip(cases, lathe.read(streams), lathe.read(streams, small), strict=True)
            for seed, (case, whole, pieces) in enumerate(read, first):
                found = list(problems(case.data, whole, pieces))
                assert not found, f"seed {seed} ({', '.join(case.kinds)}): {found}\n{case.data!r}"
                counts.update([whole.reading.end.name, *case.kinds])
                counts["taken"] += len(whole.reading.requests)
            assert not caplog.records, f"seeds from {first}: {caplog.records[0].getMessage()}"
    return counts


def test_ambiguous_streams_are_refused_or_read_as_by_others(lathe: Lathe, caplog: pytest.LogCaptureFixture) -> None:
    counts = campaign(lathe, range(480), caplog)
    assert all(counts[kind] for kind in MUTATIONS)
    assert counts["taken"] > 150
    assert counts["REFUSED"] > 150


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(10_000, 22_000, 4_000))
def test_many_ambiguous_streams(lathe: Lathe, caplog: pytest.LogCaptureFixture, first: int) -> None:
    counts = campaign(lathe, range(first, first + 4_000), caplog)
    assert all(counts[kind] > 30 for kind in MUTATIONS)


def test_repeated_requests_are_read_like_the_first_one(lathe: Lathe) -> None:
    """Remembered heads, and requests that begin as those before them, bypass the parser."""
    requests = [infer_request("doubler", rows(1, start=start)) for start in range(12)]
    stream = b"".join(requests)
    expected = Reading(read_by_h11(stream).requests, End.IDLE)
    assert len(expected.requests) == 12
    assert len({len(request) for request in requests}) == 1
    for piece in (len(stream), len(requests[0]), len(requests[0]) - 1, 40):
        assert lathe.read([stream], [piece])[0].reading == expected


A, B = Request(b"GET", b"/a", b""), Request(b"POST", b"/b", b"x")


@pytest.mark.parametrize(
    ("mine", "other", "agree"),
    [
        (Reading((A, B), End.IDLE), Reading((A, B), End.IDLE), True),
        (Reading((A,), End.REFUSED), Reading((A, B), End.IDLE), True),
        (Reading((A,), End.CLOSED), Reading((A, B), End.IDLE), True),
        (Reading((A, B), End.IDLE), Reading((A,), End.REFUSED), True),
        (Reading((A,), End.WAITING), Reading((A,), End.IDLE), True),
        (Reading((A, B), End.IDLE), Reading((A,), End.IDLE), False),
        (Reading((A, B), End.IDLE), Reading((A,), End.WAITING), False),
        (Reading((A,), End.WAITING), Reading((A, B), End.IDLE), False),
        (Reading((A,), End.IDLE), Reading((A, B), End.IDLE), False),
        (Reading((B,), End.IDLE), Reading((A,), End.IDLE), False),
        (Reading((A, B), End.REFUSED), Reading((A, A), End.IDLE), False),
    ],
)
def test_what_counts_as_a_conflict(mine: Reading, other: Reading, agree: bool) -> None:
    assert (conflict(mine, other) == "") == agree


@pytest.mark.parametrize(
    ("data", "h11", "gunicorn"),
    [
        (b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n", ((A,), End.IDLE), ((A,), End.IDLE)),
        (b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nGET", ((A,), End.WAITING), ((A,), End.WAITING)),
        (b"GET http://x/a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", ((A,), End.CLOSED), ((A,), End.CLOSED)),
        (b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", ((B,), End.IDLE), ((B,), End.IDLE)),
        (b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nx", ((), End.WAITING), ((), End.WAITING)),
        (b"GET /a HTTP/1.1\nHost: a\n\n", ((A,), End.IDLE), ((), End.REFUSED)),
        (b"GET /a HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n", ((), End.REFUSED), ((), End.REFUSED)),
    ],
)
def test_the_other_readers_give_the_expected_readings(
    data: bytes, h11: tuple[tuple[Request, ...], End], gunicorn: tuple[tuple[Request, ...], End]
) -> None:
    assert (read_by_h11(data), read_by_gunicorn(data)) == (Reading(*h11), Reading(*gunicorn))
