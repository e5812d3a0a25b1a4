"""The patterns of names that become paths; checked in requests, and again when read from disk."""

from __future__ import annotations

import re

from lathe.server.errors import BadRequest

MODEL_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ALIAS_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
FILE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,8}")
KEY_PATTERN = re.compile(r"[\x21-\x7e]{1,255}")
_RESERVED_KEY = re.compile(r"job-[0-9a-f]{20}(-.*)?")  # keys that jobs of earlier releases used

LIVE_ALIAS = "live"  # the alias for requests without a version


def check_model(name: str) -> str:
    """Return `name` if it may name a model; raises BadRequest."""
    return _check(MODEL_PATTERN, "model name", name)


def check_alias(name: str) -> str:
    """Return `name` if it may name an alias; raises BadRequest."""
    return _check(ALIAS_PATTERN, "alias", name)


def check_file(name: str) -> str:
    """Return `name` if it may name a file of a version; raises BadRequest."""
    return _check(FILE_PATTERN, "file name", name)


def check_version(text: str) -> int:
    """Return the version number that `text` spells; raises BadRequest."""
    return int(_check(VERSION_PATTERN, "version", text))


def check_key(text: str) -> str:
    """Return `text` if it is a valid idempotency key of a caller: visible ASCII, not a job's; raises BadRequest."""
    if _RESERVED_KEY.fullmatch(text):
        raise BadRequest(
            f"Idempotency-Key {text[:80]!r}: expected another one: keys of this form are reserved for jobs"
        )
    return _check(KEY_PATTERN, "Idempotency-Key", text)


def is_model_name(name: str) -> bool:
    """Whether a folder's name is a valid model name."""
    return MODEL_PATTERN.fullmatch(name) is not None


def is_version_number(name: str) -> bool:
    """Whether a folder's name is a version number."""
    return VERSION_PATTERN.fullmatch(name) is not None


def _check(rule: re.Pattern[str], what: str, text: str) -> str:
    if rule.fullmatch(text) is None:
        raise BadRequest(f"{what} {text[:80]!r}: expected {rule.pattern}")
    return text
