"""Settings as people give them, by the environment and by options; every mistake is told by the name they wrote."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from server.settings import Settings

PREFIX = "LATHE_"
# What others read: the command line as a client, the compiler, tests and tools, compose files.
ELSEWHERE = frozenset(
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
    }
)
# Kubernetes puts the addresses of a Service named `lathe`, or `lathe-...`, into the environment of every container.
_SERVICE = re.compile(r"LATHE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+")
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
}


class BadSettings(ValueError):
    """What is wrong with the settings, one line for each."""


def read_settings(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of this process; ``options`` are those of the command line and win.

    Raises BadSettings for values that are not allowed, and for variables that begin like a setting and are none.
    """
    problems = [_unknown(name) for name in strangers(environment)]
    older = environment.get("LATHE_CACHE")  # the compiler's name for the same folder
    if older and not any(name.upper() == variable("cache_dir") for name in environment):
        options = {"cache_dir": older, **options}
    try:
        settings = Settings(**options)
    except ValidationError as error:
        problems += [_problem(item, options) for item in error.errors(include_url=False)]
    if problems:
        raise BadSettings("\n".join(problems))
    return settings


def strangers(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that begin like a setting and that nothing reads."""
    known = {variable(name) for name in Settings.model_fields} | ELSEWHERE
    named = (name for name in environment if name.upper().startswith(PREFIX))
    return sorted(name for name in named if name.upper() not in known and not _from_kubernetes(name, environment))


def variable(field: str) -> str:
    """Return the name of a setting in the environment."""
    return f"{PREFIX}{field}".upper()


def _from_kubernetes(name: str, environment: Mapping[str, str]) -> bool:
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and _is_address(environment[name]))


def _is_address(value: object) -> bool:
    return isinstance(value, str) and _ADDRESS.fullmatch(value) is not None


def _unknown(name: str) -> str:
    known = [variable(field) for field in Settings.model_fields]
    close = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.7)
    return f"{name}: there is no such setting" + (f", did you mean {close[0]}?" if close else "")


def _problem(item: Mapping[str, Any], options: Iterable[str]) -> str:
    """Return one mistake: the name that was written, what was expected, what came."""
    if not item["loc"]:
        return str(item["msg"]).removeprefix("Value error, ")
    field, given = str(item["loc"][0]), item.get("input")
    name = f"--{field.replace('_', '-')}" if field in options else variable(field)
    expected = _EXPECTED.get(item["type"]) or _limit(item)
    text = f"{name}: expected {expected}, got {str(given)!r}"
    if name == "LATHE_PORT" and _is_address(given):
        text += " (Kubernetes sets it for a Service named lathe; enableServiceLinks: false turns that off)"
    return text


def _limit(item: Mapping[str, Any]) -> str:
    limits, kind = item.get("ctx", {}), str(item["type"])
    bound = next((f"{limits[name]:g}" for name in ("ge", "gt", "le", "lt") if name in limits), "")
    words = {
        "greater_than_equal": f"at least {bound}",
        "greater_than": f"more than {bound}",
        "less_than_equal": f"at most {bound}",
        "less_than": f"less than {bound}",
        "literal_error": str(limits.get("expected", "")),
        "string_pattern_mismatch": f"what matches {limits.get('pattern')}",
    }
    return words.get(kind, str(item["msg"]))
