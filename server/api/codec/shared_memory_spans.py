"""Parses the shared memory parameters of a request's tensors.

Answers do not repeat them: NVIDIA's C++ client takes every output that has parameters for one with binary data.
"""

from __future__ import annotations

from typing import Any

from lathe.server.errors import BadRequest
from lathe.server.types import Span

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


def parse_span(parameters: dict[str, Any], place: str) -> Span | None:
    """The shared memory span that these parameters give; None if the tensor is in the message. May raise BadRequest."""
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
