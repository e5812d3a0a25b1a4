"""The management routes of datasets: upload, list, describe and delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic.json_schema import SkipJsonSchema

from lathe.server.api.management.dataset_schemas import DatasetDetail, DatasetsRemoved, DatasetState
from lathe.server.api.management.models import FAILURES, Digest, body_chunks, check_headers, origin_of, pattern_schema
from lathe.server.datasets.records import DIGEST, is_digest
from lathe.server.datasets.service import Datasets
from lathe.server.errors import BadRequest
from lathe.server.fair_slots import CLIENT
from lathe.server.repository import names
from lathe.server.repository.upload_receiver import parse_content_digest

DatasetName = Annotated[
    str, Path(description="The dataset's name.", json_schema_extra=pattern_schema(names.MODEL_PATTERN))
]
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One file: .npz, CSV, Parquet, or a zip of IDX files or of folders of images.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def datasets_routes(datasets: Datasets, max_bytes: int) -> APIRouter:
    """The routes below /api/v1/datasets."""
    routes = APIRouter(prefix="/api/v1", tags=["datasets"], responses=FAILURES)

    @routes.get("/datasets")
    async def list_datasets() -> list[DatasetState]:
        """List the datasets."""
        return [DatasetState.of(dataset) for dataset in await datasets.list()]

    @routes.get("/datasets/{dataset}")
    async def get_dataset(dataset: DatasetName) -> DatasetDetail:
        """Return one dataset with its columns and history."""
        return DatasetDetail.of(await datasets.find(dataset))

    @routes.post("/datasets/{dataset}", status_code=201, openapi_extra=BODY)
    async def upload_dataset(
        request: Request,
        dataset: DatasetName,
        content_digest: Digest = None,
    ) -> DatasetDetail:
        """Upload a file. The name refers to it once the file is read completely. Equal bytes are stored once."""
        check_headers(request, max_bytes, "the dataset")
        sha256 = parse_content_digest(content_digest) if content_digest is not None else None
        origin = origin_of(request, None)
        CLIENT.set(origin.party)
        return DatasetDetail.of(await datasets.receive(dataset, body_chunks(request), sha256, origin.actor))

    @routes.delete("/datasets/{dataset}")
    async def delete_dataset(
        dataset: DatasetName,
        digest: Annotated[
            str | SkipJsonSchema[None],
            Query(
                description="Delete only this content from the name's history.",
                json_schema_extra=pattern_schema(DIGEST),
            ),
        ] = None,
    ) -> DatasetsRemoved:
        """Delete a dataset with its history; refused while a job needs it."""
        if digest is not None and not is_digest(digest):
            raise BadRequest(f"digest {digest[:80]!r}: expected {DIGEST.pattern}")
        return DatasetsRemoved(name=dataset, digests=sorted(await datasets.remove(dataset, digest)))

    return routes
