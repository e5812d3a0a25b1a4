"""Weights that are equal are in memory once, whichever executables of the process use them.

The code of a model's shapes, and successive versions of a model, mostly hold the same weights in the same layout, each
in a file of its own, which has the digests of its large pieces. Who loads a piece that somebody has in memory already
computes with that one, and lets go of the pages that checking its own file has brought in.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from weakref import WeakValueDictionary

from core.runtime.bundle import LARGE, Bytes, Span
from core.runtime.memory import address_of, let_go

_known: WeakValueDictionary[str, Bytes] = (
    WeakValueDictionary()
)  # digest -> where the piece lies, while somebody holds it
_lock = threading.Lock()


class SharedWeights:
    """A block of weights, parts of which lie elsewhere. What the block holds itself stays readable in full."""

    def __init__(self, block: Bytes, spans: Iterable[Span] = ()) -> None:
        """`spans` are those of this very block, in their order; large ones are looked for."""
        pieces = [span for span in spans if span.nbytes >= LARGE]
        self.block = block
        self._held = [_shared(block[piece.offset : piece.offset + piece.nbytes], piece.sha256) for piece in pieces]
        self._starts = [piece.offset for piece in pieces]
        self._ends = [piece.offset + piece.nbytes for piece in pieces]
        own = address_of(block)
        self._moved = [address_of(held) - own - at for held, at in zip(self._held, self._starts, strict=True)]
        for at, end, moved in zip(self._starts, self._ends, self._moved, strict=True):
            if moved:
                let_go(block, at, end)

    def offset(self, offset: int) -> int:
        """Where the byte at an offset of the block lies, from the block's address on."""
        index = bisect_right(self._starts, offset) - 1
        return offset + (self._moved[index] if index >= 0 and offset < self._ends[index] else 0)


def _shared(piece: Bytes, digest: str) -> Bytes:
    """The piece of this digest that is in memory already, else this one from now on."""
    with _lock:
        return _known.setdefault(digest, piece)
