"""The gate before gRPC's calls: nothing of a message is received for a caller who may not make the call.

gRPC hands a unary call over once its message is there. When it asks for the method, only the head is there; so the gate
answers that question. A refused caller gets a method that reads nothing. Rights that depend on the model in the message
are checked once that is read.
"""

from __future__ import annotations

from typing import Any

import grpc

from server.access.authority import Authority
from server.access.scopes import CALLS
from server.api.grpc.accessed import Accessed
from server.api.grpc.messages import Message
from server.api.grpc.status import errors_as_status
from server.errors import ServerError


class Gate(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """One service's methods, for callers who may make the call at least for some model."""

    def __init__(self, methods: Any, authority: Authority, accessed: Accessed | None) -> None:
        self._methods = methods
        self._authority = authority
        self._accessed = accessed

    def service(self, handler_call_details: Any) -> Any:
        """Return the method of a call; None for one that there is not."""
        found = self._methods.service(handler_call_details)
        if found is None:
            return None
        path = handler_call_details.method
        need = CALLS[path.rpartition("/")[2]]
        if need is None:
            return found
        shown = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        try:
            self._authority.caller(shown).check_some(need)
        except ServerError as error:
            return self._refuse(error, path)
        return found

    def _refuse(self, error: ServerError, path: str) -> Any:
        async def answer(_requests: Any, context: Any) -> Message:
            async with errors_as_status(context):
                raise error

        return grpc.stream_unary_rpc_method_handler(
            answer if self._accessed is None else self._accessed.unary(answer, path, _nothing, True), None, None
        )


def _nothing(_requests: Any) -> None:
    """Read nothing of a message that was not received."""
