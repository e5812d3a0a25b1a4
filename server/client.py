"""A client for a Lathe server: manage versions, and infer with tensors in binary.

with Client("http://127.0.0.1:8080") as lathe:
    published = lathe.upload("digits", Path("model.onnx"), promote=True)
    answer = lathe.infer("digits", {"image": array})
    lathe.rollback("digits")
"""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
import orjson
from pydantic import BaseModel

from server.api.canary_schemas import CanaryState
from server.api.dataset_schemas import DatasetDetail, DatasetsRemoved, DatasetState
from server.api.job_schemas import JobAccepted, JobDetail, JobSummary
from server.api.schemas import AliasState, AuditEntry, ModelState, Published, VersionDetail, VersionState
from server.archive import Body, body_of
from server.datasets.packing import dataset_body
from server.datatypes import NUMPY_OF, pack_strings, unpack_strings, wire_name
from server.jobs.job import JobState
from server.sse import JobEvent, job_events
from server.types import Array, Tensors

Progress = Callable[[int, int], None]  # bytes sent so far, bytes in all
M = TypeVar("M", bound=BaseModel)

_CHUNK = 1 << 18
_MISSES, _PAUSE = 10, 0.5  # connections lost in a row before a follower gives up, and seconds between two
_JSON_LENGTH = "inference-header-content-length"


class ClientError(Exception):
    """The server could not be reached, or its answer not be understood."""


class ApiError(ClientError):
    """The server refused."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered, and which version did."""

    model: str
    version: int
    outputs: Tensors


