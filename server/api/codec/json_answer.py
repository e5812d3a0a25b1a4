"""An answer in JSON whose outputs are all numbers: what is around them depends on the outputs' shapes and an id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from lathe.server.api.codec import json_tensors
from lathe.server.api.codec.payloads import Payload
from lathe.server.api.codec.reply import Reply, begun_json_reply
from lathe.server.types import Array

_REPLIES = 64  # of different lengths that are kept


class JsonAnswer:
    """The texts before, between and behind the lists of numbers."""

    __slots__ = ("_behind", "_first", "_replies", "_size")

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts`: one more than there are outputs; the id is none of them."""
        self._first, *self._behind = texts
        self._size = sum(map(len, texts))
        self._replies: dict[int, Reply] = {}  # by the length of the whole

    def reply(self, lists: Sequence[bytes], id: str = "") -> tuple[Reply, list[Payload]]:
        """Return the answer with these elements of the outputs, each with commas between them: as the reply, and the
        payloads that follow its text."""
        size = self._size
        payloads: list[Payload] = []
        for elements, text in zip(lists, self._behind, strict=True):
            size += len(elements)
            payloads += (elements, text)
        if id:
            text = b'{"id":%b,%b' % (orjson.dumps(id), self._first[1:])
            return begun_json_reply(text, size + len(text) - len(self._first)), payloads
        reply = self._replies.get(size)
        if reply is None:
            if len(self._replies) >= _REPLIES:
                self._replies.clear()
            reply = self._replies[size] = begun_json_reply(self._first, size)
        return reply, payloads


def elements_by_row(array: Array) -> list[bytes]:
    """Return each row's elements as JSON, with commas between them."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    return json_tensors.numbers(rows)[2:-2].split(b"],[")
