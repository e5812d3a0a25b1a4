"""Server-sent events as a client reads them (WHATWG HTML, 9.2), as far as Lathe sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event: ``state`` with the job's state, or what the job's process reported, by its kind."""

    kind: str
    data: Mapping[str, Any]
    id: str = ""  # to go on after it; states have none


def job_events(lines: Iterable[str]) -> Iterator[JobEvent]:
    """Read a stream's lines; an event that is cut off is left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield _event(fields)
            fields = {}
        else:
            fields = {}  # a comment


def _event(fields: Mapping[str, str]) -> JobEvent:
    try:
        data = orjson.loads(fields["data"])
    except orjson.JSONDecodeError:
        data = {"text": fields["data"]}
    return JobEvent(fields.get("event", "message"), data if isinstance(data, dict) else {}, fields.get("id", ""))
