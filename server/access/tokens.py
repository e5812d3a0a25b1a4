"""JSON Web Tokens (RFC 7519) of an identity provider: signed claims instead of API keys.

The provider's public keys are read from a file (a JSON Web Key Set, RFC 7517), never fetched. When the file changes,
tokens signed with keys that it no longer has are refused. The claims used, besides `iss`, `aud` and `exp`, are `sub`
(the caller), `scope` (words such as `lathe:infer`) and `lathe_models` (names or patterns; default: all models).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt

from lathe.server.access.keys import TOKEN_PREFIX, DamagedKeys, Key, file_stamp
from lathe.server.access.scopes import Scope

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")  # public-key algorithms only
CACHED_TOKENS = 1024  # verified tokens that are cached
PREFIX = "lathe:"


@dataclass(frozen=True, slots=True)
class _KeySet:
    """The provider's public keys by id (`kid`), and a cache of the tokens verified with them, by their SHA-256."""

    keys: Mapping[str, jwt.PyJWK]
    seen: OrderedDict[bytes, Key] = field(default_factory=OrderedDict)


class Tokens:
    """Verifies tokens of one provider (issuer) for one audience.

    `find` runs on the event loop and reads no file. `refresh` reads the file and may run on any thread.
    """

    def __init__(self, file: Path, issuer: str, audience: str) -> None:
        """Read the key set; raises OSError, DamagedKeys."""
        self._issuer, self._audience = issuer, audience
        self._file = file
        self._stamp = file_stamp(file)
        self._set = _KeySet(_read(file))
        self.missed: Callable[[], None] = lambda: None  # called when a token names an unknown key

    def refresh(self, *, anyway: bool = False) -> bool:
        """Reload the keys if the file has changed, or `anyway`; returns whether the keys differ now.

        Raises OSError, DamagedKeys, and keeps the old keys then.
        """
        stamp = file_stamp(self._file)
        if stamp == self._stamp and not anyway:
            return False
        keys, before = _read(self._file), self._set.keys
        self._stamp = stamp
        if _material(keys) == _material(before):
            return False
        self._set = _KeySet(keys)  # with an empty cache, so that tokens of removed keys are not accepted from it
        return True

    def find(self, token: str, now: float) -> Key | None:
        """Return a token's claims as a key; None if the token is not valid at `now` (seconds since 1970).

        A token is not valid if it is malformed or expired, lacks `exp` or `sub`, has another issuer or audience, or is
        not signed with a key of the key set. Calls `missed` if the token names a key that the key set has not.
        """
        current = self._set
        digest = sha256(token.encode()).digest()
        key = current.seen.get(digest)
        if key is None:
            key = self._verify(token, current.keys)
            if key is None:
                return None
            current.seen[digest] = key
            if len(current.seen) > CACHED_TOKENS:
                current.seen.popitem(last=False)
        return key if key.expires is None or now < key.expires else None

    def _verify(self, token: str, keys: Mapping[str, jwt.PyJWK]) -> Key | None:
        try:
            name = jwt.get_unverified_header(token)["kid"]
            if name not in keys:
                self.missed()
            claims = jwt.decode(
                token,
                keys[name],
                algorithms=ALGORITHMS,
                issuer=self._issuer,
                audience=self._audience,
                options={"require": ["exp", "sub"]},
            )
            return _key(claims, self._issuer)
        except (jwt.InvalidTokenError, KeyError, TypeError, ValueError):
            return None


def _key(claims: Mapping[str, Any], issuer: str) -> Key:
    """Return a token's claims as a key whose id (a prefix, issuer and subject) no API key can have.

    ValueError, KeyError or TypeError for claims that are missing or malformed.
    """
    words = str(claims.get("scope", "")).split()
    named = {word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX)}
    scopes = frozenset(scope for scope in Scope if scope.value in named)
    models = claims.get("lathe_models", ["*"])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise ValueError("lathe_models: expected a list of names")
    subject = claims["sub"]
    if not isinstance(subject, str):
        raise ValueError("sub: expected text")
    identity = f"{TOKEN_PREFIX}{issuer}:{subject}"
    return Key(identity, subject, "", scopes, tuple(models), int(claims.get("iat", 0)), int(claims["exp"]))


def _material(keys: Mapping[str, jwt.PyJWK]) -> dict[str, object]:
    """Return the JSON Web Key of each key by its name (`kid`), for the comparison of two key sets."""
    return {name: key._jwk_data for name, key in keys.items()}


def _read(file: Path) -> dict[str, jwt.PyJWK]:
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(file.read_bytes())).keys
    except (ValueError, TypeError, AttributeError, RecursionError, jwt.PyJWTError) as error:
        raise DamagedKeys(f"key set: {error}") from error
    found = {key.key_id: key for key in keys if key.key_id and key.key_type != "oct"}
    if not found:
        raise DamagedKeys("key set: expected at least one public key with a key id")
    return found
