"""Authorization: decides whether a caller may make a request, over HTTP or gRPC."""

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

from lathe.server.access.keys import DamagedKeys, Key, KeyRing, file_stamp, read_keys
from lathe.server.access.quotas import Quota
from lathe.server.access.scopes import Scope, alternatives, describe_scopes
from lathe.server.errors import Forbidden, ServerError, Unauthorized

if TYPE_CHECKING:
    from lathe.server.access.tokens import Tokens

log = logging.getLogger("lathe.access")

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_CLOSED = (
    "management is closed on an address that other machines reach: give the server a file of keys "
    "(LATHE_KEYS_FILE), or open it to all clients (LATHE_OPEN_MANAGEMENT=true)"
)
_LEAST = 1.0  # least seconds between two reads of a file
_LOOK = 3600.0  # most seconds between two checks of a long-lived call
_UNGUARDED = frozenset({Scope.INFER, Scope.READ})  # allowed without keys on an address that other machines reach


class Mode(Enum):
    """The authorization policy of the server: it follows from keys and tokens, the address, and `open_management`."""

    OPEN = "open"  # all callers may do everything: a loopback address, or LATHE_OPEN_MANAGEMENT
    UNMANAGED = "unmanaged"  # no keys and an address that other machines reach: callers may infer and read only
    KEYED = "keyed"  # callers may do what their key or token allows


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `key`: its API key, or the claims of its token as a key (`Tokens.find`).

    `key` is None if the server has neither keys nor tokens, or if the route needs no scope. `mode` is the server's
    policy, which decides for a caller without a key. `sole`: `key` is the only API key with its name.
    """

    key: Key | None = None
    mode: Mode = Mode.OPEN
    sole: bool = False

    @property
    def name(self) -> str:
        """The key's name (for a token, its subject) for the audit log; empty without a key."""
        return self.key.name if self.key else ""

    @property
    def identity(self) -> str:
        """The unique id under which this caller's jobs and uploads are stored (`Key.identity`); empty without a key."""
        return self.key.identity if self.key else ""

    def is_allowed(self, scope: Scope, model: str = "") -> bool:
        """Whether the caller has this scope for a model; empty `model`: for all models. Scope train ignores `model`."""
        if self.mode is Mode.OPEN or (self.mode is Mode.UNMANAGED and scope in _UNGUARDED):
            return True
        return self.key is not None and self.key.allows(scope, model)

    def check(self, need: Scope | tuple[Scope, ...], model: str = "") -> None:
        """Raise Forbidden unless the caller has the scope `need`, or one of these scopes, for `model`.

        An empty `model` stands for all models.
        """
        if any(self.is_allowed(scope, model) for scope in alternatives(need)):
            return
        if self.key is None:
            raise Forbidden(_CLOSED)
        where = f"model {model[:80]!r}" if model else "all models"
        raise Forbidden(f"key {self.key.name!r} does not have scope {describe_scopes(need)} for {where}")

    def check_any_model(self, *scopes: Scope) -> None:
        """Raise Forbidden if the caller has none of these scopes for any model."""
        if any(self.is_allowed(scope) or (self.key is not None and scope in self.key.scopes) for scope in scopes):
            return
        if self.key is None:
            raise Forbidden(_CLOSED)
        raise Forbidden(f"key {self.key.name!r} does not have scope {describe_scopes(scopes)}")


