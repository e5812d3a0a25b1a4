"""Early authorization of gRPC calls: no message is received from a caller without the right to make the call.

gRPC looks up the method of a call when only its head has arrived, so that lookup checks the caller. A refused caller
gets a method that reads no message. Rights that depend on the model are checked later, when the message is parsed.
"""

from __future__ import annotations

from typing import Any

import grpc

from lathe.server.access.authority import Authority
from lathe.server.access.scopes import GRPC_CHANGES, GRPC_METHODS, alternatives
from lathe.server.api.grpc.access_log import CallLogging
from lathe.server.api.grpc.messages import Message
from lathe.server.api.grpc.status import ErrorsAsStatus
from lathe.server.errors import ServerError


class EarlyAuthorization(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Looks up the methods of one service, for callers that may make the call for at least one model."""

    def __init__(self, methods: Any, authority: Authority, accessed: CallLogging | None) -> None:
        self._methods = methods
        self._authority = authority
        self._accessed = accessed

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call's method, None if it does not exist; for a refused call one that answers the error."""
        found = self._methods.service(handler_call_details)
        if found is None:
            return None
        path = handler_call_details.method
        name = path.rpartition("/")[2]
        listed = [need for need in (GRPC_METHODS[name], GRPC_CHANGES.get(name)) if need is not None]
        needs = [scope for need in listed for scope in alternatives(need)]
        if not needs:
            return found
        authorization = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        try:
            self._authority.caller(authorization).check_any_model(*needs)
        except ServerError as error:
            return self._refuse(error, path)
        return found

    def _refuse(self, error: ServerError, path: str) -> Any:
        async def answer(_requests: Any, context: Any) -> Message:
            async with ErrorsAsStatus(context):
                raise error

        return grpc.stream_unary_rpc_method_handler(
            answer if self._accessed is None else self._accessed.unary(answer, path, _nothing, True), None, None
        )


def _nothing(_requests: Any) -> None:
    """The message for the access log: none was received."""
