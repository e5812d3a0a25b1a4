"""Server-sent events as a client reads them (WHATWG HTML, 9.2), as far as Lathe sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event: ``state`` with the job's state, or what the job's process reported, by its kind."""

    kind: str
    data: Mapping[str, Any]
    id: str = ""  # to go on after it; states have none


class EventReader:
    """Makes events of a stream's lines; an event that is cut off is left out."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def take(self, line: str) -> JobEvent | None:
        """Return the event that this line ends, if it ends one."""
        if line:
            name, _, value = line.partition(": ")
            self._fields[name] = value
            return None
        fields, self._fields = self._fields, {}
        return _event(fields) if "data" in fields else None  # without data it was a comment


def _event(fields: Mapping[str, str]) -> JobEvent:
    try:
        data = orjson.loads(fields["data"])
    except orjson.JSONDecodeError:
        data = {"text": fields["data"]}
    return JobEvent(fields.get("event", "message"), data if isinstance(data, dict) else {}, fields.get("id", ""))
