"""Suggests a model name for a misspelled one."""

from __future__ import annotations

import difflib
from itertools import islice

from lathe.server.access.authority import Caller
from lathe.server.access.scopes import Scope
from lathe.server.errors import UnknownModel

_APART = 3  # the largest difference in length, in characters, of a suggestion
_MOST = 100  # names that are compared: about a millisecond on the event loop


def with_suggestion(error: UnknownModel, caller: Caller) -> UnknownModel:
    """Return an error that suggests the nearest model name that the caller may read; `error` itself if none is near."""
    near = nearest_name(error, caller)
    return UnknownModel(f"{error.message}, did you mean {near!r}?") if near else error


def nearest_name(error: UnknownModel, caller: Caller) -> str:
    """Return the nearest model name that the caller may read; empty if none is near.

    Compares the first `_MOST` names that share the first or last character and differ in length by at most `_APART`.
    A name is near if the ratio of `difflib` is at least 0.7.
    """
    wanted = error.model
    if len(wanted) < 2:
        return ""
    similar = (
        name
        for name in error.known
        if abs(len(name) - len(wanted)) <= _APART
        and (name[0] == wanted[0] or name[-1] == wanted[-1])
        and caller.is_allowed(Scope.READ, name)
    )
    found = difflib.get_close_matches(wanted, islice(similar, _MOST), n=1, cutoff=0.7)
    return found[0] if found else ""
