"""Lathe's native readers of numbers in JSON: what the data path imports of core beside :mod:`server.backends.graph`."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from server.batching.signature import Shape
from server.datatypes import NUMPY_OF
from server.types import Array

if TYPE_CHECKING:
    from core.runtime.jsonlists import JsonLists, ListReader


def prepare_readers(folder: Path) -> None:
    """Compile the readers, or load what is in this cache of compiled code, so that no request has to wait for it."""
    from core.runtime.jsonlists import json_lists

    json_lists(str(folder))


def numbers(text: bytes, start: int, end: int, datatype: str, shape: Shape) -> Array | None:
    """Return the numbers of the JSON list in ``text[start:end]`` as an array; None for whatever is not plainly that."""
    readers, dtype = _readers(), NUMPY_OF[datatype]
    if not readers.takes(dtype, shape, end - start):
        return None
    array = np.empty(shape, dtype)
    return array if readers.read(text, start, array) == end else None


def list_reader(datatype: str, shape: Shape) -> ListReader | None:
    """Return what reads such arrays again and again; None where there is no native reader for them."""
    readers, dtype = _readers(), NUMPY_OF[datatype]
    room = 2 * math.prod(shape)  # of the shortest text; whether there is so much is for who reads to find out
    return readers.reader(dtype, shape) if readers.takes(dtype, shape, room) else None


@cache
def _readers() -> JsonLists:
    from core.runtime.jsonlists import json_lists

    return json_lists()
