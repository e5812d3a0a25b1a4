"""Authorization middleware: routes that are not in the table of routes answer 404, and the others need their scope.

Direct inference does not pass here; `DataPlane.route` checks it. OPTIONS is answered here without a key, because it
reveals no more than the documentation.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from lathe.server.access.authority import Authority, Caller, Mode
from lathe.server.access.crossorigin import check_origin
from lathe.server.access.scopes import MODEL_CHECKED_LATER, ROUTES, UPLOADS, RequiredScope, alternatives
from lathe.server.api.codec.reply import error_reply
from lathe.server.api.connection.asgi_cycle import UPLOAD
from lathe.server.api.middleware.access_log import note_refusal
from lathe.server.errors import MethodNotAllowed, NotFound, ServerError


class _Entry(NamedTuple):
    need: RequiredScope
    model: str  # the model in the path; empty if there is none
    uploads: bool  # the body is a file
    later: bool  # the route itself checks the scope for its model


class Authorize:
    """Middleware that authorizes requests by their path, never by the `Host` header, before any body is read.

    If the server needs no keys, web pages of other origins may not change anything, except those of `origins`
    (`check_origin`). With keys, this check is not needed: a page does not know the key.
    """

    def __init__(self, app: ASGIApp, authority: Authority, origins: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._authority = authority
        self._origins = origins
        self._table = [(compile_path(path)[0], need, (method, path)) for (method, path), need in ROUTES.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer OPTIONS, refuse a request, or pass it on.

        A passed request has `caller`, `authority` and `uploads` (whether its body is a file) in its state.
        """
        if scope["type"] == "http":
            if scope["method"] == "OPTIONS" and (methods := self._methods(_path(scope))):
                await Response(status_code=204, headers={"allow": ", ".join(methods)})(scope, receive, send)
                return
            try:
                scope.setdefault("state", {})["caller"] = self._check(scope)
                scope["state"]["authority"] = self._authority  # long-lived answers check again
            except ServerError as error:
                note_refusal(scope, error)
                await self._refuse(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> Caller:
        if self._authority.mode is not Mode.KEYED:
            headers = Headers(scope=scope)
            host, origin, site = (headers.get(name, "") for name in ("host", "origin", "sec-fetch-site"))
            check_origin(scope["method"], host, origin, site, self._origins)
        entry = self._find(scope["method"], _path(scope))
        scope.setdefault("state", {})["uploads"] = entry.uploads
        if entry.need is None:
            return Caller()
        caller = self._authority.caller(Request(scope).headers.get("authorization", ""))
        if entry.later:
            caller.check_any_model(*alternatives(entry.need))
        else:
            caller.check(entry.need, entry.model)
        if entry.uploads and (grant := scope.get("extensions", {}).get(UPLOAD)):
            grant()
        return caller

    def _find(self, method: str, path: str) -> _Entry:
        for pattern, need, route in self._table:
            if route[0] == method and (found := pattern.match(path)):
                model = found.groupdict().get("model", "")
                return _Entry(need, model, route in UPLOADS, route in MODEL_CHECKED_LATER)
        if self._methods(path):
            raise MethodNotAllowed(f"{path}: method {method} is not allowed")
        raise NotFound(f"{method} {path}: there is no such route")

    def _methods(self, path: str) -> list[str]:
        """The allowed methods of a path, sorted, with OPTIONS, and HEAD beside GET; those of all paths for `*`.

        Empty for a path that does not exist.
        """
        methods = {route[0] for pattern, _, route in self._table if path == "*" or pattern.match(path)}
        if "GET" in methods:
            methods.add("HEAD")  # see lathe.server.api.inference.asgi.HeadAsGet
        return sorted(methods | {"OPTIONS"}) if methods else []

    def _refuse(self, scope: Scope, error: ServerError) -> Response:
        reply = error_reply(error, scope["path"])
        headers = {name.decode(): value.decode() for name, value in reply.headers}
        if isinstance(error, MethodNotAllowed):
            headers["allow"] = ", ".join(self._methods(scope["path"]))
        return Response(reply.text, reply.status, headers)


def _path(scope: Scope) -> str:
    """The path to route. If it has an encoded slash (%2F), all its slashes are encoded, so that no route matches it.

    The encoded slash would be part of a name, and no name contains one.
    """
    raw: bytes = scope.get("raw_path") or b""
    return raw.decode("latin-1").replace("/", "%2F") if b"%2f" in raw.lower() else scope["path"]
