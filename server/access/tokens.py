"""JSON Web Tokens (RFC 7519) of an identity provider: signed claims instead of a key of this server's own.

The provider's public keys are read from a file (a JSON Web Key Set, RFC 7517), never fetched. Whatever changes it, the
keys that are not in it any more sign nothing from then on. Of a token count `sub` (who), `scope` (words such as
`lathe:infer`), and `lathe_models` (names or patterns; all without it).
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

from server.access.keys import TOKEN, DamagedKeys, Key, stamp_of
from server.access.scopes import Scope

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")  # with public keys only
REMEMBERED = 1024  # tokens whose signature need not be checked again
PREFIX = "lathe:"


@dataclass(frozen=True, slots=True)
class _KeySet:
    """The provider's keys as they were when read, and the tokens that they were seen to have signed."""

    keys: Mapping[str, jwt.PyJWK]
    seen: OrderedDict[bytes, Key] = field(default_factory=OrderedDict)


class Tokens:
    """Reads tokens of one provider for one audience.

    Tokens are looked up on the event loop, which reads no file: :meth:`refresh` does, on whatever thread.
    """

    def __init__(self, file: Path, issuer: str, audience: str) -> None:
        """Raises OSError, DamagedKeys."""
        self._issuer, self._audience = issuer, audience
        self._file = file
        self._stamp = stamp_of(file)
        self._set = _KeySet(_read(file))
        self.missed: Callable[[], None] = lambda: None  # called when a token names a key that is not known

    def refresh(self, *, anyway: bool = False) -> bool:
        """Read the keys again if the file has changed, or ``anyway``; returns whether they are others now.

        Raises OSError, DamagedKeys; the keys are then as they were.
        """
        stamp = stamp_of(self._file)
        if stamp == self._stamp and not anyway:
            return False
        keys, before = _read(self._file), self._set.keys
        self._stamp = stamp
        if _material(keys) == _material(before):
            return False
        self._set = _KeySet(keys)  # in one step with the tokens that were seen: those of keys that are gone are, too
        return True

    def find(self, token: str, now: float) -> Key | None:
        """Return what a token allows, None for one that is not signed by the provider, not for us, or has expired."""
        known = self._set
        digest = sha256(token.encode()).digest()
        key = known.seen.get(digest)
        if key is None:
            key = self._verified(token, known.keys)
            if key is None:
                return None
            known.seen[digest] = key
            if len(known.seen) > REMEMBERED:
                known.seen.popitem(last=False)
        return key if key.expires is None or now < key.expires else None

    def _verified(self, token: str, keys: Mapping[str, jwt.PyJWK]) -> Key | None:
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
    """Return what claims allow, as a key whose id is no other key's, whatever the subject is called."""
    words = str(claims.get("scope", "")).split()
    named = {word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX)}
    scopes = frozenset(scope for scope in Scope if scope.value in named)
    models = claims.get("lathe_models", ["*"])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise ValueError("lathe_models: expected a list of names")
    subject = claims["sub"]
    if not isinstance(subject, str):
        raise ValueError("sub: expected text")
    identity = f"{TOKEN}{issuer}:{subject}"
    return Key(identity, subject, "", scopes, tuple(models), int(claims.get("iat", 0)), int(claims["exp"]))


def _material(keys: Mapping[str, jwt.PyJWK]) -> dict[str, object]:
    """Return what makes two key sets the same."""
    return {name: key._jwk_data for name, key in keys.items()}


def _read(file: Path) -> dict[str, jwt.PyJWK]:
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(file.read_bytes())).keys
    except (ValueError, TypeError, AttributeError, jwt.PyJWTError) as error:
        raise DamagedKeys(f"key set: {error}") from error
    found = {key.key_id: key for key in keys if key.key_id and key.key_type != "oct"}
    if not found:
        raise DamagedKeys("key set: expected at least one public key with a key id")
    return found
