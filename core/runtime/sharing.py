"""Weights that are equal are in memory once, whichever executables of the process use them.

The code of a model's shapes, and successive versions of a model, mostly hold the same weights in the same layout, each
in a file of its own. The file names its large pieces by digest. Who loads a piece that somebody has in memory already
computes with that one, and lets go of the pages that checking its own file has brought in.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from core.runtime.bundle import Bytes, Chunks
from core.runtime.memory import address_of

_LARGE = 64 << 10  # bytes of a piece that is worth looking for

_known: WeakValueDictionary[str, Bytes] = (
    WeakValueDictionary()
)  # digest -> where the piece lies, while somebody holds it
_lock = threading.Lock()


class Pieces:
    """The chunks of a weight block as they pass by. `noted` has those that others may have, too, once all have passed:
    offset, bytes, SHA-256."""

    def __init__(self, chunks: Chunks) -> None:
        self.noted: list[tuple[int, int, str]] = []
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes | memoryview]:
        at = 0
        for chunk in self._chunks:
            if len(chunk) >= _LARGE:
                self.noted.append((at, len(chunk), hashlib.sha256(chunk).hexdigest()))
            at += len(chunk)
            yield chunk


class SharedWeights:
    """A block of weights, parts of which lie elsewhere. What the block holds itself stays readable in full."""

    def __init__(self, block: Bytes, pieces: Sequence[tuple[int, int, str]] = ()) -> None:
        """`pieces` are what `Pieces` noted of this very block, in their order."""
        self.block = block
        self._held = [_shared(block[at : at + size], digest) for at, size, digest in pieces]
        self._starts = [at for at, _, _ in pieces]
        self._ends = [at + size for at, size, _ in pieces]
        own = address_of(block)
        self._moved = [address_of(held) - own - at for held, at in zip(self._held, self._starts, strict=True)]
        for at, end, moved in zip(self._starts, self._ends, self._moved, strict=True):
            if moved:
                _let_go(block, at, end)

    def offset(self, offset: int) -> int:
        """Where the byte at an offset of the block lies, from the block's address on."""
        index = bisect_right(self._starts, offset) - 1
        return offset + (self._moved[index] if index >= 0 and offset < self._ends[index] else 0)


def _shared(piece: Bytes, digest: str) -> Bytes:
    """The piece of this digest that is in memory already, else this one from now on."""
    with _lock:
        return _known.setdefault(digest, piece)


def _let_go(block: NDArray[np.uint8], start: int, end: int) -> None:
    """Drop the pages between two offsets of a mapped file; they come back from there if somebody looks."""
    base: object = block.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap) or block.flags.writeable or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        with suppress(OSError):  # nothing but memory is lost
            mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
