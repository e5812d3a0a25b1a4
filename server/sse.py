"""Reads server-sent events (WHATWG HTML, section 9.2), the subset that Lathe sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event of a job: `kind` is `state` for a change of the job's state, otherwise the kind of a progress report.

    `data` is the JSON object of the event. For data that is no JSON it is `{"text": ...}`, for other JSON it is empty.
    """

    kind: str
    data: Mapping[str, Any]
    id: str = ""  # by which a client resumes after this event; `state` events have none


class EventReader:
    """Assembles events from the lines of a stream; an incomplete event at the end is dropped."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def take(self, line: str) -> JobEvent | None:
        """Add a line; returns the event that an empty line completes, otherwise None."""
        if line:
            name, _, value = line.partition(": ")
            self._fields[name] = value
            return None
        fields, self._fields = self._fields, {}
        return _event(fields) if "data" in fields else None  # a comment has no data


def _event(fields: Mapping[str, str]) -> JobEvent:
    try:
        data = orjson.loads(fields["data"])
    except orjson.JSONDecodeError:
        data = {"text": fields["data"]}
    return JobEvent(fields.get("event", "message"), data if isinstance(data, dict) else {}, fields.get("id", ""))
