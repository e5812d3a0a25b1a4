"""The access log's fields of an inference request."""

from __future__ import annotations

from lathe.server.api.codec.call_head import CallHead
from lathe.server.errors import Internal, ServerError
from lathe.server.serving.servable import Servable
from lathe.server.telemetry.access_log import ServedRequest
from lathe.server.telemetry.logs import parse_trace_id


def error_entry(
    head: CallHead, error: Exception, path: bytes = b"", servable: Servable | None = None, id: str = ""
) -> ServedRequest:
    """The log entry of a request that is answered with an error.

    `path` is the raw path, as far as it was received. It is used if `head` has no model: then the request could not be
    parsed.
    """
    known = error if isinstance(error, ServerError) else Internal(type(error).__name__)
    method, shown = ("POST", infer_path(head)) if head.model else ("", path.partition(b"?")[0].decode("latin-1"))
    served = ServedRequest(method, shown, known.http_status, False)
    served.code, served.error, served.fault = known.code, known.message, known.http_status == 500
    served.request_id, served.trace_id = id or head.request_id, parse_trace_id(head.traceparent)
    served.model, served.version = head.model, servable.ref.version if servable is not None else head.version
    return served


def infer_path(head: CallHead) -> str:
    """The path of an inference call: /v2/models/MODEL[/versions/VERSION]/infer."""
    version = f"/versions/{head.version}" if head.version else ""
    return f"/v2/models/{head.model}{version}/infer"
