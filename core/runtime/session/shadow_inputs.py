"""Shadow inputs: inputs that the session creates, whose length is a number that the caller feeds.

See `lathe.core.passes.lowering.length_inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lathe.core.errors import FeedError
from lathe.core.ir.types import ValueType
from lathe.core.passes.lowering.length_inputs import length_inputs_of

_MAX_LENGTH = 2**31 - 1  # kernels never read the elements, so the pages of a long shadow are never allocated


class ShadowInputs:
    """Makes the shadow inputs of a model from the inputs that callers feed (`caller_inputs`)."""

    def __init__(self, inputs: Mapping[str, ValueType]) -> None:
        self._sources = length_inputs_of(inputs)
        self.caller_inputs = {name: type_ for name, type_ in inputs.items() if name not in self._sources}

    @property
    def sources(self) -> frozenset[str]:
        """The inputs whose values are lengths of shadow inputs."""
        return frozenset(self._sources.values())

    def beside(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """The feeds, and a shadow input for each fed number that has one: a uint8 array of that length, 0 if negative.

        FeedError for a shadow that is fed, and for a number above 2^31 - 1. The other checks find numbers that are
        missing or of the wrong type.
        """
        if not self._sources:
            return feeds
        for name in self._sources:
            if name in feeds:
                raise FeedError(f"unknown input '{name}'; the model has {', '.join(self.caller_inputs)}")
        made = {name: self._shadow(source, feeds[source]) for name, source in self._sources.items() if source in feeds}
        return {**feeds, **made}

    def _shadow(self, source: str, number: Any) -> Any:
        array = np.asarray(number)
        length = int(array.reshape(-1)[0]) if array.dtype.kind in "iu" and array.size == 1 else 0
        if length > _MAX_LENGTH:
            raise FeedError(f"input '{source}' is {length}, expected a length of at most {_MAX_LENGTH}")
        return np.empty(max(length, 0), np.uint8)
