"""JSON answers whose outputs are all numbers or booleans: the text around them depends only on shapes and the id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from lathe.server.api.codec import json_tensors
from lathe.server.api.codec.payloads import Payload
from lathe.server.api.codec.reply import Reply, begun_json_reply
from lathe.server.types import Array

_REPLIES = 64  # cached replies; each is for one length of the answer


class JsonAnswer:
    """The JSON of an answer without its numbers: the text before, between and after the outputs' elements."""

    __slots__ = ("_behind", "_first", "_replies", "_size")

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts`: the JSON without an id, cut where the elements of each output belong: one text more than outputs."""
        self._first, *self._behind = texts
        self._size = sum(map(len, texts))
        self._replies: dict[int, Reply] = {}  # by the bytes of the whole answer, which has no id

    def reply(self, lists: Sequence[bytes], id: str = "") -> tuple[Reply, list[Payload]]:
        """Return the reply that begins the answer, and the payloads that follow it.

        `lists`: for each output its elements as JSON, separated by commas. `id`: of the request; empty: none.
        """
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
    """Return the elements of each row as JSON, separated by commas."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    return json_tensors.numbers(rows)[2:-2].split(b"],[")
