"""Tensor data inside JSON. Checks types and ranges, because NumPy alone would convert "1" and 1.5 to the integer 1."""

from __future__ import annotations

import json
import math
from codecs import getincrementaldecoder
from itertools import chain
from struct import pack
from typing import Any, NamedTuple

import numpy as np
import orjson

from lathe.server.api.codec.json_limit import MAX_VALUES, check_values
from lathe.server.datatypes import BINARY_ONLY, ELEMENTS_PER_STEP, NUMPY_OF, elements_of, object_array, to_bytes
from lathe.server.errors import BadRequest
from lathe.server.steps import Steps
from lathe.server.types import Array

_UNLESS = " besides lists of numbers that have their input's datatype and shape (send others as binary data)"
_DATA = b'"data":['
_EMPTY = _DATA + b"]"  # cannot occur inside a string of the written document, where quotes are escaped
_DIGITS = 19  # shorter integers, sign included, fit into 63 bits
_LONG = 1 << 18  # bytes of text written per step
_Decoder = getincrementaldecoder("utf-8")
_INTEGERS = frozenset({int})
_FLOATS = frozenset({"FP32", "FP64"})
_TAKES: dict[str, frozenset[type]] = {
    "BOOL": frozenset({bool}),
    "BYTES": frozenset({str}),
    **dict.fromkeys(_FLOATS, frozenset({int, float})),
    **dict.fromkeys((f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)), _INTEGERS),
}
_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", type(None): "null", list: "a list"}


class Parsed(NamedTuple):
    """A document, and whether it was strict JSON: then serializing it gives an equivalent text."""

    document: Any
    strict: bool


def parse(text: bytes | bytearray | memoryview, field: str) -> Parsed:
    """Parse JSON, with NaN and Infinity as Python and RapidJSON write them.

    BadRequest for invalid JSON, TooLarge for more than `MAX_VALUES` values. `field` names the text in errors.
    """
    check_values(text, field, MAX_VALUES, _UNLESS)
    try:
        return Parsed(orjson.loads(text), True)
    except orjson.JSONDecodeError as error:
        raw = bytes(text)
        if b"NaN" in raw or b"Infinity" in raw:
            return Parsed(_parse_lenient(raw, field), False)
        raise BadRequest(f"{field}: expected JSON, got something else: {error}") from None


def _parse_lenient(raw: bytes, field: str) -> Any:
    try:
        document = json.loads(raw.decode(), parse_int=_integer)
        if b"\\u" in raw:  # a lone surrogate cannot be encoded: an error message that quotes it could not be written
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{field}: expected JSON, got something else: {error}") from None


def _integer(digits: str) -> int | float:
    """Parse an integer as orjson does: more than 64 bits give a float. So both parsers return equal documents."""
    if len(digits) < _DIGITS:
        return int(digits)
    value = float(digits) if len(digits) > _DIGITS + 2 else int(digits)
    return value if -(1 << 63) <= value < 1 << 64 else float(digits)


def take_data(document: Any) -> list[object]:
    """Remove and return the `data` of a request's inputs, in order; each is replaced by its index in the result."""
    taken: list[object] = []
    inputs = document.get("inputs") if isinstance(document, dict) else None
    for item in inputs if isinstance(inputs, list) else ():
        if isinstance(item, dict) and item.get("data") is not None:
            taken.append(item["data"])
            item["data"] = len(taken) - 1
    return taken


def to_array(data: object, datatype: str, shape: tuple[int, ...], field: str) -> Array:
    """Convert a flat or nested JSON list to an array of this datatype and shape; BadRequest if it does not fit.

    Also BadRequest for a datatype that is sent as binary data only. `field` names the input in errors.
    """
    if datatype in BINARY_ONLY:
        raise BadRequest(f"{field}.data: {datatype} is sent as binary data only, got JSON")
    flat = _flatten(data, shape, field)
    if len(flat) != math.prod(shape):
        raise BadRequest(f"{field}.data: expected {math.prod(shape)} elements for shape {list(shape)}, got {len(flat)}")
    kinds = _kinds(flat) - _TAKES[datatype]
    if kinds:
        got = ", ".join(sorted(_NAMES.get(kind, kind.__name__) for kind in kinds))
        raise BadRequest(f"{field}.data: expected {datatype} values, got {got}")
    if datatype == "BYTES":
        return object_array(map(to_bytes, flat), shape)
    try:
        if datatype in _FLOATS:  # struct converts Python floats three times as fast as NumPy or array.array
            return np.frombuffer(pack(f"{len(flat)}d", *flat), np.float64).astype(NUMPY_OF[datatype]).reshape(shape)
        return np.array(flat, dtype=NUMPY_OF[datatype]).reshape(shape)
    except OverflowError:
        raise BadRequest(f"{field}.data: a value is out of the range of {datatype}") from None


def _kinds(flat: list[Any]) -> set[type]:
    """The Python types of the elements. Usually there is one, and counting it is faster than building a set."""
    kinds = list(map(type, flat))
    return {kinds[0]} if kinds and kinds.count(kinds[0]) == len(kinds) else set(kinds)


