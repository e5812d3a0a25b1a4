"""What all tests of the server share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from server.repository import builder
from server.repository.artifacts import compiler_at_start
from server.telemetry import logs


@pytest.fixture(autouse=True, scope="session")
def _sources_lie_still() -> Iterator[None]:
    """Whoever edits the compiler while the tests run does not upgrade servers, those of whole modules included."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builder, "compiler_now", compiler_at_start)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_logged_to_a_stream_of_an_earlier_test() -> Iterator[None]:
    """`lathe serve` in this process logs to what is stderr then; a runner of commands closes that at its end."""
    levels = {name: logging.getLogger(name).level for name in logs.LOGGERS}
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, logs.JsonLines | logs.TextLines):
            root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
