"""File descriptors: as many as the system grants, some of them kept for what is not a client's connection."""

from __future__ import annotations

import contextlib
import logging
import os
import resource

from server.api.slots import RESERVE as SPARE_CONNECTIONS
from server.settings import Settings

KEPT = 256  # descriptors for the repository, its journals, jobs and children; a child's start takes about ten
ENOUGH = 1 << 20  # no server needs more, and some systems allow a thousand times as many

log = logging.getLogger("lathe.server")


def limit() -> int:
    """Return how many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> int:
    """Let this process have as many descriptors as it may give itself; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = limit()
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def fit(settings: Settings) -> Settings:
    """Return settings whose connections leave descriptors for everything else; fewer connections are warned of.

    As PostgreSQL (set_max_safe_fds) and nginx (worker_rlimit_nofile) do: a server that starts serves.
    """
    allowed = raise_limit()
    protocols = 2 if settings.grpc_port is not None else 1  # each of which may have so many connections
    room = (allowed - KEPT - open_ones()) // protocols - SPARE_CONNECTIONS
    if room >= settings.max_connections:
        return settings
    log.warning(
        "LATHE_MAX_CONNECTIONS: %d connections do not fit into %d file descriptors, of which %d are kept for other "
        "things: at most %d connections are served; raise the limit (ulimit -n, LimitNOFILE, ulimits of a container)",
        settings.max_connections,
        allowed,
        KEPT,
        max(1, room),
    )
    return settings.model_copy(update={"max_connections": max(1, room)})


def open_ones() -> int:
    """Return how many descriptors are open, as the system lists them; where it does not, the few of a start."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 16
