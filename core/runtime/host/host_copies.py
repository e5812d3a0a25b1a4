"""Copies between large arrays of the host, in pieces and by several threads.

One thread copies about 10 GB/s, a fraction of what PCI Express carries, and new memory costs it a page fault for every
4 KiB. Pieces that are copied can travel to a device while the next are being copied.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.runtime.host.cpus import available_cpus

LARGE = 4 << 20  # bytes from which pieces pay off: starting a thread's copy takes as long as copying 100 KB
_MOST_PIECES = 8
_PIECE = 1 << 20  # the least bytes of a piece
_PAGE = 1 << 12  # pieces begin at multiples of it
_MOST_THREADS = 4  # more gain nothing beyond the rate of PCI Express


def pieces_of(nbytes: int) -> list[tuple[int, int]]:
    """The (begin, end) of at most eight pieces of about equal size that cover `nbytes` bytes; none for 0 bytes."""
    count = max(min(nbytes // _PIECE, _MOST_PIECES), 1)
    size = -(-nbytes // (count * _PAGE)) * _PAGE
    return [(begin, min(begin + size, nbytes)) for begin in range(0, nbytes, size)] if nbytes else []


def copy_in_pieces(target: NDArray[Any], source: NDArray[Any]) -> Generator[tuple[int, int], None, None]:
    """Copy a contiguous array to another one of equal size; yield the (begin, end) of each piece when it is copied.

    The pieces come in order. All copies have ended when the iteration does, also if the caller stops early.
    """
    pieces = pieces_of(target.nbytes)
    copies = [copy_piece(target, source, *piece) for piece in pieces]
    try:
        for piece, each in zip(pieces, copies, strict=True):
            each.result()
            yield piece
    finally:
        wait(copies)


def copy_piece(target: NDArray[Any], source: NDArray[Any], begin: int, end: int) -> Future[None]:
    """Start to copy the bytes from `begin` to `end` of a contiguous array to another one."""
    to, out_of = (array.reshape(-1).view(np.uint8)[begin:end] for array in (target, source))
    return copy_pool().submit(np.copyto, to, out_of)


@cache
def copy_pool() -> ThreadPoolExecutor:
    """The threads of this process that copy; NumPy releases the interpreter lock while it copies."""
    return ThreadPoolExecutor(min(available_cpus(), _MOST_THREADS), "lathe-copy")


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=copy_pool.cache_clear)  # a child process has none of the threads
