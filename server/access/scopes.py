"""The scope that each route needs. A route without an entry answers 404; a test compares table and application."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias


class Scope(StrEnum):
    """One kind of permission. No scope includes another."""

    INFER = "infer"  # run a model, read its inputs and outputs and whether it is ready
    READ = "read"  # list models, versions, datasets; metrics, statistics, settings
    WRITE = "write"  # upload and delete versions, load and unload models
    PROMOTE = "promote"  # move aliases, roll back, run canaries
    TRAIN = "train"  # upload and delete datasets, run jobs
    ADMIN = "admin"  # change logging, tracing, shared memory


# A tuple: any of these scopes suffices. None: no key is needed.
RequiredScope: TypeAlias = Scope | tuple[Scope, ...] | None

# Clients of the protocol (Triton's, KServe's) read metadata and readiness before they infer. A caller that may run a
# model learns the same from the errors of wrong inputs.
_DESCRIBE = (Scope.READ, Scope.INFER)


def alternatives(need: Scope | tuple[Scope, ...]) -> tuple[Scope, ...]:
    """Return the scopes of which one suffices."""
    return need if isinstance(need, tuple) else (need,)


def describe_scopes(need: Scope | tuple[Scope, ...]) -> str:
    """Return the scopes of which one suffices as text: `'read' or 'infer'`."""
    return " or ".join(repr(scope.value) for scope in alternatives(need))


_V2_MODEL = "/v2/models/{model}"
_V2_VERSION = "/v2/models/{model}/versions/{version}"
_RUNS = ("/infer", "/generate", "/generate_stream")
_REGIONS = [(kind, tail) for kind in ("system", "cuda") for tail in ("", "/region/{region}")]
_MODEL = "/api/v1/models/{model}"
_JOB = "/api/v1/jobs/{job}"
_DATASET = "/api/v1/datasets/{dataset}"

ROUTES: dict[tuple[str, str], RequiredScope] = {
    ("GET", "/v2/health/live"): None,
    ("GET", "/v2/health/ready"): None,
    ("GET", "/v2"): None,
    ("GET", "/openapi.json"): None,
    ("GET", "/docs"): None,
    ("GET", "/metrics"): Scope.READ,
    ("GET", "/v2/logging"): Scope.READ,
    ("POST", "/v2/logging"): Scope.ADMIN,
    ("GET", "/v2/trace/setting"): Scope.READ,
    ("POST", "/v2/trace/setting"): Scope.ADMIN,
    ("GET", f"{_V2_MODEL}/trace/setting"): Scope.READ,
    ("POST", f"{_V2_MODEL}/trace/setting"): Scope.ADMIN,
    **{("GET", f"/v2/{kind}sharedmemory{tail}/status"): Scope.READ for kind, tail in _REGIONS},
    **{("POST", f"/v2/{kind}sharedmemory{tail}/unregister"): Scope.ADMIN for kind, tail in _REGIONS},
    **{("POST", f"/v2/{kind}sharedmemory{tail}/register"): Scope.ADMIN for kind, tail in _REGIONS if tail},
    ("POST", "/v2/repository/index"): Scope.READ,
    ("POST", "/v2/repository/models/{model}/load"): Scope.WRITE,
    ("POST", "/v2/repository/models/{model}/unload"): Scope.WRITE,
    ("GET", "/v2/models/stats"): Scope.READ,  # before a model named `stats`, as in the application
    **{("GET", base + tail): _DESCRIBE for base in (_V2_MODEL, _V2_VERSION) for tail in ("", "/ready")},
    **{("GET", base + tail): Scope.READ for base in (_V2_MODEL, _V2_VERSION) for tail in ("/config", "/stats")},
    **{("POST", base + tail): Scope.INFER for base in (_V2_MODEL, _V2_VERSION) for tail in _RUNS},
    ("GET", "/v1/models"): _DESCRIBE,
    ("GET", "/v1/models/{model}"): _DESCRIBE,
    ("GET", "/v1/models/{model}/{adapter}"): _DESCRIBE,
    ("POST", "/v1/chat/completions"): Scope.INFER,
    ("POST", "/v1/completions"): Scope.INFER,
    ("POST", "/v1/embeddings"): Scope.INFER,
    ("POST", "/v1/rerank"): Scope.INFER,
    ("POST", "/v1/audio/transcriptions"): Scope.INFER,
    ("GET", "/api/v1/models"): Scope.READ,
    ("GET", _MODEL): Scope.READ,
    ("GET", f"{_MODEL}/versions"): Scope.READ,
    ("POST", f"{_MODEL}/versions"): Scope.WRITE,
    ("GET", f"{_MODEL}/versions/{{version}}"): Scope.READ,
    ("DELETE", f"{_MODEL}/versions/{{version}}"): Scope.WRITE,
    ("GET", f"{_MODEL}/audit"): Scope.READ,
    ("PUT", f"{_MODEL}/aliases/{{alias}}"): Scope.PROMOTE,
    ("POST", f"{_MODEL}/rollback"): Scope.PROMOTE,
    ("POST", f"{_MODEL}/canary"): Scope.PROMOTE,
    ("GET", f"{_MODEL}/canary"): Scope.READ,
    ("DELETE", f"{_MODEL}/canary"): Scope.PROMOTE,
    ("POST", "/api/v1/jobs"): Scope.TRAIN,
    ("GET", "/api/v1/jobs"): Scope.TRAIN,
    ("GET", _JOB): Scope.TRAIN,
    ("DELETE", _JOB): Scope.TRAIN,
    ("POST", f"{_JOB}/cancel"): Scope.TRAIN,
    **{("GET", f"{_JOB}/{part}"): Scope.TRAIN for part in ("logs", "events", "report", "model")},
    ("GET", "/api/v1/datasets"): Scope.READ,
    ("GET", _DATASET): Scope.READ,
    ("POST", _DATASET): Scope.TRAIN,
    ("DELETE", _DATASET): Scope.TRAIN,
}

# Routes whose model is in the body, or that show the caller's own models. The caller needs the scope for any model; the
# routes check it for the model that they find.
MODEL_CHECKED_LATER = frozenset(route for route in ROUTES if route[1].startswith("/v1/"))

# Routes whose bodies are files, with larger limits of size and time.
UPLOADS = frozenset({("POST", f"{_MODEL}/versions"), ("POST", _DATASET), ("POST", "/v1/audio/transcriptions")})

# The scope that each gRPC method needs; `GRPC_CHANGES` has another one for some requests.
GRPC_METHODS: dict[str, RequiredScope] = {
    "Check": None,
    "Watch": None,
    "ServerLive": None,
    "ServerReady": None,
    "ServerMetadata": None,
    "ModelReady": _DESCRIBE,
    "ModelMetadata": _DESCRIBE,
    "ModelConfig": Scope.READ,
    "ModelStatistics": Scope.READ,
    "ModelInfer": Scope.INFER,
    "ModelStreamInfer": Scope.INFER,
    "RepositoryIndex": Scope.READ,
    "RepositoryModelLoad": Scope.WRITE,
    "RepositoryModelUnload": Scope.WRITE,
    **{f"{kind}SharedMemoryStatus": Scope.READ for kind in ("System", "Cuda")},
    **{f"{kind}SharedMemory{act}": Scope.ADMIN for kind in ("System", "Cuda") for act in ("Register", "Unregister")},
    "TraceSetting": Scope.READ,
    "LogSettings": Scope.READ,
}

# The scope of requests that name `settings` to change. Requests for the same methods that name none only read.
GRPC_CHANGES: dict[str, Scope] = {"TraceSetting": Scope.ADMIN, "LogSettings": Scope.ADMIN}
