"""The one rule for each name that becomes a path, checked when it comes in and again when it is read from disk."""

from __future__ import annotations

import re

from server.errors import BadRequest

MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
KEY = re.compile(r"[\x21-\x7e]{1,255}")
_KEY_OF_JOB = re.compile(r"job-[0-9a-f]{20}(-.*)?")  # what jobs of earlier releases made their changes with

LIVE = "live"  # the alias that answers a request that names no version


def check_model(name: str) -> str:
    """Return ``name`` if it may name a model; raises BadRequest."""
    return _check(MODEL, "model name", name)


def check_alias(name: str) -> str:
    """Return ``name`` if it may name an alias; raises BadRequest."""
    return _check(ALIAS, "alias", name)


def check_file(name: str) -> str:
    """Return ``name`` if it may name a file of a version; raises BadRequest."""
    return _check(FILE, "file name", name)


def check_version(text: str) -> int:
    """Return the version number that ``text`` spells; raises BadRequest."""
    return int(_check(VERSION, "version", text))


def check_key(text: str) -> str:
    """Return ``text`` if it may be a caller's idempotency key (visible ASCII, and no job's); raises BadRequest."""
    if _KEY_OF_JOB.fullmatch(text):
        raise BadRequest(f"Idempotency-Key {text[:80]!r}: expected another one, as jobs have those of this form")
    return _check(KEY, "Idempotency-Key", text)


def is_model(name: str) -> bool:
    """Say whether a folder's name can be a model's."""
    return MODEL.fullmatch(name) is not None


def is_version(name: str) -> bool:
    """Say whether a folder's name can be a version's."""
    return VERSION.fullmatch(name) is not None


def _check(rule: re.Pattern[str], what: str, text: str) -> str:
    if rule.fullmatch(text) is None:
        raise BadRequest(f"{what} {text[:80]!r}: expected {rule.pattern}")
    return text
