"""The states of a version in this process.

    STAGED -> VERIFYING -> PUBLISHED -> COMPILING -> LOADING -> READY -> DRAINING -> UNLOADED
                                            ^---------------------------------'----------'
    COMPILING, LOADING -> FAILED -> COMPILING (on a load call, or when the folder changed)

An upload is verified, compiled and loaded before it has a number, so it appears as PUBLISHED and is READY at once; a
refused upload never appears. A version found on disk starts at PUBLISHED. An uploaded version's folder exists a moment
before the version is READY. A sync may find the folder then, and load the version, fail, or unload it again. So
PUBLISHED, FAILED, DRAINING and UNLOADED may be followed by READY, which the diagram leaves out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class State(enum.Enum):
    """The state of a version in this process."""

    STAGED = "staged"  # the upload is being received
    VERIFYING = "verifying"  # child processes parse and compile it
    PUBLISHED = "published"  # durable, not in memory
    COMPILING = "compiling"  # its artifact is looked up in the cache, or compiled
    LOADING = "loading"  # the artifact is loaded, and run once
    READY = "ready"  # answers requests
    DRAINING = "draining"  # its last requests finish
    UNLOADED = "unloaded"  # no longer in memory
    FAILED = "failed"  # could not be loaded; the reason says why


_NEXT: Mapping[State, frozenset[State]] = {
    State.STAGED: frozenset({State.VERIFYING}),
    State.VERIFYING: frozenset({State.PUBLISHED}),
    State.PUBLISHED: frozenset({State.COMPILING, State.READY}),
    State.COMPILING: frozenset({State.LOADING, State.FAILED}),
    State.LOADING: frozenset({State.READY, State.FAILED}),
    State.READY: frozenset({State.DRAINING}),
    State.DRAINING: frozenset({State.UNLOADED, State.COMPILING, State.READY}),  # loaded again meanwhile
    State.UNLOADED: frozenset({State.COMPILING, State.READY}),
    State.FAILED: frozenset({State.COMPILING, State.READY}),
}


class IllegalTransition(RuntimeError):
    """A state was set that may not follow the present one: a bug of the server."""


@dataclass(frozen=True, slots=True)
class Status:
    """A version's state, and the reason if it failed."""

    state: State = State.PUBLISHED
    reason: str = ""

    def to(self, state: State, reason: str = "") -> Status:
        """Return the status with `state`; raises IllegalTransition if `state` may not follow the present one."""
        if state not in _NEXT[self.state]:
            raise IllegalTransition(f"{self.state.value} -> {state.value}")
        return Status(state, reason)
