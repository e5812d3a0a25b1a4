"""The states of a version in this process.

    STAGED -> VERIFYING -> PUBLISHED -> COMPILING -> LOADING -> READY -> DRAINING -> UNLOADED
                                            ^---------------------------------'----------'
    COMPILING, LOADING -> FAILED -> COMPILING (on a load call, or when the folder changed)

An upload is verified, compiled and loaded before it has a number, so it appears as PUBLISHED and is READY at once; a
refused one never appears. A version found on disk starts at PUBLISHED. So may an upload's: its folder is there a moment
before it is READY, and who looks at the disk then may load it, fail, or let it go again; it is READY all the same.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class State(enum.Enum):
    """Where a version is on its way."""

    STAGED = "staged"  # bytes are coming in
    VERIFYING = "verifying"  # child processes parse and compile it
    PUBLISHED = "published"  # durable, not in memory
    COMPILING = "compiling"  # on disk; its artifact is being looked up or made
    LOADING = "loading"  # artifact into memory, warm-up run
    READY = "ready"  # answers requests
    DRAINING = "draining"  # lets its last requests finish
    UNLOADED = "unloaded"  # was in memory, is no more
    FAILED = "failed"  # could not be loaded; the reason says why


_NEXT: Mapping[State, frozenset[State]] = {
    State.STAGED: frozenset({State.VERIFYING}),
    State.VERIFYING: frozenset({State.PUBLISHED}),
    State.PUBLISHED: frozenset({State.COMPILING, State.READY}),
    State.COMPILING: frozenset({State.LOADING, State.FAILED}),
    State.LOADING: frozenset({State.READY, State.FAILED}),
    State.READY: frozenset({State.DRAINING}),
    State.DRAINING: frozenset({State.UNLOADED, State.COMPILING, State.READY}),  # wanted before its last requests end
    State.UNLOADED: frozenset({State.COMPILING, State.READY}),
    State.FAILED: frozenset({State.COMPILING, State.READY}),
}


class IllegalTransition(RuntimeError):
    """A version was moved to a state that does not follow its own: a fault of the server."""


@dataclass(frozen=True, slots=True)
class Status:
    """A version's state, and why it failed."""

    state: State = State.PUBLISHED
    reason: str = ""

    def to(self, state: State, reason: str = "") -> Status:
        """Return the next status; raises IllegalTransition."""
        if state not in _NEXT[self.state]:
            raise IllegalTransition(f"{self.state.value} -> {state.value}")
        return Status(state, reason)
