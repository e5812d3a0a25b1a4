"""The management API: versions come and go, aliases move. Described by OpenAPI at /openapi.json."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Path, Query, Request
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import ClientDisconnect

from server.access.scopes import Scope
from server.api.asgi import ClientLeft
from server.api.schemas import (
    FAILURE_SCHEMA,
    AliasMove,
    AliasState,
    AuditEntry,
    ModelState,
    Published,
    RollbackAsked,
    VersionDetail,
    VersionState,
)
from server.errors import BadRequest, NotFound, TooLarge, UnsupportedMedia
from server.repository import names
from server.repository.catalog import VersionInfo
from server.repository.intake import parse_content_digest
from server.repository.manifest import METADATA_LIMIT
from server.repository.rollout import PublishOptions, Rollout
from server.repository.store import Origin


def form(pattern: re.Pattern[str]) -> dict[str, Any]:
    """Return a form for the description only: `names` checks it, in its own words."""
    return {"pattern": f"^(?:{pattern.pattern})$"}


Model = Annotated[str, Path(description="The model's name.", json_schema_extra=form(names.MODEL))]
Number = Annotated[str, Path(description="The version's number.", json_schema_extra=form(names.VERSION))]
AliasName = Annotated[str, Path(description="The alias.", json_schema_extra=form(names.ALIAS))]
Key = Annotated[
    str | SkipJsonSchema[None],
    Header(
        alias="Idempotency-Key",
        description="Repeating a request with its key repeats the answer, not the change.",
        json_schema_extra=form(names.KEY),
    ),
]
Digest = Annotated[
    str | SkipJsonSchema[None],
    Header(description="RFC 9530, sha-256.", json_schema_extra={"pattern": "^sha-256=:[A-Za-z0-9+/]{43}=:$"}),
]
Metadata = Annotated[str | SkipJsonSchema[None], Query(description="A JSON object kept in the manifest.")]
ONNX_BODY = {
    "requestBody": {
        "required": True,
        "description": "The raw ONNX file, or a tar archive of model.onnx with the files that its weights lie in or "
        "of pipeline.toml with the files that its steps read.",
        "content": {
            kind: {"schema": {"type": "string", "format": "binary"}}
            for kind in ("application/octet-stream", "application/x-tar")
        },
    }
}
# Each route describes its errors by a reference. With `"model": Failure` in its place, FastAPI would build a validator
# for every status of every route: half of the processor time in which the application is assembled.
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"content": {"application/json": {"schema": FAILURE_SCHEMA}}}
    for status in (400, 404, 405, 409, 413, 415, 422, 500, 503, 507)
}


def models_routes(rollout: Rollout, max_upload: int) -> APIRouter:
    """Return the routes below /api/v1/models."""
    routes = APIRouter(prefix="/api/v1", tags=["models"], responses=FAILURES)
    _reading(routes, rollout)
    _versions(routes, rollout, max_upload)
    _aliases(routes, rollout)
    return routes


def _reading(routes: APIRouter, rollout: Rollout) -> None:
    catalog = rollout.catalog

    @routes.get("/models")
    async def list_models() -> list[ModelState]:
        """List the models."""
        return [ModelState.of(info) for info in catalog.models()]

    @routes.get("/models/{model}")
    async def get_model(model: Model) -> ModelState:
        """Return one model."""
        return ModelState.of(catalog.model(names.check_model(model)))

    @routes.get("/models/{model}/versions")
    async def list_versions(model: Model) -> list[VersionState]:
        """List a model's versions with their states."""
        return [VersionState.of(info) for info in await catalog.versions(names.check_model(model))]

    @routes.get("/models/{model}/versions/{version}")
    async def get_version(model: Model, version: Number) -> VersionDetail:
        """Return one version with its manifest."""
        return VersionDetail.of(await catalog.version(names.check_model(model), names.check_version(version)))

    @routes.get("/models/{model}/audit")
    async def get_audit(model: Model, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> list[AuditEntry]:
        """List the last changes of a model, oldest first."""
        records = await catalog.audit(names.check_model(model))
        return [AuditEntry.of(record) for record in records[-limit:]]


def _versions(routes: APIRouter, rollout: Rollout, max_upload: int) -> None:
    failures: dict[int | str, dict[str, Any]] = {429: FAILURES[400]}

    @routes.post("/models/{model}/versions", status_code=201, openapi_extra=ONNX_BODY, responses=failures)
    async def publish(
        request: Request,
        model: Model,
        promote: Annotated[bool, Query(description="Go live at once.")] = False,
        allow_signature_change: Annotated[bool, Query(description="Even with other inputs or outputs.")] = False,
        metadata: Metadata = None,
        content_digest: Digest = None,
        idempotency_key: Key = None,
    ) -> Published:
        """Upload a version: it is parsed, compiled and loaded before it gets its number."""
        if promote:
            request.state.caller.check(Scope.PROMOTE, model)
        check_headers(request, max_upload, "the model file")
        options = PublishOptions(
            promote=promote,
            allow_signature_change=allow_signature_change,
            sha256=parse_content_digest(content_digest) if content_digest is not None else None,
            metadata=_parse_metadata(metadata),
            origin=origin_of(request, idempotency_key),
            may_use=lambda used: request.state.caller.check(Scope.INFER, used),
        )
        outcome = await rollout.publish(model, stream_of(request), options)
        return Published.of(model, outcome, await _find(rollout, model, outcome.version))

    @routes.delete("/models/{model}/versions/{version}")
    async def delete(request: Request, model: Model, version: Number, idempotency_key: Key = None) -> AuditEntry:
        """Delete a version that no alias names."""
        origin = origin_of(request, idempotency_key)
        outcome = await rollout.delete(names.check_model(model), names.check_version(version), origin)
        return AuditEntry.of(outcome.record)


def _aliases(routes: APIRouter, rollout: Rollout) -> None:
    @routes.put("/models/{model}/aliases/{alias}")
    async def set_alias(
        request: Request, model: Model, alias: AliasName, asked: AliasMove, idempotency_key: Key = None
    ) -> AliasState:
        """Let an alias name a version; answered once requests go there."""
        outcome = await rollout.set_alias(
            names.check_model(model),
            alias,
            asked.version,
            origin_of(request, idempotency_key),
            allow_signature_change=asked.allow_signature_change,
        )
        return AliasState.of(alias, outcome.record)

    @routes.post("/models/{model}/rollback")
    async def rollback(
        request: Request, model: Model, asked: RollbackAsked | None = None, idempotency_key: Key = None
    ) -> AliasState:
        """Take an alias back; answered once requests go there."""
        asked = asked or RollbackAsked()
        origin = origin_of(request, idempotency_key)
        outcome = await rollout.rollback(names.check_model(model), asked.alias, asked.to, origin)
        return AliasState.of(asked.alias, outcome.record)


def origin_of(request: Request, key: str | None) -> Origin:
    """Return who asks, with the idempotency key they sent; raises BadRequest."""
    caller = request.state.caller
    actor = caller.name or (request.client.host if request.client else "")
    return Origin(actor, names.check_key(key) if key is not None else None, space=caller.identity)


def check_headers(request: Request, most: int, what: str) -> None:
    """Refuse before the body comes what its headers already rule out."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMedia(f"Content-Encoding {encoding[:80]!r}: expected {what} as it is")
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise UnsupportedMedia(f"the body is a multipart form, expected {what} as it is")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > most:
        raise TooLarge(f"{what} has {announced} bytes, the most that may be uploaded is {most}")


def _parse_metadata(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    if len(text) > METADATA_LIMIT:
        raise TooLarge(f"metadata: expected at most {METADATA_LIMIT} bytes")
    try:
        metadata = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"metadata: not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise BadRequest(f"metadata: expected a JSON object, got {type(metadata).__name__}")
    return metadata


async def stream_of(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it comes; raises ClientLeft."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as error:
        raise ClientLeft from error


async def _find(rollout: Rollout, model: str, version: int) -> VersionInfo | None:
    try:
        return await rollout.catalog.version(model, version)
    except NotFound:
        return None  # a replayed answer, and the version is gone since
