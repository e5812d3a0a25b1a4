"""API keys, and the file that stores them with their scopes.

A key has the form `lathe_<id>_<secret>`. The file stores only the secret's SHA-256: secrets are 256 random bits, so a
slow password hash would gain nothing. To replace a key, add another one and revoke the first; both work in between.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lathe.core.files import replace_file
from lathe.server.access.quotas import LEAST_RATE, Quota
from lathe.server.access.scopes import Scope

SCHEMA = 1
TOKEN_PREFIX = (
    "jwt:"  # the prefix of the ids of token callers; ids of API keys are hexadecimal, so they never begin with it
)
_KEY = re.compile(r"lathe_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class DamagedKeys(ValueError):
    """A file of API keys, or of the keys that sign tokens, is malformed."""


@dataclass(frozen=True, slots=True)
class Key:
    """One API key, or the claims of a token in the same form.

    `name` is for people; several keys may have the same name. `digest` is the secret's SHA-256 in hexadecimal, empty
    for a token. `models` are names or patterns (`*`, `?`, `[...]`). `created` and `expires` are seconds since 1970;
    `expires` None: never. `rate` (rows per second) and `burst` (rows at once) replace the server's rate limit for
    clients, `token_rate` and `token_burst` its limit of the tokens of language models.
    """

    id: str
    name: str
    digest: str
    scopes: frozenset[Scope]
    models: tuple[str, ...] = ("*",)
    created: int = 0
    expires: int | None = None
    rate: float | None = None
    burst: float | None = None
    token_rate: float | None = None
    token_burst: float | None = None

    @property
    def quota(self) -> Quota | None:
        """The key's rate limit; None if the server's limit applies."""
        return None if self.rate is None else Quota.of(self.rate, self.burst)

    @property
    def token_quota(self) -> Quota | None:
        """The key's limit of the tokens of language models; None if the server's limit applies."""
        return None if self.token_rate is None else Quota.of_tokens(self.token_rate, self.token_burst)

    @property
    def identity(self) -> str:
        """The owner of things made with this key: `key:<id>`, or `jwt:<issuer>:<subject>` for a token."""
        return self.id if self.id.startswith(TOKEN_PREFIX) else f"key:{self.id}"

    def allows(self, scope: Scope, model: str) -> bool:
        """Whether the key has this scope for a model; an empty `model` needs a key for all models.

        The scope train counts for all models, since jobs and datasets have no model.
        """
        if scope not in self.scopes:
            return False
        if scope is Scope.TRAIN or "*" in self.models:  # jobs and datasets have no model; publishing has its own check
            return True
        return model != "" and any(fnmatchcase(model, pattern) for pattern in self.models)

    def to_json(self) -> dict[str, Any]:
        """Return the key's entry in the keys file: all fields, with the digest of the secret, not the secret."""
        return {**asdict(self), "scopes": sorted(self.scopes), "models": list(self.models)}


class KeyRing:
    """All keys of one file, at the time it was read."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.keys: Mapping[str, Key] = {key.id: key for key in keys}
        self._names = Counter(key.name for key in self.keys.values())

    def is_sole(self, key: Key) -> bool:
        """Whether this is a key of the file, and the only one of its name; False for the key of a token."""
        return key.id in self.keys and self._names[key.name] == 1

    def find(self, credential: str, now: float) -> Key | None:
        """Return the key of a credential `lathe_<id>_<secret>`; None if it is unknown, or has expired.

        `now` is in seconds since 1970.
        """
        match = _KEY.fullmatch(credential)
        key = self.keys.get(match[1]) if match else None
        if match is None or key is None or not hmac.compare_digest(key.digest, _digest(match[2])):
            return None
        return key if key.expires is None or now < key.expires else None


def make_key(
    name: str,
    scopes: Iterable[Scope],
    models: Iterable[str],
    now: int,
    expires: int | None,
    quota: tuple[float | None, float | None] = (None, None),
    token_quota: tuple[float | None, float | None] = (None, None),
) -> tuple[Key, str]:
    """Return a new key and its credential `lathe_<id>_<secret>`; neither is stored.

    The credential cannot be computed from the key. `now` and `expires` are seconds since 1970; `quota` is the key's
    `rate` and `burst`, `token_quota` its `token_rate` and `token_burst`.
    """
    identity, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    key = Key(identity, name, _digest(secret), frozenset(scopes), tuple(models), now, expires, *quota, *token_quota)
    return key, f"lathe_{identity}_{secret}"


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Return inode, modification time and size, which change when the file is replaced or written; raises OSError."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_keys(path: Path) -> KeyRing:
    """Read a file of keys; raises OSError, DamagedKeys."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedKeys(f"keys: not JSON: {error}") from error
    match document:
        case {"schema": 1, "keys": list(entries)}:
            return KeyRing(_parse(entry) for entry in entries)
    raise DamagedKeys("keys: expected schema 1 with a list of keys")


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Replace the file atomically and durably; only its owner may read it (mode 0600). Raises OSError."""
    content = json.dumps({"schema": SCHEMA, "keys": [key.to_json() for key in keys]}, indent=2) + "\n"
    replace_file(path, content.encode(), durable=True, mode=0o600)


def _parse(entry: object) -> Key:
    match entry:
        case {
            "id": str(identity),
            "name": str(name),
            "digest": str(digest),
            "scopes": [*scopes],
            "models": [*models],
            "created": int(created),
            "expires": int() | None as expires,
            **rest,
        } if all(isinstance(model, str) for model in models) and len(digest) == 64:
            try:
                allowed = frozenset(map(Scope, scopes))
                quotas = *_quota(rest, ""), *_quota(rest, "token_")
                return Key(identity, name, digest, allowed, tuple(models), created, expires, *quotas)
            except ValueError as error:
                raise DamagedKeys(f"keys: {identity}: {error}") from error
    raise DamagedKeys("keys: expected id, name, digest, scopes, models, created and expires in each")


def _quota(entry: Mapping[Any, object], prefix: str) -> tuple[float | None, float | None]:
    """Return rate and burst of an entry, None for a missing field. Files of older versions have neither field.

    `prefix`: of the names of the fields. Raises ValueError for a burst without a rate, a rate below `LEAST_RATE`, a
    burst below 1, and other types.
    """
    match entry.get(f"{prefix}rate"), entry.get(f"{prefix}burst"):
        case (None, None):
            return None, None
        case (int() | float() as rate, None) if rate >= LEAST_RATE:
            return rate, None
        case (int() | float() as rate, int() | float() as burst) if rate >= LEAST_RATE and burst >= 1:
            return rate, burst
    raise ValueError(f"expected a {prefix}rate from {LEAST_RATE:g}, and a burst of 1 or more only beside a rate")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
