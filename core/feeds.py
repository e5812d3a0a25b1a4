"""Feeds: the arrays that a run gets, by the names of the model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lathe.core.errors import FeedError


def check_feeds(feeds: Any, names: Iterable[str]) -> None:
    """Raise FeedError unless `feeds` is a mapping. `names` are those of the inputs, for the message."""
    if not isinstance(feeds, Mapping):
        example = ", ".join(f"{name!r}: array" for name in names)
        raise FeedError(f"expected a mapping from names to arrays, {{{example}}}, got {type(feeds).__name__}")


def feeds_from_call(names: Collection[str], arrays: Sequence[Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the feeds of a call `session(...)`: one positional array for the only input, or arrays by name.

    FeedError for any other arguments. It does not check that the names are those of inputs; the run does.
    """
    if not arrays:
        return named
    if named or len(arrays) > 1 or len(names) != 1:
        count = f"{len(arrays)} without a name" + (f" and {', '.join(named)}" if named else "")
        expected = "one array" if len(names) == 1 else "arrays by name: " + ", ".join(f"{name}=..." for name in names)
        raise FeedError(f"expected {expected}, got {count}")
    if isinstance(arrays[0], Mapping):
        raise FeedError("expected an array, got a mapping, which `run` takes")
    return dict(zip(names, arrays, strict=True))
