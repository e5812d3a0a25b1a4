"""File descriptors: raises the limit of this process, and reserves some for other things than connections."""

from __future__ import annotations

import contextlib
import logging
import os
import resource

from lathe.server.settings import Settings

SPARE_CONNECTIONS = 64  # connections accepted beyond the limit, for health checks and to answer refusals
RESERVED = 256  # reserved for the repository, its journals, jobs and children; starting a child takes about ten
MAX_DESCRIPTORS = 1 << 20  # more than any server needs; some systems allow a thousand times as many

log = logging.getLogger("lathe.server")


def limit() -> int:
    """Return the limit of file descriptors of this process (soft RLIMIT_NOFILE)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> int:
    """Raise the soft limit of file descriptors to the hard limit, at most `MAX_DESCRIPTORS`; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than their hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = limit()
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def fit_connections(settings: Settings) -> Settings:
    """Raise the limit of descriptors, and return settings with `max_connections` lowered to what it allows.

    Logs a warning if it lowers `max_connections`. As in PostgreSQL (set_max_safe_fds) and nginx (worker_rlimit_nofile),
    a low limit does not prevent the start.
    """
    allowed = raise_limit()
    protocols = 2 if settings.grpc_port is not None else 1  # each may have `max_connections` connections
    room = (allowed - RESERVED - open_count()) // protocols - SPARE_CONNECTIONS
    if room >= settings.max_connections:
        return settings
    log.warning(
        "LATHE_MAX_CONNECTIONS: %d connections do not fit into %d file descriptors, of which %d are reserved for other "
        "things: at most %d connections are served; raise the limit (ulimit -n, LimitNOFILE, ulimits of a container)",
        settings.max_connections,
        allowed,
        RESERVED,
        max(1, room),
    )
    return settings.model_copy(update={"max_connections": max(1, room)})


def open_count() -> int:
    """Return the number of open descriptors; 16, as many as a starting server has, if the system does not list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 16
