"""`Source`: what an encoder-decoder reads before it generates a text."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from lathe.core.ir.graph import Array


class Source:
    """The encoder's input for one text: tokens int64 [length] for T5, a spectrogram float32 [mels, frames] for Whisper.

    `encoded` has the keys and values of each decoder layer, once the runner has computed them. They live as long as
    the requests that have this source.
    """

    def __init__(self, array: Array) -> None:
        self.array = np.ascontiguousarray(array)
        self.encoded: list[Array] | None = None

    @cached_property
    def key(self) -> bytes:
        """Equal for equal arrays: BLAKE2b of type, shape and elements."""
        found = hashlib.blake2b(f"{self.array.dtype}{self.array.shape}".encode(), digest_size=16)
        found.update(self.array.tobytes())
        return found.digest()
