"""A request's JSON taken apart without parsing it: lists of numbers, which native code reads, and all the rest.

    {"id": "a7", "inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [0.5, 1]}]}
                                                                                     ------->  a lump

The rest is the shell. It has a word in the place of each lump, and of the id, that no client can know. Parsed, it must
have these words where a request has its data and its id; then the request says what the shell and the lumps say. So
requests that differ in numbers and ids alone have equal shells. Whatever does not fit is left to the reader of whole
documents.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import orjson

from server.api import jsondata
from server.api.jsonbound import VALUES, is_few
from server.backends.numbers import numbers
from server.batching.signature import Shape
from server.types import Array

_MOST = 64  # lumps of one request
_SPACE = rb"[ \t\r\n]*"
_KEY = b'"data"'
_LIST = re.compile(_KEY + _SPACE + rb":" + _SPACE + rb"(?=\[)")
_ID = re.compile(rb'"id"' + _SPACE + rb":" + _SPACE + rb'("[^"\\\x00-\x1f]*")')
_SECRET = secrets.token_hex(16)
_WORDS = tuple(f"{_SECRET}-{number}" for number in range(_MOST))
_MARKS = tuple(b'"%b"' % word.encode() for word in _WORDS)
_ID_WORD = f"{_SECRET}-id"
_ID_MARK = b'"%b"' % _ID_WORD.encode()


class Lump:
    """The text of one input's data; ``number`` says which among those of the request."""

    __slots__ = ("end", "number", "start", "text")

    def __init__(self, text: bytes, start: int, end: int, number: int) -> None:
        self.text, self.start, self.end, self.number = text, start, end, number

    def check(self) -> None:
        """Raise BadRequest if the request is no JSON."""
        jsondata.parse(self.text, "body")

    def tensor(self, datatype: str, shape: Shape, field: str) -> Array:
        """Return what it says; raises BadRequest as for a document that was parsed."""
        found = numbers(self.text, self.start, self.end, datatype, shape)
        if found is not None:
            return found
        document = jsondata.parse(self.text, "body").document
        return jsondata.to_array(jsondata.take_data(document)[self.number], datatype, shape, field)


class Parts:
    """A request's JSON as shell, lumps and id. ``id``: None where it is part of the shell, or there is none."""

    __slots__ = ("id", "lumps", "shell", "text")

    def __init__(self, text: bytes, shell: bytes, lumps: list[Lump], id: str | None) -> None:
        self.text, self.shell, self.lumps, self.id = text, shell, lumps, id

    def document(self) -> Any:
        """Return what the shell says: data are their numbers, as :func:`jsondata.take_data` leaves them, and an id that
        was taken out is not there; None where the whole document is to be parsed."""
        if not is_few(self.shell, VALUES):
            return None
        try:
            document = orjson.loads(self.shell)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
            return None
        if self.id is not None and document.pop("id", None) != _ID_WORD:
            return None
        holders = [item for item in document["inputs"] if isinstance(item, dict) and item.get("data") is not None]
        if [item["data"] for item in holders] != [*_WORDS[: len(self.lumps)]]:
            return None
        for number, item in enumerate(holders):
            item["data"] = number
        return document

    def check(self) -> None:
        """Raise BadRequest if the text, lumps and all, is no JSON; one too long to be parsed for that passes."""
        if is_few(self.text, VALUES):
            jsondata.parse(self.text, "body")


def split(text: bytes) -> Parts | None:
    """Take a request's JSON apart; None where it has no lists of numbers, or they cannot be told from the rest."""
    at = text.find(_KEY)
    if at < 0:
        return None
    pieces: list[bytes] = []
    lumps: list[Lump] = []
    last = 0
    while at >= 0:
        span = _lump(text, at)
        number = len(lumps)
        if span is None or number == _MOST:
            return None
        start, end = span
        pieces += (text[last:start], _MARKS[number])
        lumps.append(Lump(text, start, end, number))
        last = end
        at = text.find(_KEY, end)
    pieces.append(text[last:])
    return _without_id(text, b"".join(pieces), lumps)


def _lump(text: bytes, key: int) -> tuple[int, int] | None:
    """Return where the list behind this key begins, and where it ends if it is one of numbers: that has no quotes and
    braces, and what comes behind it begins with one."""
    found = _LIST.match(text, key)
    if found is None:
        return None
    start = found.end()
    quote = text.find(b'"', start)
    brace = text.find(b"}", start, quote if quote >= 0 else len(text))
    end = text.rfind(b"]", start, brace if brace >= 0 else quote if quote >= 0 else len(text)) + 1
    return (start, end) if end else None


def _without_id(text: bytes, shell: bytes, lumps: list[Lump]) -> Parts:
    if shell.count(b'"id"') == 1 and (found := _ID.search(shell)) is not None:
        try:
            id = found[1][1:-1].decode()
        except UnicodeDecodeError:  # the shell's parser has the words for it
            return Parts(text, shell, lumps, None)
        start, end = found.span(1)
        return Parts(text, shell[:start] + _ID_MARK + shell[end:], lumps, id)
    return Parts(text, shell, lumps, None)
