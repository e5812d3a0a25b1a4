"""Fields of a request's JSON: what is expected of them, and the parameters that every request may have."""

from __future__ import annotations

from typing import Any

from lathe.server.errors import BadRequest, Unsupported


def expect(value: object, kind: type, name: str) -> Any:
    """Return a value that is of this type; raises BadRequest for another."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        got = "nothing" if value is None else type(value).__name__
        raise BadRequest(f"{name}: expected {_WORDS[kind]}, got {got}")
    return value


_WORDS = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "a boolean"}


def parameters_of(value: object, name: str) -> dict[str, Any]:
    """Return the parameters that a request, an input or an output has; raises BadRequest for what are none."""
    return {} if value is None else expect(value, dict, name)


def refuse_sequences(parameters: dict[str, Any]) -> None:
    """Raise Unsupported for a request that counts on what others of its sequence left behind."""
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        if parameters.get(name):  # 0, an empty string and false say that there is none
            raise Unsupported(f"parameters.{name}: sequences are not supported; each request stands for itself")


def priority_of(level: object) -> int:
    """Return a request's priority, 0 where it says nothing of it; raises BadRequest."""
    if level is None:
        return 0
    value = expect(level, int, "parameters.priority")
    if value < 0:
        raise BadRequest(f"parameters.priority: expected a level, 0 or more, got {value}")
    return int(value)


def timeout_of(microseconds: object) -> float | None:
    """Return the seconds that a request may take, None where it says nothing of it; raises BadRequest."""
    if microseconds is None or microseconds == 0:
        return None
    value = expect(microseconds, int, "parameters.timeout")
    if value < 0:
        raise BadRequest(f"parameters.timeout: expected microseconds, 0 or more, got {value}")
    return float(value) / 1e6
