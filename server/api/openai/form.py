"""`read_form`: the parts of a multipart form (RFC 7578), whose body is in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser

from lathe.server.errors import BadRequest, UnsupportedMedia

_MOST_PARTS = 64
_MOST_HEADERS = 4096  # bytes of the headers of a part
_MOST_BOUNDARY = 70  # characters (RFC 2046)
_LINE = b"\r\n"


@dataclass(slots=True)
class Form:
    """`fields`: the texts by name, in order. `files`: the content of files by name."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, memoryview] = field(default_factory=dict)


def form_boundary(content_type: str) -> bytes:
    """The boundary in a `content-type`. UnsupportedMedia for another type, BadRequest for a bad boundary."""
    message = _headers(f"content-type: {content_type}")
    if message.get_content_type() != "multipart/form-data":
        came = repr(content_type[:80]) if content_type else "none"
        raise UnsupportedMedia(f"header content-type: expected multipart/form-data, got {came}")
    boundary = message.get_param("boundary", "")
    if not isinstance(boundary, str) or not boundary.isascii() or not 1 <= len(boundary) <= _MOST_BOUNDARY:
        raise BadRequest(f"header content-type: expected a boundary of 1 to {_MOST_BOUNDARY} characters")
    return boundary.encode()


def read_form(body: bytes | bytearray, boundary: bytes) -> Form:
    """The form in a body. Files are views of the body. BadRequest for a damaged form or more than 64 parts."""
    form, mark, view = Form(), b"--" + boundary, memoryview(body)
    at = 0 if body.startswith(mark) else body.find(_LINE + mark) + len(_LINE)
    if not body.startswith(mark, at):
        raise BadRequest("body: expected a multipart form that begins with its boundary")
    for _ in range(_MOST_PARTS + 1):
        at += len(mark)
        if body.startswith(b"--", at):
            return form
        begin = body.find(_LINE, at, at + _MOST_HEADERS)
        head_end = body.find(2 * _LINE, begin, begin + _MOST_HEADERS) if begin >= 0 else -1
        end = body.find(_LINE + mark, head_end) if head_end >= 0 else -1
        if end < 0:
            raise BadRequest("body: expected a multipart form whose parts have headers and end with its boundary")
        head = bytes(body[begin + len(_LINE) : head_end]).decode(errors="replace")
        _add(form, _headers(head), view[head_end + 2 * len(_LINE) : max(end, head_end + 2 * len(_LINE))])
        at = end + len(_LINE)
    raise BadRequest(f"body: expected a multipart form of at most {_MOST_PARTS} parts")


def _add(form: Form, headers: Message, content: memoryview) -> None:
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise BadRequest("body: expected a name in the content-disposition of each part of the form")
    if headers.get_param("filename", header="content-disposition") is not None:
        if name in form.files:
            raise BadRequest(f"{name[:80]}: expected one file")
        form.files[name] = content
        return
    try:
        form.fields.setdefault(name, []).append(bytes(content).decode())
    except UnicodeDecodeError:
        raise BadRequest(f"{name[:80]}: expected text in UTF-8, or a file with its name") from None


def _headers(text: str) -> Message:
    return HeaderParser().parsestr(text.replace("\r\n", "\n"))
