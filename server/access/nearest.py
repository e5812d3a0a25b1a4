"""The model that a caller may have meant by a name that no model has."""

from __future__ import annotations

import difflib
from itertools import islice

from server.access.authority import Caller
from server.access.scopes import Scope
from server.errors import NotFound, UnknownModel

_APART = 3  # characters that names of one meaning may differ in length
_MOST = 100  # names that are compared: about a millisecond of the event loop


def hinted(error: UnknownModel, caller: Caller) -> NotFound:
    """Return the error as this caller gets it: with the nearest of the names that the caller may read."""
    near = nearest(error, caller)
    return NotFound(f"{error.message}, did you mean {near!r}?") if near else error


def nearest(error: UnknownModel, caller: Caller) -> str:
    """Return the nearest name of a model that the caller may read, empty where none is near."""
    wanted = error.model
    if len(wanted) < 2:
        return ""
    alike = (
        name
        for name in error.known
        if abs(len(name) - len(wanted)) <= _APART
        and (name[0] == wanted[0] or name[-1] == wanted[-1])
        and caller.may(Scope.READ, name)
    )
    found = difflib.get_close_matches(wanted, islice(alike, _MOST), n=1, cutoff=0.7)
    return found[0] if found else ""
