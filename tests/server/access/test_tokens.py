"""Tokens of an identity provider: their signature, audience, expiry and scopes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from lathe.server.access.authority import Authority
from lathe.server.access.keys import DamagedKeys
from lathe.server.access.scopes import Scope
from lathe.server.access.tokens import Tokens
from lathe.server.errors import Unauthorized
from tests.server.repository.world import toy
from tests.server.service import service

PRIVATE = ec.generate_private_key(ec.SECP256R1())
STRANGER = ec.generate_private_key(ec.SECP256R1())
NOW, DAY = int(time.time()), 86_400
CLAIMS = {
    "iss": "https://login.example.org",
    "aud": "lathe",
    "sub": "alice",
    "iat": NOW,
    "exp": NOW + DAY,  # real time passes while the tests run
    "scope": "openid lathe:infer lathe:read lathe:fly",
    "lathe_models": ["m*"],
}


def write_key_set(path: Path, key: ec.EllipticCurvePrivateKey = PRIVATE, kid: str = "one") -> Path:
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps({"keys": [{**public, "kid": kid, "alg": "ES256", "use": "sig"}]}))
    draft.rename(path)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(write_key_set(tmp_path / "jwks.json"), "https://login.example.org", "lathe")


def signed(key: Any = PRIVATE, algorithm: str = "ES256", kid: str | None = "one", **changed: Any) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changed}.items() if value is not None}
    return jwt.encode(claims, key, algorithm, headers={"kid": kid} if kid else {})


def test_tokens_of_a_removed_key_are_refused_and_those_of_a_new_one_accepted(tmp_path: Path) -> None:
    file = write_key_set(tmp_path / "jwks.json")
    tokens = Tokens(file, CLAIMS["iss"], "lathe")
    missed: list[bool] = []
    tokens.missed = lambda: missed.append(True)
    old, new = signed(), signed(STRANGER, kid="two")
    assert tokens.find(old, NOW) is not None and not missed
    assert tokens.find(new, NOW) is None and missed == [True]
    assert not tokens.refresh()
    write_key_set(file, STRANGER, "two")
    assert (tokens.refresh(), tokens.refresh()) == (True, False)
    assert tokens.find(old, NOW) is None
    assert tokens.find(new, NOW) is not None
    write_key_set(file, PRIVATE, "two")  # another key with the same id
    assert tokens.refresh()
    assert tokens.find(new, NOW) is None


def test_a_token_checked_while_the_keys_change_is_not_remembered(tmp_path: Path) -> None:
    """Another thread reads the file, between the check of the keys and the note of the tokens they signed."""
    tokens = Tokens(write_key_set(tmp_path / "jwks.json"), CLAIMS["iss"], "lathe")
    verified = tokens._verify

    def meanwhile(token: str, keys: Any) -> Any:
        found = verified(token, keys)
        write_key_set(tmp_path / "jwks.json", STRANGER, "two")
        tokens.refresh()
        return found

    tokens._verify = meanwhile  # type: ignore[method-assign]
    assert tokens.find(signed(), NOW) is not None  # checked before the change
    tokens._verify = verified  # type: ignore[method-assign]
    assert tokens.find(signed(), NOW) is None


@pytest.mark.parametrize("content", ["", "{}", '{"keys": []}'])
def test_an_invalid_file_leaves_the_keys_unchanged(tmp_path: Path, content: str) -> None:
    file = write_key_set(tmp_path / "jwks.json")
    authority = Authority("127.0.0.1", tokens=Tokens(file, CLAIMS["iss"], "lathe"))
    file.write_text(content)
    assert not authority.refresh()
    assert authority.caller(f"Bearer {signed()}").name == "alice"


def test_an_unknown_key_id_reloads_the_file_at_once_but_not_every_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = write_key_set(tmp_path / "jwks.json")
        tokens = Tokens(file, CLAIMS["iss"], "lathe")
        authority = Authority("127.0.0.1", tokens=tokens)
        threads: list[str] = []
        refresh = tokens.refresh

        def counted(*, anyway: bool = False) -> bool:
            threads.append(threading.current_thread().name)
            return refresh(anyway=anyway)

        tokens.refresh = counted  # type: ignore[method-assign]
        watching = asyncio.create_task(authority.watch(3600.0))
        write_key_set(file, STRANGER, "two")
        new, end = f"Bearer {signed(STRANGER, kid='two')}", time.monotonic() + 10
        while time.monotonic() < end:
            with suppress(Unauthorized):
                assert authority.caller(new).name == "alice"
                break
            await asyncio.sleep(0.01)
        for _ in range(130):
            with suppress(Unauthorized):
                authority.caller(f"Bearer {signed(STRANGER, kid='three')}")
            await asyncio.sleep(0.01)
        assert authority.caller(new).name == "alice"
        assert 1 <= len(threads) <= 4
        assert threading.main_thread().name not in threads
        watching.cancel()

    asyncio.run(scenario())


def test_a_token_carries_its_scopes_and_models(tokens: Tokens) -> None:
    for _ in range(2):  # checked, then remembered
        key = tokens.find(signed(), NOW)
        assert key is not None
        assert (key.name, key.scopes, key.models) == ("alice", {Scope.INFER, Scope.READ}, ("m*",))
        assert key.allows(Scope.INFER, "m1")
        assert not key.allows(Scope.INFER, "other")
        assert not key.allows(Scope.WRITE, "m1")


def test_a_remembered_token_still_expires(tokens: Tokens) -> None:
    token = signed()
    assert tokens.find(token, NOW) is not None
    assert tokens.find(token, NOW + DAY) is None


@pytest.mark.parametrize(
    "token",
    [
        signed(STRANGER),
        signed(kid=None),
        signed(kid="two"),
        signed(exp=NOW - 10),
        signed(exp=None),
        signed(sub=None),
        signed(iss="https://elsewhere.example.org"),
        signed(aud="another service"),
        signed(lathe_models="m"),
        signed(rsa.generate_private_key(65537, 2048), "RS256"),
        signed("a shared secret of thirty-two bytes", "HS256"),
        jwt.encode(CLAIMS, None, "none", headers={"kid": "one"}),
        signed()[:-4] + "AAAA",
        "a.b.c",
        "",
    ],
)
def test_invalid_tokens_are_refused(tokens: Tokens, token: str) -> None:
    assert tokens.find(token, NOW) is None


@pytest.mark.parametrize("content", ["", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "AAAA", "kid": "one"}]}'])
def test_a_file_without_a_public_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "jwks.json").write_text(content)
    with pytest.raises(DamagedKeys):
        Tokens(tmp_path / "jwks.json", "", "lathe")


def test_a_server_accepts_tokens_and_names_their_owner(tmp_path: Path) -> None:
    files = {"jwt_keys": write_key_set(tmp_path / "jwks.json"), "jwt_issuer": CLAIMS["iss"]}
    with service(tmp_path / "repo", **files) as running:
        url = f"{running.url}/api/v1/models/m/versions"
        writer = {"authorization": f"Bearer {signed(scope='lathe:write lathe:read')}"}
        assert httpx.post(url, content=toy(2.0)).status_code == 401
        assert httpx.post(url, content=toy(2.0), headers={"authorization": f"Bearer {signed()}"}).status_code == 403
        assert httpx.post(url, content=toy(2.0), headers=writer).status_code == 201
        assert httpx.get(f"{running.url}/api/v1/models/m/audit", headers=writer).json()[0]["actor"] == "alice"
