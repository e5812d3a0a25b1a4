"""Inference with a line in the log for each request, for those who want that."""

from __future__ import annotations

from time import monotonic

from server.api.callhead import CallHead
from server.api.infer import Deliver, InferCall, InferService
from server.api.jsontemplate import JsonTemplate
from server.api.lane import Lane
from server.api.served import path_of
from server.telemetry.access import Served
from server.telemetry.logs import trace_of


class _LoggedCall(InferCall):
    """One that begins where every call does: requests by lanes, and those that run together, would not be told of."""

    __slots__ = ()

    def lane(self, prefix: bytes, size: int) -> Lane | None:
        return None

    def json_template(self, request: bytes, start: int) -> JsonTemplate | None:
        return None


class LoggedInferService(InferService):
    """One that also writes down what went well. A class of its own, so that the other one has nothing to ask."""

    def call(self, head: CallHead, deliver: Deliver, address: str) -> InferCall:
        began = monotonic()

        def told(call: InferCall) -> None:
            deliver(call)
            entry = call.entry
            if entry is not None and call.reply is not None and call.reply.status < 400 and self.access.wants(ok=True):
                trace = entry.trace or trace_of(head.traceparent)
                path, ref = path_of(head), call.servable.ref
                served = Served("POST", path, call.reply.status, True, monotonic() - began, entry.id, trace)
                served.model, served.version, served.client = ref.name, ref.version, entry.client
                self.access.write(served)

        return _LoggedCall(self, head, told, address)
