"""Operations on datasets and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.api.dataset_schemas import DatasetDetail, DatasetsRemoved, DatasetState
from server.api.job_answers import JobAccepted, JobDetail, JobSummary
from server.client.call import Call, Progress, Upload, document, many, one, operation, path, text
from server.client.models import keyed
from server.datasets.packing import dataset_body

_DATASETS, _JOBS = "/api/v1/datasets", "/api/v1/jobs"


class TrainingOperations:
    """What both clients can ask about datasets and jobs. `job_events` is each client's own."""

    # datasets

    @operation
    def datasets(self) -> Call[list[DatasetState]]:
        """List the datasets."""
        return Call("GET", _DATASETS, many(DatasetState))

    @operation
    def dataset(self, name: str) -> Call[DatasetDetail]:
        """Return one dataset with its columns and history."""
        return Call("GET", path(_DATASETS, name), one(DatasetDetail))

    @operation
    def upload_dataset(
        self, name: str, content: Path | bytes, *, progress: Progress | None = None
    ) -> Call[DatasetDetail]:
        """Upload a file, or a folder as an archive of it; returns once it has been read in full. Repeating is harmless.

        Raises OSError when it cannot be read here.
        """
        body = Upload(lambda: dataset_body(content), progress)
        return Call("POST", path(_DATASETS, name), one(DatasetDetail), upload=body, is_long=True)

    @operation
    def delete_dataset(self, name: str, *, digest: str | None = None) -> Call[DatasetsRemoved]:
        """Delete a name with all it stood for, or only one content of its history."""
        query = {"digest": digest} if digest is not None else {}
        return Call("DELETE", path(_DATASETS, name), one(DatasetsRemoved), query, is_repeatable=False)

    # jobs

    @operation
    def submit_job(
        self, /, recipe: Mapping[str, Any], dataset: str, *, key: str | None = None, **more: Any
    ) -> Call[JobAccepted]:
        """Submit a job; ``more`` are the other fields of the API's body. ``key`` makes repeating it harmless."""
        body = document({"recipe": dict(recipe), "dataset": dataset, **more})
        headers = {**body["headers"], **keyed(key)}
        return Call("POST", _JOBS, one(JobAccepted), headers=headers, content=body["content"])

    @operation
    def jobs(self, *, state: str | None = None) -> Call[list[JobSummary]]:
        """List jobs, newest first: one's own, or everybody's for administrators."""
        return Call("GET", _JOBS, many(JobSummary), {"state": state} if state else {})

    @operation
    def job(self, job: str) -> Call[JobDetail]:
        """Return one job with its progress."""
        return Call("GET", path(_JOBS, job), one(JobDetail))

    @operation
    def cancel_job(self, job: str) -> Call[JobSummary]:
        """Cancel a job; one that runs ends within seconds."""
        return Call("POST", path(_JOBS, job, "cancel"), one(JobSummary))

    @operation
    def delete_job(self, job: str) -> Call[JobSummary]:
        """Delete a job that has ended, with its files."""
        return Call("DELETE", path(_JOBS, job), one(JobSummary), is_repeatable=False)

    @operation
    def job_log(self, job: str) -> Call[str]:
        """Return the end of what a job's process said."""
        return Call("GET", path(_JOBS, job, "logs"), text)

    @operation
    def job_report(self, job: str) -> Call[str]:
        """Return the page about a job's result."""
        return Call("GET", path(_JOBS, job, "report"), text)

    @operation
    def job_model(self, job: str) -> Call[bytes]:
        """Return the ONNX file that a job made."""
        return Call("GET", path(_JOBS, job, "model"), lambda response: response.content)
