"""Clients of a Lathe server: `Client` blocks, `AsyncClient` is for asyncio; both offer the same operations.

    with Client("http://127.0.0.1:8080") as lathe:
        published = lathe.upload("digits", Path("model.onnx"), promote=True)
        answer = lathe.infer("digits", {"image": array})
        lathe.rollback("digits")

One request is a `Call` (call.py). The operations (models.py, inference.py, training.py) build calls, and the clients
(blocking.py, asynchronous.py) send them. The compiler is not imported.
"""

from lathe.server.api.management.canary_schemas import CanaryState
from lathe.server.api.management.dataset_schemas import DatasetDetail, DatasetsRemoved, DatasetState
from lathe.server.api.management.job_responses import JobAccepted, JobDetail, JobSummary
from lathe.server.api.management.schemas import (
    AliasState,
    AuditEntry,
    ModelState,
    Published,
    VersionDetail,
    VersionState,
)
from lathe.server.client.asynchronous import AsyncClient
from lathe.server.client.blocking import Client
from lathe.server.client.errors import ApiError, ClientError, Unreachable
from lathe.server.client.tensors import Answer
from lathe.server.sse import JobEvent

__all__ = [
    "AliasState", "Answer", "ApiError", "AsyncClient", "AuditEntry", "CanaryState", "Client", "ClientError",
    "DatasetDetail", "DatasetState", "DatasetsRemoved", "JobAccepted", "JobDetail", "JobEvent", "JobSummary",
    "ModelState", "Published", "Unreachable", "VersionDetail", "VersionState",
]  # fmt: skip
