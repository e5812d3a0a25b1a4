"""The server's log: one line per event, JSON for machines or text for people, whoever wrote it.

Every line has its time, level, logger and event. What it is about stands in fields of its own, with OpenTelemetry's and
Triton's names where there are some: ``model``, ``version``, ``request_id``, ``trace_id``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TextIO

import orjson

Form = Literal["auto", "json", "text"]
LOGGERS = ("lathe", "server", "core", "uvicorn")  # Lathe's own, and those of what it is made of
_FIELDS = "about"  # of a record: what it is about
_INDENT = "  "  # of a traceback's lines
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")  # some of these are printable: letters


class Caller(NamedTuple):
    """Whose request something is done for."""

    request_id: str = ""
    trace_id: str = ""


_NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)  # of what is not inference


def about(**fields: object) -> dict[str, Any]:
    """Return what a log call takes as ``extra``; what is empty is left out of the line."""
    return {_FIELDS: fields}


def trace_of(traceparent: str) -> str:
    """Return the trace's id in a W3C `traceparent`, empty where there is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else ""


def configure(form: Form, level: str, stream: TextIO | None = None) -> None:
    """Write everything that is logged in this process to one place (stderr), in one form.

    ``auto`` is text on a terminal, else JSON. Libraries are heard from warnings on.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    as_text = form == "text" or (form == "auto" and stream.isatty())
    handler.setFormatter(TextLines() if as_text else JsonLines())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_level(logging.getLevelNamesMapping()[level.upper()])


def set_level(level: int) -> None:
    """Leave out what is less important."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level)


class JsonLines(logging.Formatter):
    """One JSON object per line, whatever a reader takes for the end of a line: what is not printable is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        line = {**_head(record), **_about(record)}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
        return _json(line)


class TextLines(logging.Formatter):
    """``TIME LEVEL LOGGER: EVENT name=value ...``; the lines of a traceback follow, indented.

    Nothing of a caller's can begin a line: text that is not printable is escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        head = _head(record)
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _about(record).items())
        line = f"{head['timestamp']} {head['level']} {head['logger']}: {_on_one_line(head['event'])}{fields}"
        if record.exc_info and record.exc_info[1] is not None:
            told = "".join(traceback.format_exception(record.exc_info[1])).rstrip().split("\n")
            line = "\n".join([line, *(_INDENT + _on_one_line(each) for each in told)])
        return line


def _head(record: logging.LogRecord) -> dict[str, str]:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    level = record.levelname.lower()
    name = record.name.removesuffix(".error")  # uvicorn logs all that happens, good or bad, as `uvicorn.error`
    return {"timestamp": at, "level": level, "logger": name, "event": record.getMessage()}


def _about(record: logging.LogRecord) -> dict[str, object]:
    caller = CALLER.get()
    fields = {**caller._asdict(), **getattr(record, _FIELDS, {})}
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _quoted(value: object) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=') else _json(text)


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else _json(text)[1:-1]


def _json(value: object) -> str:
    """Return JSON of printable characters alone.

    No reader may end a line where this writer does not, and no terminal may obey what a caller sent: besides controls
    below U+0020, which every JSON writer escapes, these are U+0085, U+2028, the controls of C1, marks of direction, ...
    """
    try:
        text = orjson.dumps(value, default=str).decode()
    except TypeError:  # lone surrogates
        text = json.dumps(value, default=str, separators=(",", ":"))
    return text if text.isprintable() else _UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]
