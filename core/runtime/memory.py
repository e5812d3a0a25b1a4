"""Aligned memory, and arrays over addresses."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
_LARGE = 1 << 20  # bytes
_MUCH = 16 << 20
_CGROUP = Path("/sys/fs/cgroup")
_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
_option: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_MAPS = Path("/proc/self/maps")
_word_at: Callable[[int], ctypes.c_size_t] = ctypes.c_size_t.from_address


def machine_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory of this machine, or less where the container may use less (cgroup v2 or v1)."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return min(total, int((cgroup / name).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Uninitialised bytes whose address is a multiple of 64.

    Large blocks are mapped one by one: the C library keeps freed ones for itself once it has seen a few.
    """
    if size >= _LARGE:
        return np.frombuffer(_mapped(size), np.uint8)
    block = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -block.ctypes.data % _ALIGNMENT
    return block[offset : offset + size]


def _mapped(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size)
    prefer_huge_pages(block)
    return block


def prefer_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for pages of 2 MiB, where there are such (Linux)."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel, or a file system, without them
            mapping.madvise(mmap.MADV_HUGEPAGE)


def give_back(used: int) -> None:
    """After work that left much behind: collect it, and return to the system what the C library keeps (glibc).

    `used` is about how many bytes that may be; little is not worth looking for.
    """
    if is_much(used):
        gc.collect()
        if _trim is not None:
            _trim(0)


def is_much(used: int) -> bool:
    """Whether so many bytes are worth some milliseconds to give them back."""
    return used >= _MUCH


def block_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array that others are parts of: this one, or the one that it is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def let_go(array: NDArray[Any], start: int = 0, end: int | None = None) -> None:
    """Drop the pages between two bytes of an array over a file that is mapped read-only; they come back from there if
    somebody looks. Nothing for other memory."""
    base: object = array.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap) or array.flags.writeable or not hasattr(mmap, "MADV_DONTNEED"):
        return
    last = (array.nbytes if end is None else end) // mmap.PAGESIZE * mmap.PAGESIZE
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if first < last:
        with suppress(OSError):  # nothing but memory is lost
            mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def drop_code(library: str) -> None:
    """Take the code of a library that is seldom called out of this process's memory (Linux): it comes back from its
    file, page by page, when it is called. Threads that are in it meanwhile only wait for a page.

    Only pages of code are dropped, which nobody writes to, so that the file has all there is to know.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    with suppress(OSError):  # no such file system as /proc
        for line in _MAPS.read_text().splitlines():
            place, access, *_, path = line.split(maxsplit=5)
            if access == "r-xp" and Path(path).name.startswith(library):
                start, end = (int(part, 16) for part in place.split("-"))
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def share_heaps(most: int) -> None:
    """Let threads that are still to come share so many heaps of the C library (glibc); each would have its own.

    What threads of a long life free in turn is then used again by the others; kept apart, it adds up.
    """
    _choose(_M_ARENA_MAX, most)


def keep_freed(size: int) -> None:
    """Let the C library keep freed blocks of up to `size` bytes, and twice as much in all, for those that come next
    (glibc); it would return each to the system.

    A page that is new to the process costs a fault: that is nine tenths of the time to copy a large block into it.
    """
    _choose(_M_MMAP_THRESHOLD, size)
    _choose(_M_TRIM_THRESHOLD, 2 * size)


def _choose(option: int, value: int) -> None:
    """Set an option of the C library. Others than glibc number theirs otherwise, or have none."""
    if _option is not None and _trim is not None:
        _option(option, value)


def joined(chunks: Iterable[bytes | memoryview], size: int) -> NDArray[np.uint8]:
    """Pieces of `size` bytes in all, one after the other in aligned memory."""
    block, at = aligned_bytes(size), 0
    for chunk in chunks:
        block[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    return block


def aligned_words(count: int) -> NDArray[np.int64]:
    """Zeroed 64-bit words whose address is a multiple of 64."""
    words = aligned_bytes(count * 8).view(np.int64)
    words[:] = 0
    return words


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first element: five times faster than `array.ctypes`, for every array."""
    return _word_at(id(array) + ELEMENTS_AT).value


def _elements_at() -> int:
    """Where the object of an array holds the address of its elements: first, behind what every object has. Extensions
    are compiled for that, so no release of NumPy moves it within its bounds in pyproject.toml."""
    array, offset = np.zeros(1, np.uint8), object.__basicsize__
    if _word_at(id(array) + offset).value != array.ctypes.data:
        raise ImportError(f"NumPy {np.__version__} keeps the address of an array elsewhere than expected")
    return offset


def array_at(address: int, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
    """An array over memory that somebody else keeps alive."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return np.empty(shape, dtype)
    block: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(block, dtype=dtype).reshape(shape)


ELEMENTS_AT = _elements_at()