def _flatten(data: object, shape: tuple[int, ...], field: str) -> list[Any]:
    """The elements of a JSON list in row-major order; BadRequest if it is neither flat nor nested as `shape`.

    The length of a flat list is not checked.
    """
    if not isinstance(data, list):
        raise BadRequest(f"{field}.data: expected a list, got {_NAMES.get(type(data), 'an object')}")
    level, depth = data, 1
    while level and type(level[0]) is list:
        sizes = set(map(len, level)) if set(map(type, level)) == {list} else set()
        if depth >= len(shape) or len(level) != math.prod(shape[:depth]) or sizes != {shape[depth]}:
            raise BadRequest(f"{field}.data: expected lists nested as shape {list(shape)}, got another nesting")
        level, depth = list(chain.from_iterable(level)), depth + 1
    return level


def dump_steps(document: dict[str, Any], arrays: list[tuple[dict[str, Any], Array, str]]) -> Steps[bytes]:
    """The JSON of a document; for each (owner, array, datatype) of `arrays`, `owner["data"]` is the array.

    Each `owner` is a dictionary inside the document and is changed. The array is written as a flat list in row-major
    order.

    Numbers that JSON cannot represent are written as NaN, Infinity and -Infinity, which Triton's clients read.
    BadRequest for datatypes and bytes that JSON cannot represent.
    """
    if _fill_all(arrays):
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    before, *behind = texts_around(document, [owner for owner, _, _ in arrays])
    parts = [before]
    for (owner, tensor, datatype), text in zip(arrays, behind, strict=True):
        data = yield from _elements(tensor, datatype, f"output {owner['name']!r}")
        parts += (data, text)
    return b"".join(parts)


def texts_around(document: dict[str, Any], owners: list[dict[str, Any]]) -> list[bytes]:
    """The JSON of a document, cut where the elements of each owner's `data` belong: one text more than owners.

    Each owner is a dictionary inside the document, and gets an empty `data`.
    """
    for owner in owners:
        owner["data"] = ()
    before, *behind = orjson.dumps(document).split(_EMPTY)
    texts = [before, *[b"]" + text for text in behind]]
    return [*[text + _DATA for text in texts[:-1]], texts[-1]]


def _fill_all(arrays: list[tuple[dict[str, Any], Array, str]]) -> bool:
    """Set each owner's `data` and return True; False if one call of orjson cannot or should not write all arrays.

    It should not if they have more than `ELEMENTS_PER_STEP` elements together, or if a text is long.
    """
    if sum([tensor.size for _, tensor, _ in arrays]) > ELEMENTS_PER_STEP:
        return False
    filled = [_fill(owner, tensor, datatype) for owner, tensor, datatype in arrays]
    return all(filled)


def _fill(owner: dict[str, Any], tensor: Array, datatype: str) -> bool:
    """Set `owner["data"]` to a small array's elements and return True; False if orjson cannot or should not write them.

    It cannot write NaN, infinities, texts that are no UTF-8 and datatypes of binary data only; it should not write
    texts of more than `_LONG` bytes in one call. `owner["data"]` has no meaning then.
    """
    if datatype in BINARY_ONLY:
        return False
    if datatype == "BYTES":
        elements = elements_of(tensor, 0)
        try:
            owner["data"] = [element.decode() for element in elements if len(element) <= _LONG]
        except UnicodeDecodeError:
            return False
        return len(owner["data"]) == len(elements)
    if tensor.dtype.kind != "f":
        owner["data"] = tensor.ravel().tolist()
        return True
    owner["data"] = np.ascontiguousarray(tensor).reshape(-1)
    return bool(np.isfinite(tensor).all())


def _elements(tensor: Array, datatype: str, field: str) -> Steps[bytes]:
    """The elements of an array as JSON, separated by commas; BadRequest if JSON cannot represent them."""
    if datatype in BINARY_ONLY:
        raise BadRequest(f"{field}: {datatype} is answered as binary data only, JSON was requested")
    if datatype == "BYTES":
        try:
            return (yield from _texts(tensor))
        except UnicodeDecodeError:
            raise BadRequest(f"{field}: holds bytes that are no UTF-8 text; ask for binary data") from None
    flat, parts = np.ascontiguousarray(tensor).reshape(-1), list[bytes]()
    for at in range(0, len(flat), ELEMENTS_PER_STEP):
        parts.append(numbers(flat[at : at + ELEMENTS_PER_STEP])[1:-1])
        yield
    return b",".join(parts)


def numbers(array: Array) -> bytes:
    """Return a contiguous array of numbers or booleans as nested lists in JSON, with NaN, Infinity and -Infinity."""
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    if array.dtype.kind != "f" or b"null" not in text:
        return text
    pieces = text.split(b"null")  # orjson writes null for each number that is not finite
    words = [
        b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity"
        for value in array[~np.isfinite(array)].tolist()
    ]
    return b"".join(chain.from_iterable(zip(pieces, [*words, b""], strict=True)))


def _texts(tensor: Array) -> Steps[bytes]:
    parts: list[bytes] = []
    for at in range(0, tensor.size, ELEMENTS_PER_STEP):
        elements = elements_of(tensor, at)
        if sum(map(len, elements)) <= _LONG:
            parts.append(orjson.dumps([element.decode() for element in elements])[1:-1])
            yield
            continue
        for element in elements:
            text = yield from _text(element)
            parts.append(text)
    return b",".join(parts)


def _text(element: bytes) -> Steps[bytes]:
    """One long text as a JSON string, written in steps."""
    decoder, parts = _Decoder(), list[bytes]()
    for at in range(0, len(element), _LONG):
        parts.append(orjson.dumps(decoder.decode(element[at : at + _LONG], at + _LONG >= len(element)))[1:-1])
        yield
    return b'"%b"' % b"".join(parts)
