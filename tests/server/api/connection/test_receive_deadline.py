"""The deadlines of a message: for its head, its body, an upload, and the rest of a message that is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lathe.server.api.connection.receive_deadline import (
    ALLOWANCE,
    LINGER,
    LINGER_PAUSE,
    STOP_GRACE,
    ReceiveDeadline,
)
from lathe.server.settings import Settings

SETTINGS = Settings(header_timeout=10, body_timeout=30, upload_timeout=1000, min_receive_rate=100)


def due(deadline: ReceiveDeadline) -> int:
    """The last whole second that is not late, by a look at each; 100_000: nothing is due."""
    return next((at - 1 for at in range(2000) if deadline.has_passed(at, reading=True)), 100_000)


def an_upload(deadline: ReceiveDeadline) -> None:
    deadline.start_body(0)
    deadline.start_upload(0)


@pytest.mark.parametrize(
    ("event", "seconds"),
    [
        (lambda deadline: None, 100_000),
        (lambda deadline: deadline.start_head(0), 10),
        (lambda deadline: deadline.start_body(0), 30),
        (an_upload, 30),
        (lambda deadline: (an_upload(deadline), deadline.take(2000, 25)), 50),  # the lowest rate
        (lambda deadline: (an_upload(deadline), deadline.take(10**9, 990)), 1000),
        (lambda deadline: (an_upload(deadline), deadline.clear()), 100_000),
        (lambda deadline: (an_upload(deadline), deadline.start_linger(3)), 3 + LINGER_PAUSE),
        (lambda deadline: (deadline.start_body(0), deadline.start_stop(2)), 2 + STOP_GRACE),
        (lambda deadline: (deadline.start_head(0), deadline.start_stop(9)), 10),
    ],
)
def test_a_message_is_late_after_its_deadline(event: Callable[[ReceiveDeadline], object], seconds: float) -> None:
    deadline = ReceiveDeadline(SETTINGS)
    event(deadline)
    assert due(deadline) == seconds


def test_the_rest_of_an_answered_message_may_pause_but_not_last() -> None:
    deadline = ReceiveDeadline(SETTINGS)
    deadline.start_body(0)
    deadline.extend(29)  # no answer yet, so a read changes nothing
    assert due(deadline) == 30
    deadline.start_linger(0)
    for now in range(1, 40):
        deadline.extend(now)
        assert due(deadline) == min(now + LINGER_PAUSE, LINGER)


def test_a_body_must_keep_the_lowest_rate_after_the_allowance() -> None:
    deadline = ReceiveDeadline(SETTINGS)
    deadline.start_body(0)
    assert not deadline.is_too_slow(0, ALLOWANCE)
    assert deadline.is_too_slow(0, ALLOWANCE + 1)
    assert not deadline.is_too_slow(500, ALLOWANCE + 5)
    assert deadline.is_too_slow(500, ALLOWANCE + 6)
    deadline.start_linger(0)
    assert not deadline.is_too_slow(0, ALLOWANCE + 1)
