"""The server's log: one line per event of any library, as JSON for machines or text for people.

Every line has a time, level, logger and event. Further fields describe the event's context, with OpenTelemetry's or
Triton's names if there are any: `model`, `version`, `request_id`, `trace_id`.
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

LogFormat = Literal["auto", "json", "text"]
LOGGERS = ("lathe", "uvicorn")
_FIELDS = "about"  # the attribute of a log record that holds its fields
_INDENT = "  "  # of the lines of a traceback
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")  # candidates only: `_escape` keeps printable ones, such as letters


class Caller(NamedTuple):
    """The ids of the request that the current task works for; empty outside of requests, and for inference."""

    request_id: str = ""
    trace_id: str = ""


_NO_CALLER = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=_NO_CALLER)  # not set for inference


def log_fields(**fields: object) -> dict[str, Any]:
    """Return the `extra` argument of a log call with these fields; None and "" are omitted from the line."""
    return {_FIELDS: fields}


def parse_trace_id(traceparent: str) -> str:
    """Return the trace id in a W3C `traceparent` header; empty if it has none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else ""


def configure(form: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Write all log records of this process to `stream` (default: stderr), in one format; replaces earlier handlers.

    `auto` is text on a terminal, otherwise JSON. `level` is a name, such as "info", for Lathe and uvicorn; records of
    other libraries are logged from level warning on.
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


def level_in_force() -> int:
    """Return the least level that Lathe logs."""
    return logging.getLogger(LOGGERS[0]).getEffectiveLevel()


def set_level(level: int) -> None:
    """Set the least level that Lathe and uvicorn log."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level)


class JsonLines(logging.Formatter):
    """One JSON object per line. Unprintable characters are escaped, so that no reader sees a further line end."""

    def format(self, record: logging.LogRecord) -> str:
        line = {**_head(record), **_about(record)}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
        return _json(line)


class TextLines(logging.Formatter):
    """`TIME LEVEL LOGGER: EVENT name=value ...`; the lines of a traceback follow, indented.

    Text that is not printable is escaped, so that no text of a client can begin a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        head = _head(record)
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _about(record).items())
        line = f"{head['timestamp']} {head['level']} {head['logger']}: {_on_one_line(head['event'])}{fields}"
        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip().split("\n")
            line = "\n".join([line, *(_INDENT + _on_one_line(each) for each in trace)])
        return line


def _head(record: logging.LogRecord) -> dict[str, str]:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    level = record.levelname.lower()
    name = record.name.removesuffix(".error")  # uvicorn uses the logger `uvicorn.error` for all levels
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
    """Return JSON with only printable characters.

    Otherwise a reader could see a line end in a client's text, or a terminal could execute a control sequence. JSON
    writers escape the controls below U+0020; this also escapes U+0085, U+2028, the C1 controls, direction marks etc.
    """
    try:
        text = orjson.dumps(value, default=str).decode()
    except TypeError:  # lone surrogates
        text = json.dumps(value, default=str, separators=(",", ":"))
    return text if text.isprintable() else _UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]
