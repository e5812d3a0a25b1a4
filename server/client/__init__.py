"""Clients of a Lathe server: `Client` blocks, `AsyncClient` is for asyncio; both offer the same operations.

    with Client("http://127.0.0.1:8080") as lathe:
        published = lathe.upload("digits", Path("model.onnx"), promote=True)
        answer = lathe.infer("digits", {"image": array})
        lathe.rollback("digits")

One request is a `Call` (call.py), which the operations make (models.py, inference.py, training.py) and each client
sends in its own way (blocking.py, waiting.py). The compiler is not imported.
"""

from server.api.canary_schemas import CanaryState
from server.api.dataset_schemas import DatasetDetail, DatasetsRemoved, DatasetState
from server.api.job_answers import JobAccepted, JobDetail, JobSummary
from server.api.schemas import AliasState, AuditEntry, ModelState, Published, VersionDetail, VersionState
from server.client.blocking import Client
from server.client.errors import ApiError, ClientError, Unreachable
from server.client.tensors import Answer
from server.client.waiting import AsyncClient
from server.sse import JobEvent

__all__ = [
    "AliasState", "Answer", "ApiError", "AsyncClient", "AuditEntry", "CanaryState", "Client", "ClientError",
    "DatasetDetail", "DatasetState", "DatasetsRemoved", "JobAccepted", "JobDetail", "JobEvent", "JobSummary",
    "ModelState", "Published", "Unreachable", "VersionDetail", "VersionState",
]  # fmt: skip
