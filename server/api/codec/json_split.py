"""Splits a request's JSON without parsing it into lists of numbers, which native code reads, and the rest.

    {"id": "a7", "inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [0.5, 1]}]}
                                                                                     ------->  a list (`NumberList`)

The rest is the shell. In it, random placeholders that no client can know stand for each list and for the id. The parsed
shell must have the placeholders exactly where a request has its data and its id; otherwise the split was wrong, and the
whole document is parsed instead. Requests that differ only in numbers and ids have equal shells, so the parsed request
can be cached by its shell.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import orjson

from lathe.server.api.codec import json_tensors
from lathe.server.api.codec.json_limit import MAX_VALUES, has_at_most
from lathe.server.backends.json_numbers import parse_numbers
from lathe.server.types import Array, Shape

_MAX_LISTS = 64  # the most lists of one request
_SPACE = rb"[ \t\r\n]*"
_KEY = b'"data"'
_LIST = re.compile(_KEY + _SPACE + rb":" + _SPACE + rb"(?=\[)")
_ID = re.compile(rb'"id"' + _SPACE + rb":" + _SPACE + rb'("[^"\\\x00-\x1f]*")')
_SECRET = secrets.token_hex(16)
_PLACEHOLDERS = tuple(f"{_SECRET}-{number}" for number in range(_MAX_LISTS))
_QUOTED = tuple(b'"%b"' % word.encode() for word in _PLACEHOLDERS)
_ID_PLACEHOLDER = f"{_SECRET}-id"
_QUOTED_ID = b'"%b"' % _ID_PLACEHOLDER.encode()


class NumberList:
    """The JSON text of one input's data: `text[start:end]` of the request's JSON, its list number `number` (from 0)."""

    __slots__ = ("end", "number", "start", "text")

    def __init__(self, text: bytes, start: int, end: int, number: int) -> None:
        self.text, self.start, self.end, self.number = text, start, end, number

    def check(self) -> None:
        """Parse the whole request's JSON; BadRequest if it is invalid, TooLarge if it has too many values."""
        json_tensors.parse(self.text, "body")

    def tensor(self, datatype: str, shape: Shape, field: str) -> Array:
        """The elements as a new array of this datatype and shape; BadRequest with the same texts as `to_array`.

        `field` names the input in errors. If native code cannot read the list, the whole JSON is parsed: TooLarge then
        if it has too many values.
        """
        found = parse_numbers(self.text, self.start, self.end, datatype, shape)
        if found is not None:
            return found
        document = json_tensors.parse(self.text, "body").document
        return json_tensors.to_array(json_tensors.take_data(document)[self.number], datatype, shape, field)


class SplitJson:
    """A request's JSON as shell (with placeholders), lists of numbers and id. `id` is None if it was not removed."""

    __slots__ = ("id", "number_lists", "shell", "text")

    def __init__(self, text: bytes, shell: bytes, lumps: list[NumberList], id: str | None) -> None:
        self.text, self.shell, self.number_lists, self.id = text, shell, lumps, id

    def document(self) -> Any:
        """The parsed shell, without a removed id; None if the whole document has to be parsed.

        In place of its data, each input has the index of its list, as `json_tensors.take_data` leaves it.
        """
        if not has_at_most(self.shell, MAX_VALUES):
            return None
        try:
            document = orjson.loads(self.shell)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
            return None
        if self.id is not None and document.pop("id", None) != _ID_PLACEHOLDER:
            return None
        holders = [item for item in document["inputs"] if isinstance(item, dict) and item.get("data") is not None]
        if [item["data"] for item in holders] != [*_PLACEHOLDERS[: len(self.number_lists)]]:
            return None
        for number, item in enumerate(holders):
            item["data"] = number
        return document

    def check(self) -> None:
        """BadRequest if the whole text is no valid JSON. A text with too many values is not checked."""
        if has_at_most(self.text, MAX_VALUES):
            json_tensors.parse(self.text, "body")


def split_json(text: bytes) -> SplitJson | None:
    """Split a request's JSON; None if it has no lists of numbers, or they cannot be separated without parsing."""
    at = text.find(_KEY)
    if at < 0:
        return None
    parts: list[bytes] = []
    lumps: list[NumberList] = []
    last = 0
    while at >= 0:
        span = _list_span(text, at)
        number = len(lumps)
        if span is None or number == _MAX_LISTS:
            return None
        start, end = span
        parts += (text[last:start], _QUOTED[number])
        lumps.append(NumberList(text, start, end, number))
        last = end
        at = text.find(_KEY, end)
    parts.append(text[last:])
    return _without_id(text, b"".join(parts), lumps)


def _list_span(text: bytes, key: int) -> tuple[int, int] | None:
    """The span of the list after the key at this offset, if it can be a list of numbers; otherwise None.

    Whether its elements are numbers is not checked.

    Lists of numbers contain no quotes and braces, so the last `]` before the next quote or brace ends the list.
    """
    found = _LIST.match(text, key)
    if found is None:
        return None
    start = found.end()
    quote = text.find(b'"', start)
    brace = text.find(b"}", start, quote if quote >= 0 else len(text))
    end = text.rfind(b"]", start, brace if brace >= 0 else quote if quote >= 0 else len(text)) + 1
    return (start, end) if end else None


def _without_id(text: bytes, shell: bytes, lumps: list[NumberList]) -> SplitJson:
    if shell.count(b'"id"') == 1 and (found := _ID.search(shell)) is not None:
        try:
            id = found[1][1:-1].decode()
        except UnicodeDecodeError:  # left in the shell: its parser raises the error
            return SplitJson(text, shell, lumps, None)
        start, end = found.span(1)
        return SplitJson(text, shell[:start] + _QUOTED_ID + shell[end:], lumps, id)
    return SplitJson(text, shell, lumps, None)
