"""The inputs that a session makes itself: as long as numbers that are fed (`core.passes.fed_sizes`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from core.errors import FeedError
from core.ir.types import ValueType
from core.passes.fed_sizes import shadows_of

_LONGEST = 2**31 - 1  # nobody reads the elements, so the pages of a long shadow are never made


class ShadowInputs:
    """What callers feed, and what is made of it."""

    def __init__(self, inputs: Mapping[str, ValueType]) -> None:
        self._sources = shadows_of(inputs)
        self.callers = {name: type_ for name, type_ in inputs.items() if name not in self._sources}

    def beside(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """The feeds, with a shadow for each number that has one. FeedError for a shadow that is fed, and for a number
        that is no length; whether the number is there, and of the right type, is for others to say."""
        if not self._sources:
            return feeds
        for name in self._sources:
            if name in feeds:
                raise FeedError(f"unknown input '{name}'; the model has {', '.join(self.callers)}")
        made = {name: self._shadow(source, feeds[source]) for name, source in self._sources.items() if source in feeds}
        return {**feeds, **made}

    def _shadow(self, source: str, number: Any) -> Any:
        array = np.asarray(number)
        length = int(array.reshape(-1)[0]) if array.dtype.kind in "iu" and array.size == 1 else 0
        if length > _LONGEST:
            raise FeedError(f"input '{source}' is {length}, expected a length of at most {_LONGEST}")
        return np.empty(max(length, 0), np.uint8)
