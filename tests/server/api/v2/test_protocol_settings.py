"""Log settings show the level in force, and a request changes only what it names."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lathe.server.api.v2.protocol_settings import LogSettings
from lathe.server.errors import BadRequest
from lathe.server.telemetry.logs import LOGGERS, set_level

LEVELS = ("log_info", "log_warning", "log_error", "log_verbose_level")
OF_LEVEL = {
    logging.DEBUG: (True, True, True, 1),
    logging.INFO: (True, True, True, 0),
    logging.WARNING: (False, True, True, 0),
    logging.ERROR: (False, False, True, 0),
    logging.CRITICAL: (False, False, False, 0),
}


def shown(settings: LogSettings) -> tuple[Any, ...]:
    return tuple(settings.values[name] for name in LEVELS)


def level() -> int:
    (found,) = {logging.getLogger(name).level for name in LOGGERS}
    return found


@pytest.mark.parametrize("start", OF_LEVEL)
def test_the_settings_show_the_level_in_force(start: int) -> None:
    settings = LogSettings()
    set_level(start)
    assert shown(settings) == OF_LEVEL[start]


@pytest.mark.parametrize("start", OF_LEVEL)
def test_a_change_to_the_present_settings_changes_nothing(start: int) -> None:
    settings = LogSettings()
    set_level(start)
    for changes in ({}, {"log_file": ""}, settings.values, {"log_error": settings.values["log_error"]}):
        assert settings.update(changes) == settings.values
        assert level() == start


@pytest.mark.parametrize(
    ("start", "changes", "expected"),
    [
        (logging.WARNING, {"log_verbose_level": 0}, logging.WARNING),
        (logging.WARNING, {"log_verbose_level": 3}, logging.DEBUG),
        (logging.DEBUG, {"log_verbose_level": 0}, logging.INFO),
        (logging.DEBUG, {"log_info": False}, logging.DEBUG),
        (logging.INFO, {"log_info": False}, logging.WARNING),
        (logging.WARNING, {"log_warning": False}, logging.ERROR),
        (logging.ERROR, {"log_error": False}, logging.CRITICAL),
        (logging.ERROR, {"log_info": True}, logging.INFO),
        (logging.INFO, {"log_warning": False}, logging.INFO),  # the lowest level that is on includes those above it
    ],
)
def test_a_change_applies_to_what_it_names(start: int, changes: dict[str, Any], expected: int) -> None:
    settings = LogSettings()
    set_level(start)
    answer = settings.update(changes)
    assert level() == expected
    assert answer == settings.values
    assert shown(settings)[:3] == OF_LEVEL[expected][:3]


def test_the_verbose_level_of_a_request_is_shown_while_it_is_in_force() -> None:
    settings = LogSettings()
    set_level(logging.INFO)
    assert settings.update({"log_verbose_level": 3})["log_verbose_level"] == 3
    assert settings.update({"log_error": True})["log_verbose_level"] == 3
    assert settings.update({"log_verbose_level": 0})["log_verbose_level"] == 0


def test_an_invalid_change_leaves_the_level_as_it_is() -> None:
    settings = LogSettings()
    set_level(logging.ERROR)
    with pytest.raises(BadRequest, match="log_file: only '' is supported"):
        settings.update({"log_info": True, "log_file": "/tmp/elsewhere"})
    assert level() == logging.ERROR