class Authority:
    """Authorizes requests by the keys and tokens in memory: `check` takes no lock and reads no file."""

    def __init__(
        self,
        host: str,
        keys_file: Path | None = None,
        *,
        tokens: Tokens | None = None,
        open_management: bool = False,
    ) -> None:
        """Read the keys, and choose the policy (`Mode`); raises OSError or DamagedKeys if `keys_file` cannot be read.

        The policy is KEYED with `keys_file` or `tokens`. Without both it is OPEN if `host` is a loopback address or
        with `open_management`, otherwise UNMANAGED; for UNMANAGED a warning is logged. Sets `tokens.missed`.
        """
        self._file = keys_file
        self._tokens = tokens
        self._stamp = file_stamp(keys_file) if keys_file else None
        self._ring = read_keys(keys_file) if keys_file else KeyRing()
        self._faults: dict[str, str] = {}  # the last logged error of each file
        self._changed = asyncio.Event()  # set at a change of the keys, and replaced by a new event
        self._missed = asyncio.Event()  # set when a token names an unknown key
        if tokens is not None:
            tokens.missed = self._missed.set
        if keys_file or tokens:
            self.mode = Mode.KEYED
        else:
            self.mode = Mode.OPEN if open_management or host in LOOPBACK else Mode.UNMANAGED
        if self.mode is Mode.UNMANAGED:
            log.warning(
                "other machines reach %s and there are no keys: they may run models, but change nothing "
                "(LATHE_KEYS_FILE; `lathe keys add --help`)",
                host,
            )
        self._anybody = Caller(mode=self.mode)
        self._is_open = self.mode is Mode.OPEN

    def caller(self, authorization: str) -> Caller:
        """Return the caller of an `Authorization` header; empty: the request has none.

        Raises Unauthorized if the server has keys or tokens, and the header holds no valid key or token.
        """
        if self.mode is not Mode.KEYED:
            return self._anybody
        kind, _, credential = authorization.partition(" ")
        if kind.lower() != "bearer":
            raise Unauthorized("header authorization: expected 'Bearer' and an API key or a token")
        now = time.time()
        key = self._ring.find(credential.strip(), now)
        if key is None and self._tokens is not None:
            key = self._tokens.find(credential.strip(), now)
        if key is None:
            raise Unauthorized("header authorization: the API key or token is not known, or has expired")
        return Caller(key, self.mode, self._ring.is_sole(key))

    def check(self, authorization: str, need: Scope | tuple[Scope, ...], model: str) -> str:
        """Return the id of the header's key, empty if the server needs no keys.

        Raises Unauthorized as `caller`, and Forbidden as `Caller.check`.
        """
        if self._is_open:
            return ""
        caller = self.caller(authorization)
        caller.check(need, model)
        return caller.key.id if caller.key else ""

    def quota(self, client: str) -> Quota | None:
        """Return the rate limit of the API key with this id; None if the key sets none, or there is no such key."""
        key = self._ring.keys.get(client)
        return None if key is None else key.quota

    def token_quota(self, client: str) -> Quota | None:
        """Return the limit of language models' tokens of the API key with this id; None as for `quota`."""
        key = self._ring.keys.get(client)
        return None if key is None else key.token_quota

    async def refused(self, authorization: str, scope: Scope) -> ServerError:
        """Wait until the header's key is not valid any more, or has `scope` for no model; returns that error.

        For long-lived calls. Checks at the start, at each change of the keys, when the key expires, and every hour.
        """
        while True:
            changed = self._changed
            try:
                caller = self.caller(authorization)
                caller.check_any_model(scope)
            except ServerError as error:
                return error
            expires = caller.key.expires if caller.key else None
            timeout = _LOOK if expires is None else min(_LOOK, max(0.0, expires - time.time()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), timeout)

    async def watch(self, interval: float) -> None:
        """Reload changed files every `interval` seconds, on a thread; a file that cannot be read changes nothing.

        After a token that names an unknown key, the token keys are reloaded sooner, at most once a second. Runs until
        its task is cancelled; returns at once if the server has neither file.
        """
        while self._file is not None or self._tokens is not None:
            await asyncio.sleep(min(interval, _LEAST))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._missed.wait(), max(0.0, interval - _LEAST))
            anyway = self._missed.is_set()
            self._missed.clear()
            if await asyncio.to_thread(self.refresh, anyway=anyway):
                self._changed.set()  # wakes the waiters of `refused`, which check again
                self._changed = asyncio.Event()

    def refresh(self, *, anyway: bool = False) -> bool:
        """Reload the files that have changed, the token keys in any case if `anyway`; returns whether keys changed.

        Blocks while it reads. An error of reading is logged, and the keys of that file stay unchanged.
        """
        changes = [self._refresh(self._refresh_ring, "keys")]
        if (tokens := self._tokens) is not None:
            changes.append(self._refresh(lambda: tokens.refresh(anyway=anyway), "token keys"))
        return any(changes)

    def _refresh(self, read: Callable[[], bool], what: str) -> bool:
        try:
            changed = read()
        except Exception as error:  # any error: otherwise keys that are revoked later would stay valid
            if self._faults.get(what) != str(error):
                expected = isinstance(error, OSError | DamagedKeys)
                log.error("the %s cannot be reloaded and stay unchanged: %s", what, error, exc_info=not expected)
            self._faults[what] = str(error)
            return False
        self._faults.pop(what, None)
        if changed:
            log.info("%s reloaded", what)
        return changed

    def _refresh_ring(self) -> bool:
        if self._file is None or (stamp := file_stamp(self._file)) == self._stamp:
            return False
        self._ring, self._stamp = read_keys(self._file), stamp
        return True
