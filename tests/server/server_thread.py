"""A running server in a thread of this process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lathe.server.serve import LatheServer


@contextmanager
def in_a_thread(server: LatheServer, patience: float = 20) -> Iterator[int]:
    """Run a server, which logs errors only, until the end of the block; yields its port.

    Fails the test when the server takes longer than `patience` seconds to stop."""
    log = logging.getLogger("uvicorn.error")
    level = log.level
    log.setLevel(logging.ERROR)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(patience)
        log.setLevel(level)
        assert not thread.is_alive()


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Return when the condition holds; fail the test if it does not hold in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)
