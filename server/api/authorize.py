"""The gate before the application: what is not in the table of routes does not exist, the rest needs its scope.

Direct inference does not come by here; it is checked where it is routed (``DataPlane.route``). OPTIONS is answered
here, without a key: it tells no more than the documentation does.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.authority import Authority, Caller, Mode
from server.access.crossorigin import check_page
from server.access.scopes import ROUTES, UPLOADS, Need
from server.api.accessed import note_refusal
from server.api.cycle import UPLOAD
from server.api.reply import error_reply
from server.errors import MethodNotAllowed, NotFound, ServerError


class _Entry(NamedTuple):
    need: Need
    model: str  # the one the path names, else empty
    uploads: bool  # whether its body is a file


class Authorize:
    """Middleware. The routed path decides, never the ``Host`` header; nothing of the body is read before.

    Pages of origins besides ``origins`` may change nothing where no key is needed; no page knows another's key.
    """

    def __init__(self, app: ASGIApp, authority: Authority, origins: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._authority = authority
        self._origins = origins
        self._table = [
            (method, compile_path(path)[0], need, (method, path) in UPLOADS) for (method, path), need in ROUTES.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller in ``request.state``, or refuse it."""
        if scope["type"] == "http":
            if scope["method"] == "OPTIONS" and (methods := self._methods(_path(scope))):
                await Response(status_code=204, headers={"allow": ", ".join(methods)})(scope, receive, send)
                return
            try:
                scope.setdefault("state", {})["caller"] = self._admit(scope)
                scope["state"]["authority"] = self._authority  # for what lasts, and looks again
            except ServerError as error:
                note_refusal(scope, error)
                await self._refuse(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        if self._authority.mode is not Mode.KEYED:
            told = Headers(scope=scope)
            host, origin, site = (told.get(name, "") for name in ("host", "origin", "sec-fetch-site"))
            check_page(scope["method"], host, origin, site, self._origins)
        entry = self._find(scope["method"], _path(scope))
        scope.setdefault("state", {})["uploads"] = entry.uploads
        if entry.need is None:
            return Caller()
        caller = self._authority.caller(Request(scope).headers.get("authorization", ""))
        caller.check(entry.need, entry.model)
        if entry.uploads and (grant := scope.get("extensions", {}).get(UPLOAD)):
            grant()
        return caller

    def _find(self, method: str, path: str) -> _Entry:
        for listed, pattern, need, uploads in self._table:
            if listed == method and (found := pattern.match(path)):
                return _Entry(need, found.groupdict().get("model", ""), uploads)
        if self._methods(path):
            raise MethodNotAllowed(f"{path}: method {method} is not allowed")
        raise NotFound(f"{method} {path}: there is no such route")

    def _methods(self, path: str) -> list[str]:
        """Return what a path may be asked with, and for ``*`` any path; none for one that does not exist."""
        methods = {method for method, pattern, *_ in self._table if path == "*" or pattern.match(path)}
        if "GET" in methods:
            methods.add("HEAD")  # see server.api.asgi.HeadAsGet
        return sorted(methods | {"OPTIONS"}) if methods else []

    def _refuse(self, scope: Scope, error: ServerError) -> Response:
        reply = error_reply(error, scope["path"])
        headers = {name.decode(): value.decode() for name, value in reply.headers}
        if isinstance(error, MethodNotAllowed):
            headers["allow"] = ", ".join(self._methods(scope["path"]))
        return Response(reply.text, reply.status, headers)


def _path(scope: Scope) -> str:
    """Return the routed path. One with an encoded slash is left as no route has it: the slash is part of a name there,
    and no name has one."""
    raw: bytes = scope.get("raw_path") or b""
    return raw.decode("latin-1").replace("/", "%2F") if b"%2f" in raw.lower() else scope["path"]
