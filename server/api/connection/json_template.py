"""A JSON request that says what the one before it on its connection said, but for the numbers of its one list.

    POST ... content-length: 6201 ... {"inputs": [{"name": "x", ..., "data": [0.8506, 0.637, ...]}]}
    ---------------------------->    <------------------------------------->                    <-->
    equal                            equal                                                      equal

Such a request says what it would say if it sent its numbers as binary data, so it goes on as those do. One that differs
in anything else, or has a list of another kind, is read in the usual way.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.json_split import split_json
from lathe.server.api.connection.request_template import Lane
from lathe.server.serving.servable import Servable

if TYPE_CHECKING:
    from lathe.core.runtime.host.json_lists import ListReader

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([1-9][0-9]*)[ \t]*\r\n", re.IGNORECASE)


class TextAround(NamedTuple):
    """A request's bytes but for the digits of its length and for its list."""

    before_length: bytes
    behind_length: bytes  # in the HTTP head
    before_list: bytes  # in the body
    behind_list: bytes

    @property
    def size(self) -> int:
        return sum(map(len, self))


def text_around(request: bytes, start: int) -> TextAround | None:
    """Return what a request, whose body begins at `start`, says around its list of numbers; None where it has none,
    or several, or does not tell its length in the common way."""
    length, parts = _LENGTH.search(request, 0, start), split_json(request[start:])
    if length is None or parts is None or len(parts.number_lists) != 1:
        return None
    found, (begin, end) = parts.number_lists[0], length.span(1)
    return TextAround(request[:begin], request[end:start], parts.text[: found.start], parts.text[found.end :])


class JsonTemplate(Lane):
    """What was found out about a request, for those that differ from it in their numbers alone.

    `wire` is the head of the request that sends the same as binary data, and what `read` returns is its body.
    """

    __slots__ = ("_around", "_most", "_reader")

    def __init__(
        self,
        around: TextAround,
        most: int,
        head: CallHead,
        servable: Servable,
        codec: Codec,
        wire: ParsedRequest,
        reader: ListReader,
    ) -> None:
        """`most`: bytes that a body may have."""
        super().__init__(b"", -1, head, servable, codec, wire)
        self._around = around
        self._most = most
        self._reader = reader

    def read(self, request: bytes) -> bytes | None:
        """Return the elements that a request's list says; None where the request is another one.

        Equal text around them means equal bounds of the list, as nothing in a list of numbers could move these.
        """
        size = len(request)
        if size != self.size and not self._fit(size):
            return None
        prefix, behind = self.prefix, self._around.behind_list
        if not (request.startswith(prefix) and request.endswith(behind)):
            return None
        return self._reader.read(request, len(prefix), size - len(behind))

    def _fit(self, size: int) -> bool:
        """Expect a request of so many bytes from now on; say whether there may be one."""
        if not self.size:
            return False
        around = self._around
        rest = size - len(around.before_length) - len(around.behind_length)  # the body, and the digits of its length
        length = rest - len(str(max(rest, 0)))
        if len(str(length)) + length < rest:
            length += 1
        if not 0 < length <= self._most or len(str(length)) + length != rest:
            return False
        self.prefix = b"%b%d%b%b" % (around.before_length, length, around.behind_length, around.before_list)
        self.size = size
        return True
