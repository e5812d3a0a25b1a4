"""The inference service with an access log line per request, used if the settings ask for it."""

from __future__ import annotations

from time import monotonic

from lathe.server.api.codec.call_head import CallHead
from lathe.server.api.connection.json_template import JsonTemplate
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.api.inference.infer import Deliver, InferCall, InferService
from lathe.server.api.inference.log_fields import infer_path
from lathe.server.telemetry.access_log import ServedRequest
from lathe.server.telemetry.logs import parse_trace_id


class _LoggedCall(InferCall):
    """A call without a request template: requests that use a template, or run coalesced, would not be logged."""

    __slots__ = ()

    def request_template(self, prefix: bytes, size: int) -> RequestTemplate | None:
        return None

    def json_template(self, request: bytes, start: int) -> JsonTemplate | None:
        return None


class LoggedInferService(InferService):
    """Also logs successful requests. A separate class, so that the plain service needs no check per request."""

    def call(self, head: CallHead, deliver: Deliver, address: str) -> InferCall:
        began = monotonic()

        def deliver_and_log(call: InferCall) -> None:
            deliver(call)
            entry = call.entry
            if entry is not None and call.reply is not None and call.reply.status < 400 and self.access.wants(ok=True):
                trace = entry.trace or parse_trace_id(head.traceparent)
                path, ref = infer_path(head), call.servable.ref
                served = ServedRequest("POST", path, call.reply.status, True, monotonic() - began, entry.id, trace)
                served.model, served.version, served.client = ref.name, ref.version, entry.client
                self.access.write(served)

        return _LoggedCall(self, head, deliver_and_log, address)
