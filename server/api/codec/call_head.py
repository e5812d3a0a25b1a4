"""Parses the URL and headers of an inference request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from lathe.server.api.codec.compression import accepted_coding
from lathe.server.errors import BadRequest

STICKY_KEY = "lathe-sticky-key"  # header: during a canary trial, requests with equal keys go to the same version
_PATH = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([^/?#]+))?/infer")


@dataclass(frozen=True, slots=True)
class CallHead:
    """The target of one inference request, and how its body is read and answered."""

    model: str
    version: str = ""
    json_bytes: int | None = None  # length of the JSON at the start of the body; None: the whole body
    encoding: bytes = b""  # content coding of the request's body; empty: none
    accepts: bytes = b""  # content coding that the answer may have; empty: none
    is_only_coding: bool = False  # the caller listed only that coding
    content_length: int = -1  # -1: no such header; the body is chunked or empty
    traceparent: str = ""  # W3C trace context
    authorization: str = ""  # the header's raw value
    request_id: str = ""  # chosen by the caller or a proxy
    sticky_key: str = ""  # requests with equal keys go to the same version during a canary trial


def is_infer_path(path: bytes) -> bool:
    """Whether this is the path of an inference request."""
    return _PATH.fullmatch(path) is not None


def call_head(path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> CallHead:
    """Parse a path (without a query) and headers (names in lower case); BadRequest for an invalid path or length."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise BadRequest("path: expected /v2/models/{model}[/versions/{version}]/infer")
    found = {name: value.strip() for name, value in headers}
    accepts, alone = accepted_coding(found.get(b"accept-encoding", b""))
    encoding = found.get(b"content-encoding", b"").lower()
    length = _number(found, b"content-length")
    return CallHead(
        model=unquote(match[1]),
        version=unquote(match[2] or b""),
        json_bytes=_number(found, b"inference-header-content-length"),
        encoding=b"" if encoding == b"identity" else encoding,
        accepts=accepts,
        is_only_coding=alone,
        content_length=-1 if length is None else length,
        traceparent=found.get(b"traceparent", b"").decode("latin-1"),
        authorization=found.get(b"authorization", b"").decode("latin-1"),
        request_id=found.get(b"x-request-id", b"").decode("latin-1"),
        sticky_key=found.get(STICKY_KEY.encode(), b"").decode("latin-1"),
    )


def _number(headers: dict[bytes, bytes], name: bytes) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise BadRequest(f"header {name.decode()}: expected a number of bytes, got {value[:40].decode('latin-1')!r}")
    return int(value)
