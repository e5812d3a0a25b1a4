"""Deduplicates weights: equal weights are in memory once, whichever executables of the process use them.

The code of several shapes, and successive versions of a model, mostly have the same weights in the same layout, each in
its own file with a digest per large span. A file whose span is already in memory uses that one, and releases the pages
of its own span that were read for checking its digest.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from weakref import WeakValueDictionary

from lathe.core.runtime.artifact.bundle import LARGE, Bytes, Span
from lathe.core.runtime.host.memory import address_of, release_pages

# The spans in memory by digest, as long as an executable uses them.
_spans_in_memory: WeakValueDictionary[str, Bytes] = WeakValueDictionary()
_lock = threading.Lock()


class DeduplicatedWeights:
    """A block of weights, large spans of which are read from equal spans elsewhere in memory, if there are any.

    `offset` says where. The block itself stays readable in full.
    """

    def __init__(self, block: Bytes, spans: Iterable[Span] = ()) -> None:
        """`spans`: the spans of this block in order. Those of at least `LARGE` bytes are looked up by digest."""
        pieces = [span for span in spans if span.nbytes >= LARGE]
        self.block = block
        self._held = [_share_span(block[piece.offset : piece.offset + piece.nbytes], piece.sha256) for piece in pieces]
        self._starts = [piece.offset for piece in pieces]
        self._ends = [piece.offset + piece.nbytes for piece in pieces]
        own = address_of(block)
        self._displacements = [address_of(held) - own - at for held, at in zip(self._held, self._starts, strict=True)]
        for at, end, moved in zip(self._starts, self._ends, self._displacements, strict=True):
            if moved:
                release_pages(block, at, end)

    def offset(self, offset: int) -> int:
        """The offset, relative to the block's address, at which to read the byte at `offset` of the block.

        It lies outside the block if the byte's span is shared.
        """
        index = bisect_right(self._starts, offset) - 1
        return offset + (self._displacements[index] if index >= 0 and offset < self._ends[index] else 0)


def _share_span(piece: Bytes, digest: str) -> Bytes:
    """The span of this digest that is in memory already; otherwise this one, which is registered."""
    with _lock:
        return _spans_in_memory.setdefault(digest, piece)
