"""Reads lists of numbers in JSON into arrays by native code, without a Python object per number.

    reader = json_lists()                       # compiled once per machine, then a file of the store
    end = reader.read(text, text.index(b"["), array)

`read` returns None for every list that does not plainly fit the array. The caller then uses its general parser, which
accepts more, and reports errors.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.codegen.jit import Library, compile_text, generator_version, llvm_version
from lathe.core.codegen.json_numbers import MAX_RANK, READERS, ReadStatus, ReadWord, source
from lathe.core.codegen.target import host
from lathe.core.kernels.target import Target
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.host.memory import address_of

_RELEASE_ABOVE = 1 << 15  # bytes of text above which reading releases the interpreter lock
_MAX_BY_PYTHON = 64  # numbers of one list that Python would parse for native code; with this many, `read` gives up

_State = ctypes.c_int64 * ReadWord.SIZE
_ARGUMENTS = (None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
_AT, _INDEX, _STATUS, _STOP = int(ReadWord.AT), int(ReadWord.INDEX), int(ReadWord.STATUS), int(ReadWord.STOP)
_DONE, _HARD = int(ReadStatus.DONE), int(ReadStatus.HARD)


class JsonLists:
    """Native functions that parse JSON lists of numbers or booleans, linked into this process."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._library = Library(objects)
        self._readers = {
            name: (ctypes.PYFUNCTYPE(*_ARGUMENTS)(address), ctypes.CFUNCTYPE(*_ARGUMENTS)(address))
            for name, address in ((name, self._library.address(name)) for name in objects)
        }
        kinds = {"f": "read_floats", "i": "read_integers", "u": "read_integers", "b": "read_booleans"}
        types = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
        types += [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.bool_)]
        self._by_type = {type_: (self._readers[kinds[type_.kind]], _value_limits(type_)) for type_ in types}

    def can_read(self, dtype: np.dtype[Any], shape: tuple[int, ...], room: int) -> bool:
        """Whether `read` supports this dtype and shape, and `room` bytes of text may hold that many elements.

        Supported are integers of 8 to 64 bits, float32, float64 and bool, of at least one element and at most
        `MAX_RANK` axes.
        """
        count = math.prod(shape)
        return dtype in self._by_type and len(shape) <= MAX_RANK and 0 < count <= room // 2

    def reader(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ListReader:
        """A reader of many lists of this dtype and shape, which `can_read` must have accepted."""
        functions, widths = self._by_type[dtype]
        return ListReader(functions, widths, dtype.itemsize, shape)

    def read(self, text: bytes, start: int, array: NDArray[Any]) -> int | None:
        """Fill `array` from the list that begins at `text[start]`; returns the index just after the list.

        None if the text is not a list of the array's elements, flat or nested as its shape. None also if it has
        `_MAX_BY_PYTHON` or more numbers that native code leaves to Python's `float`. Elements may have been overwritten
        then. `can_read` must have accepted the array, which is C-contiguous and writable.
        """
        (native, released), widths = self._by_type[array.dtype]
        size, shape = len(text), array.shape
        call = native if size - start < _RELEASE_ABOVE else released
        state = _State(start, 0, 0, 0, array.size, *widths, 0, len(shape), *shape)
        elements = address_of(array)
        for _ in range(_MAX_BY_PYTHON):
            call(text, size, elements, state)
            status = state[_STATUS]
            if status == _DONE:
                return state[_AT]
            if status != _HARD:
                return None
            with np.errstate(over="ignore"):  # too large for float32 becomes infinity, as in native code
                array.reshape(-1)[state[_INDEX]] = float(text[state[_AT] : state[_STOP]])
            state[_INDEX] += 1
            state[_AT] = state[_STOP]
        return None


class ListReader:
    """Reads lists of one dtype and shape into its own memory; for one thread at a time."""

    def __init__(
        self, functions: Sequence[Any], widths: tuple[int, int, int], width: int, shape: tuple[int, ...]
    ) -> None:
        self._native, self._released = functions
        count = math.prod(shape)
        self._state = _State(0, 0, 0, 0, count, *widths, 0, len(shape), *shape)
        self._elements = ctypes.create_string_buffer(count * width)
        self._address = ctypes.addressof(self._elements)

    def read(self, text: bytes, start: int, end: int) -> bytes | None:
        """The elements of the list in `text[start:end]`, as the bytes of a C-ordered array.

        None if no such list begins there, if it ends elsewhere, or if native code cannot parse one of its numbers.
        """
        state, size = self._state, len(text)
        state[_AT], state[_INDEX] = start, 0
        call = self._native if size - start < _RELEASE_ABOVE else self._released
        call(text, size, self._address, state)
        return self._elements.raw if state[_STATUS] == _DONE and state[_AT] == end else None


def _value_limits(type_: np.dtype[Any]) -> tuple[int, int, int]:
    """Bytes of an element; for integers also the magnitudes of the least and the largest value, otherwise 0 and 0."""
    if type_.kind not in "iu":
        return type_.itemsize, 0, 0
    limits = np.iinfo(type_)
    return type_.itemsize, -int(limits.min), int(limits.max)


_loading = threading.Lock()
_loaded: list[JsonLists] = []


def json_lists(cache: str | None = None) -> JsonLists:
    """The readers of this process, compiled or loaded by the first call.

    `cache`: the folder of the store that holds their code, used by the first call; None: the default one. For a folder
    that cannot be used, the errors of `open_store`.
    """
    with _loading:
        if not _loaded:
            _loaded.append(JsonLists(_objects(cache, host())))
        return _loaded[0]


def _objects(cache: str | None, target: Target) -> dict[str, bytes]:
    store = open_store(cache)
    made: dict[str, bytes] = {}
    for name in READERS:
        key = _key(name, target)
        data = store.objects.get(key) if store is not None else None
        if data is None:
            data = compile_text(source(name), target)
            if store is not None:
                store.objects.put_if_possible(key, data)
        made[name] = data
    return made


def _key(name: str, target: Target) -> str:
    return hashlib.sha256("\n".join((name, target.key, generator_version(), llvm_version())).encode()).hexdigest()
