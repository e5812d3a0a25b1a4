"""What the log says of an inference request."""

from __future__ import annotations

from server.api.callhead import CallHead
from server.errors import Internal, ServerError
from server.scheduling.servable import Servable
from server.telemetry.access import Served
from server.telemetry.logs import trace_of


def line_of(
    head: CallHead, error: Exception, path: bytes = b"", servable: Servable | None = None, id: str = ""
) -> Served:
    """Return the line of a request that is answered with an error.

    ``path`` is as it came, as far as it came: a head without a model belongs to what could not be read as a request.
    """
    known = error if isinstance(error, ServerError) else Internal(type(error).__name__)
    method, shown = ("POST", path_of(head)) if head.model else ("", path.partition(b"?")[0].decode("latin-1"))
    served = Served(method, shown, known.http_status, False)
    served.code, served.error, served.fault = known.code, known.message, known.http_status == 500
    served.request_id, served.trace_id = id or head.request_id, trace_of(head.traceparent)
    served.model, served.version = head.model, servable.ref.version if servable is not None else head.version
    return served


def path_of(head: CallHead) -> str:
    """Return the path that a call came by."""
    version = f"/versions/{head.version}" if head.version else ""
    return f"/v2/models/{head.model}{version}/infer"
