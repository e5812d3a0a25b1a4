"""Datasets over HTTP: they come whole or not at all, are listed, and go."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic.json_schema import SkipJsonSchema

from server.api.dataset_schemas import DatasetDetail, DatasetsRemoved, DatasetState
from server.api.models import FAILURES, Digest, check_headers, form, origin_of, stream_of
from server.datasets.record import DIGEST, is_digest
from server.datasets.service import Datasets
from server.errors import BadRequest
from server.places import PARTY
from server.repository import names
from server.repository.intake import parse_content_digest

Name = Annotated[str, Path(description="The dataset's name.", json_schema_extra=form(names.MODEL))]
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One file: .npz, CSV, Parquet, or a zip of IDX files or of folders of images.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def datasets_routes(datasets: Datasets, max_bytes: int) -> APIRouter:
    """Return the routes below /api/v1/datasets."""
    routes = APIRouter(prefix="/api/v1", tags=["datasets"], responses=FAILURES)

    @routes.get("/datasets")
    async def list_datasets() -> list[DatasetState]:
        """List the datasets."""
        return [DatasetState.of(dataset) for dataset in await datasets.list()]

    @routes.get("/datasets/{dataset}")
    async def get_dataset(dataset: Name) -> DatasetDetail:
        """Return one dataset with its columns and history."""
        return DatasetDetail.of(await datasets.find(dataset))

    @routes.post("/datasets/{dataset}", status_code=201, openapi_extra=BODY)
    async def upload_dataset(
        request: Request,
        dataset: Name,
        content_digest: Digest = None,
    ) -> DatasetDetail:
        """Upload a file: it is read in full before the name stands for it. The same bytes are stored once."""
        check_headers(request, max_bytes, "the dataset")
        sha256 = parse_content_digest(content_digest) if content_digest is not None else None
        origin = origin_of(request, None)
        PARTY.set(origin.party)
        return DatasetDetail.of(await datasets.receive(dataset, stream_of(request), sha256, origin.actor))

    @routes.delete("/datasets/{dataset}")
    async def delete_dataset(
        dataset: Name,
        digest: Annotated[
            str | SkipJsonSchema[None],
            Query(description="Forget only this content of the name's history.", json_schema_extra=form(DIGEST)),
        ] = None,
    ) -> DatasetsRemoved:
        """Delete a name with all it stood for; refused while a job needs it."""
        if digest is not None and not is_digest(digest):
            raise BadRequest(f"digest {digest[:80]!r}: expected {DIGEST.pattern}")
        return DatasetsRemoved(name=dataset, digests=sorted(await datasets.remove(dataset, digest)))

    return routes
