"""An inference request as it was sent: a message without its raw contents, which stay where they are among the bytes.

protobuf would copy them, and keeps the interpreter lock while it reads a message, so what it reads is bounded.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from server.api.grpc.messages import INFERENCE, Message, message_class
from server.api.readers import HERE
from server.errors import BadRequest, TooLarge

TYPED = 2 << 20  # bytes of a message besides raw contents: 25 ms of protobuf's when each is a value of its own
_FEW = 256  # fields that are looked at on the event loop
_REQUEST = INFERENCE.message_types_by_name["ModelInferRequest"]
_Request = message_class(_REQUEST)
_VARINT, _FIXED64, SIZED, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types that are in use
_RAW = _REQUEST.fields_by_name["raw_input_contents"].number << 3 | SIZED


class Sent(NamedTuple):
    """A request taken apart. ``shell``: the bytes of ``message``, which has no raw contents."""

    message: Message
    raws: list[bytes | memoryview]
    shell: bytes


def glance(data: bytes) -> Sent | None:
    """Return what a request says, if that takes little time; None: :meth:`read` it beside the event loop."""
    if len(data) <= HERE:
        message = _parsed(data)
        raws = list(message.raw_input_contents)
        message.ClearField("raw_input_contents")
        return Sent(message, raws, message.SerializeToString() if raws else data)
    return _split(data, _FEW, HERE)


def read(data: bytes) -> Sent:
    """Return what a request says; raises BadRequest for what is none, TooLarge for more than protobuf should read."""
    found = _split(data, len(data), TYPED)
    if found is None:
        raise TooLarge(f"message: expected at most {TYPED} bytes besides raw_input_contents, got more")
    return found


def _split(data: bytes, fields: int, most: int) -> Sent | None:
    """Take a request apart; None where it has more fields, or more bytes besides raw contents."""
    view, shell, raws = memoryview(data), bytearray(), list[bytes | memoryview]()
    at = spent = 0
    for _ in range(fields + 1):
        if at == len(data):
            whole = bytes(shell)
            return Sent(_parsed(whole), raws, whole)
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
    """Return the tag of the field at this place, and where its content begins and ends."""
    tag, content = _varint(data, at)
    kind = tag & 7
    if kind == SIZED:
        size, content = _varint(data, content)
        end = content + size
    elif kind == _VARINT:
        end = _varint(data, content)[1]
    elif kind in (_FIXED64, _FIXED32):
        end = content + (8 if kind == _FIXED64 else 4)
    else:
        raise _no_message()
    if end > len(data):
        raise _no_message()
    return tag, content, end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at this place and where it ends."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise _no_message()


def _parsed(data: bytes) -> Message:
    try:
        return _Request.FromString(data)
    except DecodeError:
        raise _no_message() from None


def _no_message() -> BadRequest:
    return BadRequest(f"message: expected {_REQUEST.full_name}, got bytes that are none")
