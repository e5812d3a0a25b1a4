"""Operations on datasets and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lathe.server.api.management.dataset_schemas import DatasetDetail, DatasetsRemoved, DatasetState
from lathe.server.api.management.job_responses import JobAccepted, JobDetail, JobSummary
from lathe.server.client.call import (
    Call,
    Content,
    Progress,
    Upload,
    file_or_bytes,
    json_arguments,
    operation,
    parse_list,
    parse_one,
    parse_text,
    path,
)
from lathe.server.client.models import idempotency_header
from lathe.server.datasets.packing import dataset_body

_DATASETS, _JOBS = "/api/v1/datasets", "/api/v1/jobs"


class TrainingOperations:
    """The operations of both clients on datasets and jobs; each client implements `job_events` itself."""

    # datasets

    @operation
    def datasets(self) -> Call[list[DatasetState]]:
        """List the datasets."""
        return Call("GET", _DATASETS, parse_list(DatasetState))

    @operation
    def dataset(self, name: str) -> Call[DatasetDetail]:
        """Return one dataset with its columns and history."""
        return Call("GET", path(_DATASETS, name), parse_one(DatasetDetail))

    @operation
    def upload_dataset(self, name: str, content: Content, *, progress: Progress | None = None) -> Call[DatasetDetail]:
        """Upload a file or its bytes, or a folder as an archive; returns once the server has read and checked it.

        `content` is the path of the file or folder, or bytes. Idempotent. Raises OSError if the content cannot be read.
        """
        file = file_or_bytes(content)
        body = Upload(lambda: dataset_body(file), progress)
        return Call("POST", path(_DATASETS, name), parse_one(DatasetDetail), upload=body, is_long=True)

    @operation
    def delete_dataset(self, name: str, *, digest: str | None = None) -> Call[DatasetsRemoved]:
        """Delete a dataset with all contents of its history, or only the content with this SHA-256 digest."""
        query = {"digest": digest} if digest is not None else {}
        return Call("DELETE", path(_DATASETS, name), parse_one(DatasetsRemoved), query, is_repeatable=False)

    # jobs

    @operation
    def submit_job(
        self, /, recipe: Mapping[str, Any], dataset: str, *, key: str | None = None, **more: Any
    ) -> Call[JobAccepted]:
        """Submit a job: a training of `recipe` on a dataset, by its name or sha256.

        `more`: `kind` is "train" (default), "finetune", "evaluate", "sweep" or "compress" (see `compress`). `model` is
        the version to start from, `{"name": "m", "version": "live"}`. `publish` makes the result a version: `{"model":
        "m", "promote": True, "gate": {"min": {"accuracy": 0.97}}}`. `priority` is from -10 to 10, `limits` is such as
        `{"seconds": 600, "memory": 1 << 30}`. `key` is an idempotency key: a second call with the same key and
        arguments returns the job of the first.
        """
        return _submission(recipe, dataset, key, more)

    @operation
    def compress(
        self,
        /,
        model: str,
        method: Mapping[str, Any],
        dataset: str,
        *,
        version: int | str = "live",
        promote: bool = False,
        gate: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        key: str | None = None,
        **more: Any,
    ) -> Call[JobAccepted]:
        """Submit a job that compresses a version of a model, and publishes the result as a further version of it.

        `method` is the table of a method: `{"kind": "static"}`, `{"kind": "mixed", "budget": 0.01}` or
        `{"kind": "weight-only", "bits": 4}`. `dataset` is a name or a sha256. With `promote` the result goes live if
        it passes the `gate`: `{"max": {"accuracy_drop": 0.003, "size_ratio": 0.5, "latency_ratio": 0.9}}`. `recipe`
        has further fields of the recipe, such as `{"rows": 512}`. `more` is as in `submit_job`; `publish` there
        replaces `promote` and `gate`.
        """
        publish: dict[str, Any] = {"model": model, "promote": promote}
        publish |= {"gate": dict(gate)} if gate is not None else {}
        body = {"kind": "compress", "model": {"name": model, "version": version}, "publish": publish, **more}
        return _submission({**(recipe or {}), "method": dict(method)}, dataset, key, body)

    @operation
    def jobs(self, *, state: str | None = None) -> Call[list[JobSummary]]:
        """List the newest 1000 jobs, the last submitted first: your own, or those of all owners for administrators.

        `state`: only jobs in this state, such as "running"; of these the newest 1000.
        """
        return Call("GET", _JOBS, parse_list(JobSummary), {"state": state} if state else {})

    @operation
    def job(self, job: str) -> Call[JobDetail]:
        """Return one job with its progress."""
        return Call("GET", path(_JOBS, job), parse_one(JobDetail))

    @operation
    def cancel_job(self, job: str) -> Call[JobSummary]:
        """Cancel a job; a running job ends within seconds, a publishing one may still succeed."""
        return Call("POST", path(_JOBS, job, "cancel"), parse_one(JobSummary))

    @operation
    def delete_job(self, job: str) -> Call[JobSummary]:
        """Delete a job that has ended, with its files; published versions stay. Raises ApiError for other jobs."""
        return Call("DELETE", path(_JOBS, job), parse_one(JobSummary), is_repeatable=False)

    @operation
    def job_log(self, job: str) -> Call[str]:
        """Return the last 64 KiB of a job's log; empty before its first start."""
        return Call("GET", path(_JOBS, job, "logs"), parse_text)

    @operation
    def job_report(self, job: str) -> Call[str]:
        """Return the HTML report of a job; raises ApiError (404) while there is no result, and for evaluations."""
        return Call("GET", path(_JOBS, job, "report"), parse_text)

    @operation
    def job_model(self, job: str) -> Call[bytes]:
        """Return the resulting model of a job, an ONNX file; raises ApiError (404) for a job without one."""
        return Call("GET", path(_JOBS, job, "model"), lambda response: response.content)


def _submission(recipe: Mapping[str, Any], dataset: str, key: str | None, more: Mapping[str, Any]) -> Call[JobAccepted]:
    """Return the call that submits a job; `is_long` for a compression, whose inputs the server checks before."""
    body = json_arguments({"recipe": dict(recipe), "dataset": dataset, **more})
    headers, is_long = {**body["headers"], **idempotency_header(key)}, more.get("kind") == "compress"
    return Call("POST", _JOBS, parse_one(JobAccepted), headers=headers, content=body["content"], is_long=is_long)
