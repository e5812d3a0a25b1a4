"""Aligned memory, arrays over addresses, and returning memory to the system."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
_MAP_ABOVE = 1 << 20  # bytes of a block that is mapped by itself
_ROOM = 4  # times the bytes of a block that may grow: its address space, of which untouched pages take no memory
_HUGE_PAGE = 2 << 20  # bytes; Linux places a mapping at a multiple of it only if its length is one, too
_HUGE_PAGES_ABOVE = 64 << 20  # bytes of a block in huge pages; see `_map_block`
_WORTH_COLLECTING = 16 << 20  # bytes that are worth a garbage collection
_CGROUP = Path("/sys/fs/cgroup")
_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
_option: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h of glibc
_kept = 0  # bytes of free memory that stay with the process (`keep_freed`)
_MAPS = Path("/proc/self/maps")
_word_at: Callable[[int], ctypes.c_size_t] = ctypes.c_size_t.from_address


def machine_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory of this machine in bytes, or the container's limit if that is less (cgroup v2 or v1)."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return min(total, int((cgroup / name).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Uninitialised bytes whose address is a multiple of 64.

    Blocks of 1 MiB or more are mapped one by one: the C library keeps freed blocks once several were freed.
    """
    if size >= _MAP_ABOVE:
        return np.frombuffer(_map_block(size), np.uint8, size)
    block = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -block.ctypes.data % _ALIGNMENT
    return block[offset : offset + size]


def bytes_with_room(size: int) -> NDArray[np.uint8]:
    """As `aligned_bytes`, but blocks of 1 MiB or more are longer: a block that grows keeps the pages that it has.

    Pages that nothing has touched take no memory.
    """
    return aligned_bytes(size if size < _MAP_ABOVE else _ROOM * size)


def _map_block(size: int) -> mmap.mmap:
    """Map `size` bytes or more, large blocks in huge pages where that is possible.

    Private memory: by default Python maps shared memory, which has no huge pages, and whose faults take half as long
    again. The first use of 9 MiB takes 4 ms, and 6 ms in shared memory. In huge pages it takes 0.2 ms, or 20 ms in a
    virtual machine whose host provides memory at its first use: 4 ms for each huge page, of which a run may use a small
    part. Then the first run with larger images took 8 times as long as later ones. Later runs take the same time in
    both kinds of pages.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE if size >= _HUGE_PAGE else size
    block = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if size >= _HUGE_PAGES_ABOVE:
        prefer_huge_pages(block)
    return block


def prefer_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for pages of 2 MiB, if the system has them (Linux)."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel or the file system has no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)


def return_to_system(used: int) -> None:
    """After work that left garbage: collect it, and return the C library's free memory to the system (glibc).

    `used`: about how many bytes may be free. No effect below 16 MiB.
    """
    if is_worth_returning(used):
        gc.collect()
        if _trim is not None:
            _trim(_kept)


def is_worth_returning(used: int) -> bool:
    """Whether returning this number of bytes is worth some milliseconds: from 16 MiB on."""
    return used >= _WORTH_COLLECTING


def owner_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array at the end of the chain of views: `array` itself, or the array of which it is a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def release_pages(array: NDArray[Any], start: int = 0, end: int | None = None) -> None:
    """Drop the whole pages between bytes `start` and `end` of an array over a file that is mapped read-only.

    The next access reads them from the file again. `array` must begin where the mapping begins. No effect for views of
    such an array (see `owner_of`), and for other memory.
    """
    base: object = array.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap) or array.flags.writeable or not hasattr(mmap, "MADV_DONTNEED"):
        return
    last = (array.nbytes if end is None else end) // mmap.PAGESIZE * mmap.PAGESIZE
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if first < last:
        with suppress(OSError):  # then the pages only stay in memory
            mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def drop_code_pages(library: str) -> None:
    """Drop this process's code pages of a library that is seldom called (Linux).

    `library`: the beginning of the name of its file. Each page comes back from its file when it is called, and a thread
    in it only waits for the page. Only pages of code are dropped: nothing writes to those, so the file has the same
    contents.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    with suppress(OSError):  # there is no /proc
        for line in _MAPS.read_text().splitlines():
            place, access, *_, path = line.split(maxsplit=5)
            if access == "r-xp" and Path(path).name.startswith(library):
                start, end = (int(part, 16) for part in place.split("-"))
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def share_heaps(most: int) -> None:
    """Let threads that start later share at most `most` heaps of the C library (glibc), instead of one per thread.

    Memory that one long-lived thread frees can then be used by the others; with separate heaps it adds up.
    """
    _set_option(_M_ARENA_MAX, most)


def keep_freed(size: int) -> None:
    """Let the C library keep freed blocks of up to `size` bytes for reuse, and twice as much in all (glibc).

    Otherwise it returns each block to the system. A page that is new to the process costs a fault, which is nine tenths
    of the time to copy a large block into it. Once three times `size` are free, it returns all but twice `size`.
    """
    global _kept
    _kept = 2 * size
    _set_option(_M_MMAP_THRESHOLD, size)
    _set_option(_M_TRIM_THRESHOLD, 3 * size)
    _set_option(_M_TOP_PAD, _kept)


def touch_heap(size: int) -> None:
    """Let the C library's heap of the calling thread have two free blocks of `size` bytes, whose pages are in use.

    For blocks that `keep_freed` keeps. Without this, the first large block costs a fault per page. In a virtual machine
    whose host provides memory at its first use, 15,000 faults took 30 to 100 ms.
    """
    if _option is None or _trim is None:
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [block for _ in range(2) if (block := libc.malloc(size)) is not None]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)


def _set_option(option: int, value: int) -> None:
    """Set an option of glibc's `mallopt`; no effect with other C libraries, which number their options differently."""
    if _option is not None and _trim is not None:
        _option(option, value)


def concatenate(chunks: Iterable[bytes | memoryview], size: int) -> NDArray[np.uint8]:
    """The concatenation of chunks in aligned memory; `size` is their size in total, in bytes."""
    block, at = aligned_bytes(size), 0
    for chunk in chunks:
        block[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    return block


def aligned_words(count: int) -> NDArray[np.int64]:
    """`count` integers of 64 bits, all 0, whose address is a multiple of 64 bytes."""
    words = aligned_bytes(count * 8).view(np.int64)
    words[:] = 0
    return words


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first element; five times faster than `array.ctypes`."""
    return _word_at(id(array) + ELEMENTS_AT).value


def _elements_at() -> int:
    """The offset in an array object of the address of its elements: the first field after the object header.

    Compiled extensions read the field there, so no release of NumPy within the bounds of pyproject.toml moves it.
    ImportError if it is elsewhere.
    """
    array, offset = np.zeros(1, np.uint8), object.__basicsize__
    if _word_at(id(array) + offset).value != array.ctypes.data:
        raise ImportError(f"NumPy {np.__version__} keeps the address of an array elsewhere than expected")
    return offset


def array_at(address: int, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
    """A writable array over the memory at `address`, which the caller keeps alive; without elements, a new array."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return np.empty(shape, dtype)
    block: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(block, dtype=dtype).reshape(shape)


ELEMENTS_AT = _elements_at()
