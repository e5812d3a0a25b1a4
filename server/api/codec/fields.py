"""Checks fields of a request's JSON: their types, and the parameters that every request may have."""

from __future__ import annotations

from typing import Any

from lathe.server.errors import BadRequest, Unsupported


def expect(value: object, kind: type, name: str) -> Any:
    """Return `value` if it has the type `kind`; raises BadRequest otherwise. A boolean is no integer.

    `name` names the field in the error.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        got = "nothing" if value is None else type(value).__name__
        raise BadRequest(f"{name}: expected {_WORDS[kind]}, got {got}")
    return value


_WORDS = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "a boolean"}


def parameters_of(value: object, name: str) -> dict[str, Any]:
    """Return `parameters` of a request, an input or an output, {} for None; raises BadRequest if it is no object."""
    return {} if value is None else expect(value, dict, name)


def refuse_sequences(parameters: dict[str, Any]) -> None:
    """Raise Unsupported if the request belongs to a sequence: no state is kept between requests."""
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        if parameters.get(name):  # 0, an empty string and false mean: no sequence
            raise Unsupported(f"parameters.{name}: sequences are not supported; each request stands for itself")


def priority_of(level: object) -> int:
    """Return the priority of a request, 0 if it sets none (None); BadRequest if it is no integer or negative."""
    if level is None:
        return 0
    value = expect(level, int, "parameters.priority")
    if value < 0:
        raise BadRequest(f"parameters.priority: expected a level, 0 or more, got {value}")
    return int(value)


def timeout_of(microseconds: object) -> float | None:
    """Return the timeout of a request in seconds; None for None and 0: it has none.

    BadRequest if `microseconds` is no integer or negative.
    """
    if microseconds is None or microseconds == 0:
        return None
    value = expect(microseconds, int, "parameters.timeout")
    if value < 0:
        raise BadRequest(f"parameters.timeout: expected microseconds, 0 or more, got {value}")
    return float(value) / 1e6
