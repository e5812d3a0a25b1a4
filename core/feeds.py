"""What a model is fed: arrays by the names of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from core.errors import FeedError


def check_feeds(feeds: Any, names: Iterable[str]) -> None:
    """Raise FeedError unless `feeds` is a mapping; `names`: of the inputs, for the message."""
    if not isinstance(feeds, Mapping):
        example = ", ".join(f"{name!r}: array" for name in names)
        raise FeedError(f"expected a mapping from names to arrays, {{{example}}}, got {type(feeds).__name__}")
