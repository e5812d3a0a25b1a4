"""Splits an inference message into a message without raw contents, and views of the raw contents in its bytes.

protobuf would copy the raw contents. It also holds the interpreter lock while it parses, so the bytes that it parses
are limited.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from lathe.server.api.grpc.messages import INFERENCE, Message, message_class
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.errors import BadRequest, TooLarge

MAX_PARSED_BYTES = (
    2 << 20
)  # the most bytes of a message without raw contents: protobuf parses 2 MiB of small values in 25 ms
_MAX_FIELDS = 256  # the most fields that are split on the event loop
_REQUEST = INFERENCE.message_types_by_name["ModelInferRequest"]
_Request = message_class(_REQUEST)
_VARINT, _FIXED64, LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types
_RAW = _REQUEST.fields_by_name["raw_input_contents"].number << 3 | LENGTH_DELIMITED


class SplitMessage(NamedTuple):
    """A split request: `message` without raw contents, `shell` its serialized bytes, and the raw contents in order.

    The raw contents of a request above `INLINE_BYTES` are views into its bytes.
    """

    message: Message
    raw_contents: list[bytes | memoryview]
    shell: bytes


def split_small(data: bytes) -> SplitMessage | None:
    """Split a request if that is quick; otherwise return None, and the caller runs `split_large` on a thread.

    BadRequest if the request is no valid message.
    """
    if len(data) <= INLINE_BYTES:
        message = _parse(data)
        raws = list(message.raw_input_contents)
        message.ClearField("raw_input_contents")
        return SplitMessage(message, raws, message.SerializeToString() if raws else data)
    return _split(data, _MAX_FIELDS, INLINE_BYTES)


def split_large(data: bytes) -> SplitMessage:
    """Split a request. BadRequest if it is no valid message, TooLarge above `MAX_PARSED_BYTES` without raw contents."""
    found = _split(data, len(data), MAX_PARSED_BYTES)
    if found is None:
        raise TooLarge(f"message: expected at most {MAX_PARSED_BYTES} bytes besides raw_input_contents, got more")
    return found


def _split(data: bytes, fields: int, most: int) -> SplitMessage | None:
    """Split a request; None if it has more than `fields` fields, or more than `most` bytes without raw contents.

    BadRequest if the request is no valid message.
    """
    view, shell, raws = memoryview(data), bytearray(), list[bytes | memoryview]()
    at = spent = 0
    for _ in range(fields + 1):
        if at == len(data):
            whole = bytes(shell)
            return SplitMessage(_parse(whole), raws, whole)
        tag, content, end = _field(data, at)
        if tag == _RAW:
            raws.append(view[content:end])
            spent += content - at
        else:
            spent += end - at
            if spent <= most:
                shell += view[at:end]
        if spent > most:
            return None
        at = end
    return None


def _field(data: bytes, at: int) -> tuple[int, int, int]:
    """The tag of the protobuf field at this offset, and the offsets of the start and end of its content.

    BadRequest if the field is malformed or incomplete.
    """
    tag, content = _varint(data, at)
    kind = tag & 7
    if kind == LENGTH_DELIMITED:
        size, content = _varint(data, content)
        end = content + size
    elif kind == _VARINT:
        end = _varint(data, content)[1]
    elif kind in (_FIXED64, _FIXED32):
        end = content + (8 if kind == _FIXED64 else 4)
    else:
        raise _invalid()
    if end > len(data):
        raise _invalid()
    return tag, content, end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at this offset, and the offset after it; BadRequest if it is incomplete or too long."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise _invalid()


def _parse(data: bytes) -> Message:
    try:
        return _Request.FromString(data)
    except DecodeError:
        raise _invalid() from None


def _invalid() -> BadRequest:
    return BadRequest(f"message: expected {_REQUEST.full_name}, got bytes that do not parse")
