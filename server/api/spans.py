"""Where a tensor in shared memory is, as a request's parameters say it.

An answer repeats none of it: NVIDIA's client in C++ takes every output with parameters for one with binary data.
"""

from __future__ import annotations

from typing import Any

from server.errors import BadRequest
from server.types import Span

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


def span_of(parameters: dict[str, Any], place: str) -> Span | None:
    """Return where these parameters say that a tensor is, None where it is in the message; raises BadRequest."""
    if not parameters.keys() & {_REGION, _OFFSET, _SIZE}:
        return None
    region = parameters.get(_REGION)
    if not isinstance(region, str) or not region:
        raise BadRequest(f"{place}.parameters.{_REGION}: expected the name of a region, got {region!r:.80}")
    return Span(region, _bytes(parameters, _OFFSET, place, 0), _bytes(parameters, _SIZE, place, None))


def _bytes(parameters: dict[str, Any], name: str, place: str, default: int | None) -> int:
    value = parameters.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRequest(f"{place}.parameters.{name}: expected a number of bytes, got {value!r:.80}")
    return value
