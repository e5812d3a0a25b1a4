"""A template of a JSON request: later requests may differ from it only in the numbers of their one list.

    POST ... content-length: 6201 ... {"inputs": [{"name": "x", ..., "data": [0.8506, 0.637, ...]}]}
    ---------------------------->    <------------------------------------->                    <-->
    equal                            equal                                                      equal

The numbers are parsed straight into a tensor. From there the request takes the same path as one that sends its tensor
as binary data. A request that differs in anything but the numbers is parsed in the usual way.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.json_split import split_json
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.serving.servable import Servable

if TYPE_CHECKING:
    from lathe.core.runtime.host.json_lists import ListReader

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([1-9][0-9]*)[ \t]*\r\n", re.IGNORECASE)


class TextAround(NamedTuple):
    """The bytes of a request without the digits of its content length and without its list of numbers."""

    before_length: bytes
    after_length: bytes  # in the HTTP head
    before_list: bytes  # in the body
    after_list: bytes

    @property
    def size(self) -> int:
        return sum(map(len, self))


def text_around(request: bytes, start: int) -> TextAround | None:
    """Return the bytes around the list of numbers of a request whose body begins at `start`.

    Returns None if the request has no list of numbers or several, or if its content length has an unusual form.
    """
    length, parts = _LENGTH.search(request, 0, start), split_json(request[start:])
    if length is None or parts is None or len(parts.number_lists) != 1:
        return None
    found, (begin, end) = parts.number_lists[0], length.span(1)
    return TextAround(request[:begin], request[end:start], parts.text[: found.start], parts.text[found.end :])


class JsonTemplate(RequestTemplate):
    """The result of parsing one JSON request, reused for requests that differ from it only in their numbers.

    `wire` is the parsed head of the same request with binary data; `read` returns the body of that request.
    """

    __slots__ = ("_around", "_max_body", "_reader")

    def __init__(
        self,
        around: TextAround,
        max_body: int,
        head: CallHead,
        servable: Servable,
        codec: Codec,
        wire: ParsedRequest,
        reader: ListReader,
    ) -> None:
        """`max_body`: the largest accepted number of bytes of a body."""
        super().__init__(b"", -1, head, servable, codec, wire)
        self._around = around
        self._max_body = max_body
        self._reader = reader

    def read(self, request: bytes) -> bytes | None:
        """Return the numbers of the request's list as bytes of a tensor; None if the request does not match.

        Also None if native code cannot read the list. If the text before and after the list is equal, the list begins
        and ends where the template says: no bracket can stand inside a list of numbers.
        """
        size = len(request)
        if size != self.size and not self._prepare(size):
            return None
        prefix, suffix = self.prefix, self._around.after_list
        if not (request.startswith(prefix) and request.endswith(suffix)):
            return None
        return self._reader.read(request, len(prefix), size - len(suffix))

    def _prepare(self, size: int) -> bool:
        """Set `prefix` (all bytes before the list) for requests of `size` bytes; False if there is no such request.

        The prefix contains the content length, which follows from `size`. Also False for an outdated template.
        """
        if not self.size:
            return False
        around = self._around
        rest = size - len(around.before_length) - len(around.after_length)  # the body, and the digits of its length
        length = rest - len(str(max(rest, 0)))
        if len(str(length)) + length < rest:
            length += 1
        if not 0 < length <= self._max_body or len(str(length)) + length != rest:
            return False
        self.prefix = b"%b%d%b%b" % (around.before_length, length, around.after_length, around.before_list)
        self.size = size
        return True
