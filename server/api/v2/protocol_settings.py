"""The protocol's log and trace settings: supported changes are applied, all others are refused."""

from __future__ import annotations

import logging
from typing import Any

from lathe.server.api.management.schemas import integral
from lathe.server.errors import BadRequest
from lathe.server.telemetry.logs import level_in_force, set_level

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}  # the lowest first


class LogSettings:
    """Triton's log settings, applied to all of the server's log.

    Levels are ordered: the lowest one that is switched on includes all above it.
    """

    def __init__(self) -> None:
        self._verbose_level = 1  # shown while debug lines are logged: the level that a request set last

    @property
    def values(self) -> dict[str, Any]:
        """All settings, according to the level in force, which `LATHE_LOG_LEVEL` sets at the start."""
        level = level_in_force()
        return {
            "log_file": "",
            **{f"log_{name}": level <= least for name, least in _LEVELS.items()},
            "log_verbose_level": self._verbose_level if level <= logging.DEBUG else 0,
            "log_format": "default",
        }

    def update(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Check all changes, then apply them, and return all settings; BadRequest and no change if one is invalid."""
        before = self.values
        changes = {name: integral(value) for name, value in changes.items()}
        for name, value in changes.items():
            _check(before, name, value)
        wanted = before | changes
        if wanted != before:
            self._verbose_level = wanted["log_verbose_level"] or 1
            set_level(_level_of(wanted))
        return self.values


def _check(settings: dict[str, Any], name: str, value: object) -> None:
    if name not in settings:
        raise BadRequest(f"logging: expected some of {list(settings)}, got {name!r}")
    current = settings[name]
    if type(value) is not type(current):
        raise BadRequest(f"logging.{name}: expected a value like {current!r}, got {value!r}")
    if type(value) is int and not 0 <= value < 1 << 31:
        raise BadRequest(f"logging.{name}: expected a level from 0 to {(1 << 31) - 1}, got {value}")
    if isinstance(current, str) and value != current:
        raise BadRequest(f"logging.{name}: only {current!r} is supported, got {value!r}")


def _level_of(settings: dict[str, Any]) -> int:
    if settings["log_verbose_level"] > 0:
        return logging.DEBUG
    return next((level for name, level in _LEVELS.items() if settings[f"log_{name}"]), logging.CRITICAL)


TRACE_SETTINGS: dict[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


def update_trace(changes: dict[str, Any]) -> dict[str, Any]:
    """The trace settings (`TRACE_SETTINGS` itself), which are constant: this kind of tracing is not supported.

    BadRequest for an unknown setting, or a value that is neither the present one nor None (reset).
    """
    for name, value in changes.items():
        if name not in TRACE_SETTINGS:
            raise BadRequest(f"trace: expected some of {list(TRACE_SETTINGS)}, got {name!r}")
        if value is not None and value != TRACE_SETTINGS[name]:
            raise BadRequest(f"trace.{name}: tracing is not supported, so it stays {TRACE_SETTINGS[name]!r}")
    return TRACE_SETTINGS
