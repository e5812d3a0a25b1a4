"""The one who is asked whether a caller may do something, whatever transport brought the call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from server.access.keys import DamagedKeys, Key, KeyRing, read_keys, stamp_of
from server.access.quotas import Quota
from server.access.scopes import Scope
from server.errors import Forbidden, ServerError, Unauthorized

if TYPE_CHECKING:
    from server.access.tokens import Tokens

log = logging.getLogger("lathe.access")

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_CLOSED = (
    "management is closed on an address that other machines reach: give the server a file of keys "
    "(LATHE_KEYS_FILE), or open it to everybody (LATHE_OPEN_MANAGEMENT=true)"
)
_LEAST = 1.0  # seconds between two readings of a file
_LOOK = 3600.0  # seconds after which what lasts is looked at again, whatever happens
_UNGUARDED = frozenset({Scope.INFER, Scope.READ})


class Mode(Enum):
    """What holds for callers."""

    OPEN = "open"  # everybody may do everything: an address of this machine only, or asked for
    UNMANAGED = "unmanaged"  # no keys and an address others reach: run and read, change nothing
    KEYED = "keyed"  # what the shown key allows


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever makes a call; ``key`` is None for one that needs none, ``sole``: no other key has its name."""

    key: Key | None = None
    mode: Mode = Mode.OPEN
    sole: bool = False

    @property
    def name(self) -> str:
        """What the audit log calls them; empty for those without a key."""
        return self.key.name if self.key else ""

    @property
    def identity(self) -> str:
        """Whose something is that they make; empty for those without a key. Unlike a name it is nobody else's."""
        return self.key.identity if self.key else ""

    def may(self, scope: Scope, model: str = "") -> bool:
        """Say whether they may do this."""
        if self.mode is Mode.OPEN or (self.mode is Mode.UNMANAGED and scope in _UNGUARDED):
            return True
        return self.key is not None and self.key.allows(scope, model)

    def check(self, scope: Scope, model: str = "") -> None:
        """Raise Forbidden when they may not do this."""
        if self.may(scope, model):
            return
        if self.key is None:
            raise Forbidden(_CLOSED)
        where = f"model {model[:80]!r}" if model else "all models"
        raise Forbidden(f"key {self.key.name!r} does not have scope {scope.value!r} for {where}")

    def check_some(self, scope: Scope) -> None:
        """Raise Forbidden when they may do this for no model, so that it does not matter which one is asked for."""
        if self.may(scope) or (self.key is not None and scope in self.key.scopes):
            return
        if self.key is None:
            raise Forbidden(_CLOSED)
        raise Forbidden(f"key {self.key.name!r} does not have scope {scope.value!r}")


class Authority:
    """Knows the keys. Asked for every request, so it takes no lock and reads no file."""

    def __init__(
        self,
        host: str,
        keys_file: Path | None = None,
        *,
        tokens: Tokens | None = None,
        open_management: bool = False,
    ) -> None:
        """Raises OSError or DamagedKeys when there is a file of keys that cannot be read."""
        self._file = keys_file
        self._tokens = tokens
        self._stamp = stamp_of(keys_file) if keys_file else None
        self._ring = read_keys(keys_file) if keys_file else KeyRing()
        self._faults: dict[str, str] = {}  # of the files, as last told
        self._turned = asyncio.Event()  # another one after each change of the keys
        self._missed = asyncio.Event()  # a token names a key that is not known
        if tokens is not None:
            tokens.missed = self._missed.set
        if keys_file or tokens:
            self.mode = Mode.KEYED
        else:
            self.mode = Mode.OPEN if open_management or host in LOOPBACK else Mode.UNMANAGED
        if self.mode is Mode.UNMANAGED:
            log.warning(
                "other machines reach %s and there are no keys: they may run models, and change nothing "
                "(LATHE_KEYS_FILE, docs/access.md)",
                host,
            )
        self._anybody = Caller(mode=self.mode)
        self._is_open = self.mode is Mode.OPEN

    def caller(self, authorization: str) -> Caller:
        """Return who shows this ``Authorization`` header; raises Unauthorized."""
        if self.mode is not Mode.KEYED:
            return self._anybody
        kind, _, shown = authorization.partition(" ")
        if kind.lower() != "bearer":
            raise Unauthorized("header authorization: expected 'Bearer' and an API key or a token")
        now = time.time()
        key = self._ring.find(shown.strip(), now)
        if key is None and self._tokens is not None:
            key = self._tokens.find(shown.strip(), now)
        if key is None:
            raise Unauthorized("header authorization: the API key or token is not known, or has expired")
        return Caller(key, self.mode, self._ring.is_sole(key))

    def check(self, authorization: str, scope: Scope, model: str) -> str:
        """Return the id of the key in this header, empty where none is needed; raises Unauthorized or Forbidden."""
        if self._is_open:
            return ""
        caller = self.caller(authorization)
        caller.check(scope, model)
        return caller.key.id if caller.key else ""

    def quota(self, client: str) -> Quota | None:
        """Return what the owner of the key of this id may ask for, None where the key says nothing of it."""
        key = self._ring.keys.get(client)
        return None if key is None else key.quota

    async def refused(self, authorization: str, scope: Scope) -> ServerError:
        """Return, once it is so, why the caller of this header may do this for no model any more: for what lasts."""
        while True:
            turned = self._turned
            try:
                caller = self.caller(authorization)
                caller.check_some(scope)
            except ServerError as error:
                return error
            expires = caller.key.expires if caller.key else None
            patience = _LOOK if expires is None else min(_LOOK, max(0.0, expires - time.time()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(turned.wait(), patience)

    async def watch(self, interval: float) -> None:
        """Take over changes of the files every ``interval`` seconds; a broken one changes nothing.

        A token that names an unknown key has its file read sooner, at most once a second.
        """
        while self._file is not None or self._tokens is not None:
            await asyncio.sleep(min(interval, _LEAST))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._missed.wait(), max(0.0, interval - _LEAST))
            anyway = self._missed.is_set()
            self._missed.clear()
            if await asyncio.to_thread(self.refresh, anyway=anyway):
                self._turned.set()  # whoever waits looks again
                self._turned = asyncio.Event()

    def refresh(self, *, anyway: bool = False) -> bool:
        """Read the files again that have changed, that of tokens ``anyway``; returns whether other keys hold now."""
        found = [self._refresh(self._refresh_ring, "keys")]
        if (tokens := self._tokens) is not None:
            found.append(self._refresh(lambda: tokens.refresh(anyway=anyway), "keys of tokens"))
        return any(found)

    def _refresh(self, read: Callable[[], bool], what: str) -> bool:
        try:
            changed = read()
        except (OSError, DamagedKeys) as error:
            if self._faults.get(what) != str(error):
                log.error("the %s stay as they were: %s", what, error)
            self._faults[what] = str(error)
            return False
        self._faults.pop(what, None)
        if changed:
            log.info("%s read again", what)
        return changed

    def _refresh_ring(self) -> bool:
        if self._file is None or (stamp := stamp_of(self._file)) == self._stamp:
            return False
        self._ring, self._stamp = read_keys(self._file), stamp
        return True
