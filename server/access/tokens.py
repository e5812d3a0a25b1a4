"""JSON Web Tokens (RFC 7519) of an identity provider: signed claims instead of a key of this server's own.

The provider's public keys are read from a file (a JSON Web Key Set, RFC 7517), never fetched. Of a token count `sub`
(who), `scope` (words such as `lathe:infer`), and `lathe_models` (names or patterns; all without it).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt

from server.access.keys import TOKEN, DamagedKeys, Key
from server.access.scopes import Scope

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")  # with public keys only
REMEMBERED = 1024  # tokens whose signature need not be checked again
PREFIX = "lathe:"


class Tokens:
    """Reads tokens of one provider for one audience."""

    def __init__(self, file: Path, issuer: str, audience: str) -> None:
        """Raises OSError, DamagedKeys."""
        self._issuer, self._audience = issuer, audience
        self._keys = _read(file)
        self._seen: OrderedDict[bytes, Key] = OrderedDict()

    def find(self, token: str, now: float) -> Key | None:
        """Return what a token allows, None for one that is not signed by the provider, not for us, or has expired."""
        digest = sha256(token.encode()).digest()
        key = self._seen.get(digest)
        if key is None:
            key = self._verified(token)
            if key is None:
                return None
            self._seen[digest] = key
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        return key if key.expires is None or now < key.expires else None

    def _verified(self, token: str) -> Key | None:
        try:
            header = jwt.get_unverified_header(token)
            claims = jwt.decode(
                token,
                self._keys[header["kid"]],
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


def _read(file: Path) -> dict[str, jwt.PyJWK]:
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(file.read_bytes())).keys
    except (ValueError, TypeError, AttributeError, jwt.PyJWTError) as error:
        raise DamagedKeys(f"key set: {error}") from error
    found = {key.key_id: key for key in keys if key.key_id and key.key_type != "oct"}
    if not found:
        raise DamagedKeys("key set: expected at least one public key with a key id")
    return found