class Client:
    """One server. ``timeout`` (seconds) bounds every wait but that for an upload's compilation."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        timeout: float = 30.0,
        upload_timeout: float = 1800.0,
        api_key: str | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        if httpx.URL(url).scheme == "http":
            verify = False  # there is nothing to verify, and it takes 25 ms to read the system's certificates
        self._http = httpx.Client(base_url=url, timeout=timeout, headers=headers, verify=verify, transport=transport)
        self._upload_timeout = upload_timeout

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # models and versions

    def ready(self) -> bool:
        """Say whether the server wants requests; raises ClientError when it cannot be reached."""
        return self._send("GET", "/v2/health/ready").status_code == 200

    def server(self) -> dict[str, Any]:
        """Return what the server says about itself: `name`, `version`, `extensions`."""
        return self._document("/v2")

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return self._call("GET", "/metrics").text

    def models(self) -> list[ModelState]:
        """List the models."""
        return _many(ModelState, self._call("GET", "/api/v1/models"))

    def model(self, model: str) -> ModelState:
        """Return one model."""
        return _one(ModelState, self._call("GET", _path(model)))

    def versions(self, model: str) -> list[VersionState]:
        """List a model's versions."""
        return _many(VersionState, self._call("GET", _path(model, "versions")))

    def version(self, model: str, version: int) -> VersionDetail:
        """Return one version with its manifest."""
        return _one(VersionDetail, self._call("GET", _path(model, "versions", version)))

    def upload(
        self,
        model: str,
        content: Path | bytes,
        *,
        promote: bool = False,
        allow_signature_change: bool = False,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        progress: Progress | None = None,
    ) -> Published:
        """Upload a model file; returns once it is compiled, loaded and durable. ``key`` makes repeating it harmless.

        Weights that lie in other files of its folder go along, in an archive that is made on the way; raises
        core.errors.ModelError when they do not lie there.
        """
        body = body_of(content)
        headers = {**_body_headers(body), **_key(key)}
        query: dict[str, str] = {"promote": str(promote), "allow_signature_change": str(allow_signature_change)}
        if metadata:
            query["metadata"] = orjson.dumps(metadata).decode()
        response = self._call(
            "POST",
            _path(model, "versions"),
            content=_chunks(body, progress),
            headers=headers,
            params=query,
            timeout=self._upload_timeout,
        )
        return _one(Published, response)

    def delete(self, model: str, version: int, *, key: str | None = None) -> AuditEntry:
        """Delete a version that no alias names."""
        return _one(AuditEntry, self._call("DELETE", _path(model, "versions", version), headers=_key(key)))

    def describe(self, model: str, version: str | int = "") -> dict[str, Any]:
        """Return what a loaded version takes and gives, as the protocol's metadata says it."""
        return self._document(_v2_path(model, version))

    def config(self, model: str, version: str | int = "") -> dict[str, Any]:
        """Return how a loaded version is run: its largest batch, and why it has none where it has none."""
        return self._document(_v2_path(model, version) + "/config")

    def load(self, model: str) -> None:
        """Load a model again, or for the first time; returns once that is done."""
        self._call("POST", f"/v2/repository/models/{quote(model, safe='')}/load", timeout=self._upload_timeout)

    def unload(self, model: str) -> None:
        """Take a model out of memory: it answers nothing until it is loaded again."""
        self._call("POST", f"/v2/repository/models/{quote(model, safe='')}/unload")

    def audit(self, model: str) -> list[AuditEntry]:
        """List the changes of a model, oldest first."""
        return _many(AuditEntry, self._call("GET", _path(model, "audit")))

    # aliases

    def set_alias(
        self, model: str, alias: str, version: int, *, allow_signature_change: bool = False, key: str | None = None
    ) -> AliasState:
        """Let an alias name a version; returns once requests go there."""
        asked = {"version": version, "allow_signature_change": allow_signature_change}
        return _one(AliasState, self._call("PUT", _path(model, "aliases", alias), json=asked, headers=_key(key)))

    def rollback(self, model: str, *, alias: str = "live", to: int | None = None, key: str | None = None) -> AliasState:
        """Take an alias one step back, or to a version on its history; returns once requests go there."""
        asked = {"alias": alias, "to": to}
        return _one(AliasState, self._call("POST", _path(model, "rollback"), json=asked, headers=_key(key)))

    # candidates

    def start_canary(self, model: str, version: int, *, key: str | None = None, **options: Any) -> CanaryState:
        """Try a version on a share of the requests; ``options`` are the fields of the API's body."""
        asked = {"version": version, **options}
        return _one(CanaryState, self._call("POST", _path(model, "canary"), json=asked, headers=_key(key)))

    def canary(self, model: str) -> CanaryState:
        """Return the trial under way."""
        return _one(CanaryState, self._call("GET", _path(model, "canary")))

    def cancel_canary(self, model: str, *, key: str | None = None) -> AuditEntry:
        """End the trial."""
        return _one(AuditEntry, self._call("DELETE", _path(model, "canary"), headers=_key(key)))

    # datasets

    def datasets(self) -> list[DatasetState]:
        """List the datasets."""
        return _many(DatasetState, self._call("GET", "/api/v1/datasets"))

    def dataset(self, name: str) -> DatasetDetail:
        """Return one dataset with its columns and history."""
        return _one(DatasetDetail, self._call("GET", _dataset(name)))

    def upload_dataset(self, name: str, content: Path | bytes, *, progress: Progress | None = None) -> DatasetDetail:
        """Upload a file, or a folder as an archive of it; returns once it has been read in full. Repeating is harmless.

        Raises OSError when it cannot be read here.
        """
        with dataset_body(content) as body:
            response = self._call(
                "POST",
                _dataset(name),
                content=_chunks(body, progress),
                headers=_body_headers(body),
                timeout=self._upload_timeout,
            )
        return _one(DatasetDetail, response)

    def delete_dataset(self, name: str, *, digest: str | None = None) -> DatasetsRemoved:
        """Delete a name with all it stood for, or only one content of its history."""
        query = {"digest": digest} if digest is not None else None
        return _one(DatasetsRemoved, self._call("DELETE", _dataset(name), params=query))

    # jobs

    def submit_job(
        self, recipe: Mapping[str, Any], dataset: str, *, key: str | None = None, **more: Any
    ) -> JobAccepted:
        """Submit a job; ``more`` are the other fields of the API's body. ``key`` makes repeating it harmless."""
        asked = {"recipe": dict(recipe), "dataset": dataset, **more}
        return _one(JobAccepted, self._call("POST", "/api/v1/jobs", json=asked, headers=_key(key)))

    def jobs(self, *, state: str | None = None) -> list[JobSummary]:
        """List jobs, newest first: one's own, or everybody's for administrators."""
        return _many(JobSummary, self._call("GET", "/api/v1/jobs", params={"state": state} if state else None))

    def job(self, job: str) -> JobDetail:
        """Return one job with its progress."""
        return _one(JobDetail, self._call("GET", _job(job)))

    def cancel_job(self, job: str) -> JobSummary:
        """Cancel a job; one that runs ends within seconds."""
        return _one(JobSummary, self._call("POST", _job(job, "cancel")))

    def delete_job(self, job: str) -> JobSummary:
        """Delete a job that has ended, with its files."""
        return _one(JobSummary, self._call("DELETE", _job(job)))

    def job_log(self, job: str) -> str:
        """Return the end of what a job's process said."""
        return self._call("GET", _job(job, "logs")).text

    def job_report(self, job: str) -> str:
        """Return the page about a job's result."""
        return self._call("GET", _job(job, "report")).text

    def job_model(self, job: str) -> bytes:
        """Return the ONNX file that a job made."""
        return self._call("GET", _job(job, "model")).content

    def job_events(self, job: str, *, after: str = "") -> Iterator[JobEvent]:
        """Follow a job until it has ended, from its start or after the event of that id; survives lost connections."""
        last, misses = after, 0
        while True:
            try:
                for event in self._events_once(job, last):
                    last, misses = event.id or last, 0
                    yield event
            except httpx.HTTPError as error:
                misses += 1
                if misses > _MISSES:
                    raise ClientError(f"following job {job}: {error or type(error).__name__}") from error
                time.sleep(_PAUSE)
            else:
                if JobState(self.job(job).state).is_final:  # else the server is about to stop
                    return
                time.sleep(_PAUSE)

    def _events_once(self, job: str, after: str) -> Iterator[JobEvent]:
        headers = {"last-event-id": after} if after else {}
        with self._http.stream("GET", _job(job, "events"), headers=headers) as response:
            if not response.is_success:
                response.read()
                raise _failure(response, f"GET {_job(job, 'events')}")
            yield from job_events(response.iter_lines())

    # inference

    def infer(self, model: str, inputs: Tensors, version: str | int = "") -> Answer:
        """Run a model; ``version`` is a number or an alias, the live one without."""
        head, payload = _encode(inputs)
        response = self._call(
            "POST",
            _v2_path(model, version) + "/infer",
            content=head + payload,
            headers={"content-type": "application/octet-stream", _JSON_LENGTH: str(len(head))},
        )
        return _decode(response)

    # how

    def _document(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", path).json()
        return found

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._send(method, path, **options)
        if response.is_success:
            return response
        raise _failure(response, f"{method} {path}")

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ClientError(f"{method} {path}: {error or type(error).__name__}") from error


def _path(model: str, *parts: str | int) -> str:
    return "/".join(["/api/v1/models", *(quote(str(part), safe="") for part in (model, *parts))])


def _v2_path(model: str, version: str | int) -> str:
    at = f"/versions/{quote(str(version), safe='')}" if version != "" else ""
    return f"/v2/models/{quote(model, safe='')}{at}"


def _job(job: str, *parts: str) -> str:
    return "/".join(["/api/v1/jobs", *(quote(part, safe="") for part in (job, *parts))])


def _failure(response: httpx.Response, call: str) -> ApiError:
    try:
        failure = response.json()
        return ApiError(response.status_code, failure.get("code", ""), failure["error"])
    except (ValueError, KeyError, AttributeError):
        return ApiError(response.status_code, "", f"{call}: HTTP {response.status_code}")


def _dataset(name: str) -> str:
    return f"/api/v1/datasets/{quote(name, safe='')}"


def _body_headers(body: Body) -> dict[str, str]:
    return {
        "content-type": body.content_type,
        "content-length": str(body.size),
        "content-digest": f"sha-256=:{base64.b64encode(body.sha256()).decode()}:",
    }


def _key(key: str | None) -> dict[str, str]:
    return {"idempotency-key": key} if key is not None else {}


def _one(kind: type[M], response: httpx.Response) -> M:
    return kind.model_validate_json(response.content)


def _many(kind: type[M], response: httpx.Response) -> list[M]:
    return [kind.model_validate(item) for item in response.json()]


def _chunks(body: Body, progress: Progress | None) -> Iterator[bytes]:
    sent, size = 0, body.size
    for chunk in body.pieces():
        yield chunk
        sent += len(chunk)
        if progress is not None:
            progress(sent, size)


def _encode(inputs: Tensors) -> tuple[bytes, bytes]:
    """Return the JSON part and the tensors' bytes behind it."""
    described, payloads = [], []
    for name, array in inputs.items():
        datatype = wire_name(array)
        payload = pack_strings(array) if datatype == "BYTES" else np.ascontiguousarray(array).tobytes()
        size = {"binary_data_size": len(payload)}
        described.append({"name": name, "shape": array.shape, "datatype": datatype, "parameters": size})
        payloads.append(payload)
    head = orjson.dumps({"inputs": described, "parameters": {"binary_data_output": True}})
    return head, b"".join(payloads)


def _decode(response: httpx.Response) -> Answer:
    length = int(response.headers.get(_JSON_LENGTH, len(response.content)))
    head = orjson.loads(response.content[:length])
    rest, outputs = memoryview(response.content)[length:], {}
    for tensor in head["outputs"]:
        size = tensor["parameters"]["binary_data_size"]
        outputs[tensor["name"]] = _array(tensor, rest[:size])
        rest = rest[size:]
    return Answer(head["model_name"], int(head["model_version"]), outputs)


def _array(tensor: Mapping[str, Any], data: memoryview) -> Array:
    shape, datatype = tuple(tensor["shape"]), tensor["datatype"]
    if datatype == "BYTES":
        return unpack_strings(data, shape, int(np.prod(shape)), tensor["name"])
    return np.frombuffer(data, NUMPY_OF[datatype]).reshape(shape)
