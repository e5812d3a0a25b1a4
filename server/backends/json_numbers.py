"""Reads lists of numbers in JSON into arrays, by native code that Lathe generates."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lathe.server.datatypes import NUMPY_OF
from lathe.server.types import Array, Shape

if TYPE_CHECKING:
    from lathe.core.runtime.host.json_lists import JsonLists, ListReader


def prepare_readers(folder: Path) -> None:
    """Compile the native readers of number lists, or load them from the cache in `folder`, before the first request."""
    from lathe.core.runtime.host.json_lists import json_lists

    json_lists(str(folder))


def parse_numbers(text: bytes, start: int, end: int, datatype: str, shape: Shape) -> Array | None:
    """Return the JSON list of numbers in `text[start:end]` as an array of this datatype and shape.

    None if the text is not a list of as many numbers as the shape has (flat, or nested as the shape), or if native code
    cannot read the numbers or the datatype: the caller then parses the text with a JSON library.
    """
    readers, dtype = _readers(), NUMPY_OF[datatype]
    if not readers.can_read(dtype, shape, end - start):
        return None
    array = np.empty(shape, dtype)
    return array if readers.read(text, start, array) == end else None


def list_reader(datatype: str, shape: Shape) -> ListReader | None:
    """Return a reader for many lists of this datatype and shape; None if native code cannot read them."""
    readers, dtype = _readers(), NUMPY_OF[datatype]
    room = 2 * math.prod(shape)  # bytes of the shortest possible text; the reader itself rejects shorter ones
    return readers.reader(dtype, shape) if readers.can_read(dtype, shape, room) else None


@cache
def _readers() -> JsonLists:
    from lathe.core.runtime.host.json_lists import json_lists

    return json_lists()
