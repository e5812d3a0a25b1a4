"""Reads settings from the environment and from command-line options; errors name the variable or option."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from lathe.core.validation_errors import expectation
from lathe.server.settings import Settings

PREFIX = "LATHE_"
# Variables that are no server settings: of the client commands, the compiler, tests, tools and compose files.
OTHER_VARIABLES = frozenset(
    {
        "LATHE_URL",
        "LATHE_KEY",
        "LATHE_CA",
        "LATHE_CERT",
        "LATHE_CERT_KEY",
        "LATHE_TARGET",
        "LATHE_CACHE",
        "LATHE_CHECK_PLANS",
        "LATHE_BASE",
        "LATHE_BIND",
        "LATHE_CONTAINER_CPUS",
        "LATHE_CONTAINER_MEMORY",
        "LATHE_EXPORTERS",
        "LATHE_IMAGE",
        "LATHE_IMAGE_PACKAGES",
    }
)
# For a Service named `lathe` or `lathe-...` Kubernetes sets variables with its addresses in every container.
_SERVICE = re.compile(r"LATHE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+")


class BadSettings(ValueError):
    """Invalid settings; the message has one line for each problem."""


def read_settings(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of this process; `options`, those of the command line, take precedence over variables.

    Values are read from the variables of this process. `environment` is used only to find unknown variables and
    `LATHE_CACHE`, an older name of `LATHE_CACHE_DIR`. Raises BadSettings for invalid values, unknown options, and
    unknown variables that begin with `LATHE_`.
    """
    problems = [_unknown(name) for name in unknown_variables(environment)]
    old_name = environment.get("LATHE_CACHE")  # an older name of LATHE_CACHE_DIR
    if old_name and not any(name.upper() == variable("cache_dir") for name in environment):
        options = {"cache_dir": old_name, **options}
    try:
        settings = Settings(**options)
    except ValidationError as error:
        problems += [_problem(item, options) for item in error.errors(include_url=False)]
    if problems:
        raise BadSettings("\n".join(problems))
    return settings


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the unknown variables that begin with `LATHE_`, sorted.

    Known are the settings, the variables of other parts of Lathe, and those that Kubernetes sets for a service.
    """
    known = {variable(name) for name in Settings.model_fields} | OTHER_VARIABLES
    ours = (name for name in environment if name.upper().startswith(PREFIX))
    return sorted(name for name in ours if name.upper() not in known and not _is_from_kubernetes(name, environment))


def variable(field: str) -> str:
    """Return the name of a setting's environment variable: `LATHE_` and the name of the field, in upper case."""
    return f"{PREFIX}{field}".upper()


def _is_from_kubernetes(name: str, environment: Mapping[str, str]) -> bool:
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and _is_address(environment[name]))


def _is_address(value: object) -> bool:
    return isinstance(value, str) and _ADDRESS.fullmatch(value) is not None


def _unknown(name: str) -> str:
    known = [variable(field) for field in Settings.model_fields]
    close = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.7)
    return f"{name}: there is no such setting" + (f", did you mean {close[0]}?" if close else "")


def _problem(item: Mapping[str, Any], options: Iterable[str]) -> str:
    """Return one line on an error of pydantic: the option or variable, what was expected, what was given."""
    if not item["loc"]:
        return expectation(item)
    field, given = str(item["loc"][0]), item.get("input")
    name = f"--{field.replace('_', '-')}" if field in options else variable(field)
    text = f"{name}: {expectation(item)}, got {str(given)!r}"
    if name == "LATHE_PORT" and _is_address(given):
        text += " (Kubernetes sets it for a Service named lathe; enableServiceLinks: false turns that off)"
    return text
