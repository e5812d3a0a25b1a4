"""The management routes of models: upload and delete versions, move aliases, roll back, list and audit."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Path, Query, Request
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import ClientDisconnect

from lathe.server.access.scopes import Scope
from lathe.server.api.inference.asgi import ClientLeft
from lathe.server.api.management.schemas import (
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
from lathe.server.errors import BadRequest, NotFound, TooLarge, UnsupportedMedia
from lathe.server.repository import names
from lathe.server.repository.catalog import VersionInfo
from lathe.server.repository.manifest import METADATA_LIMIT
from lathe.server.repository.rollout import PublishOptions, Rollout
from lathe.server.repository.store import Origin
from lathe.server.repository.upload_receiver import parse_content_digest


def pattern_schema(pattern: re.Pattern[str]) -> dict[str, Any]:
    """The JSON schema keyword `pattern` for a regular expression that the whole value has to match.

    It is for the OpenAPI description only: `names` validates the value, with its own error texts.
    """
    return {"pattern": f"^(?:{pattern.pattern})$"}


ModelName = Annotated[str, Path(description="The model's name.", json_schema_extra=pattern_schema(names.MODEL_PATTERN))]
VersionNumber = Annotated[
    str, Path(description="The version's number.", json_schema_extra=pattern_schema(names.VERSION_PATTERN))
]
AliasName = Annotated[str, Path(description="The alias.", json_schema_extra=pattern_schema(names.ALIAS_PATTERN))]
IdempotencyKey = Annotated[
    str | SkipJsonSchema[None],
    Header(
        alias="Idempotency-Key",
        description="Repeating a request with the same key returns the same answer without a second change.",
        json_schema_extra=pattern_schema(names.KEY_PATTERN),
    ),
]
Digest = Annotated[
    str | SkipJsonSchema[None],
    Header(description="RFC 9530, sha-256.", json_schema_extra={"pattern": "^sha-256=:[A-Za-z0-9+/]{43}=:$"}),
]
Metadata = Annotated[str | SkipJsonSchema[None], Query(description="A JSON object to store in the manifest.")]
ONNX_BODY = {
    "requestBody": {
        "required": True,
        "description": "An ONNX file, or a tar archive: model.onnx with its external weights, or pipeline.toml with "
        "the files of its steps.",
        "content": {
            kind: {"schema": {"type": "string", "format": "binary"}}
            for kind in ("application/octet-stream", "application/x-tar")
        },
    }
}
# Each route describes its errors by a reference. With `"model": Failure` instead, FastAPI would build a validator for
# every status of every route, which takes half of the CPU time of creating the application.
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"content": {"application/json": {"schema": FAILURE_SCHEMA}}}
    for status in (400, 404, 405, 409, 413, 415, 422, 500, 503, 507)
}


def models_routes(rollout: Rollout, max_upload: int) -> APIRouter:
    """The routes below /api/v1/models."""
    routes = APIRouter(prefix="/api/v1", tags=["models"], responses=FAILURES)
    _add_reads(routes, rollout)
    _add_versions(routes, rollout, max_upload)
    _add_aliases(routes, rollout)
    return routes


def _add_reads(routes: APIRouter, rollout: Rollout) -> None:
    catalog = rollout.catalog

    @routes.get("/models")
    async def list_models() -> list[ModelState]:
        """List the models."""
        return [ModelState.of(info) for info in catalog.models()]

    @routes.get("/models/{model}")
    async def get_model(model: ModelName) -> ModelState:
        """Return one model."""
        return ModelState.of(catalog.model(names.check_model(model)))

    @routes.get("/models/{model}/versions")
    async def list_versions(model: ModelName) -> list[VersionState]:
        """List the versions of a model with their states."""
        return [VersionState.of(info) for info in await catalog.versions(names.check_model(model))]

    @routes.get("/models/{model}/versions/{version}")
    async def get_version(model: ModelName, version: VersionNumber) -> VersionDetail:
        """Return one version with its manifest."""
        return VersionDetail.of(await catalog.version(names.check_model(model), names.check_version(version)))

    @routes.get("/models/{model}/audit")
    async def get_audit(model: ModelName, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> list[AuditEntry]:
        """List the last changes of a model, oldest first."""
        records = await catalog.audit(names.check_model(model))
        return [AuditEntry.of(record) for record in records[-limit:]]


def _add_versions(routes: APIRouter, rollout: Rollout, max_upload: int) -> None:
    failures: dict[int | str, dict[str, Any]] = {429: FAILURES[400]}

    @routes.post("/models/{model}/versions", status_code=201, openapi_extra=ONNX_BODY, responses=failures)
    async def publish(
        request: Request,
        model: ModelName,
        promote: Annotated[bool, Query(description="Make the version live.")] = False,
        allow_signature_change: Annotated[bool, Query(description="Allow changed inputs or outputs.")] = False,
        metadata: Metadata = None,
        content_digest: Digest = None,
        idempotency_key: IdempotencyKey = None,
    ) -> Published:
        """Upload a version. It is parsed, compiled and loaded before it gets its number."""
        if promote:
            request.state.caller.check(Scope.PROMOTE, model)
        check_headers(request, max_upload, "the model file")
        options = PublishOptions(
            promote=promote,
            allow_signature_change=allow_signature_change,
            sha256=parse_content_digest(content_digest) if content_digest is not None else None,
            metadata=_parse_metadata(metadata),
            origin=origin_of(request, idempotency_key),
            check_may_use=lambda used: request.state.caller.check(Scope.INFER, used),
        )
        outcome = await rollout.publish(model, body_chunks(request), options)
        return Published.of(model, outcome, await _find(rollout, model, outcome.version))

    @routes.delete("/models/{model}/versions/{version}")
    async def delete(
        request: Request, model: ModelName, version: VersionNumber, idempotency_key: IdempotencyKey = None
    ) -> AuditEntry:
        """Delete a version that no alias names."""
        origin = origin_of(request, idempotency_key)
        outcome = await rollout.delete(names.check_model(model), names.check_version(version), origin)
        return AuditEntry.of(outcome.record)


def _add_aliases(routes: APIRouter, rollout: Rollout) -> None:
    @routes.put("/models/{model}/aliases/{alias}")
    async def set_alias(
        request: Request, model: ModelName, alias: AliasName, asked: AliasMove, idempotency_key: IdempotencyKey = None
    ) -> AliasState:
        """Move an alias to a version; answered when requests are routed there. No change if it is there already."""
        outcome = await rollout.set_alias(
            names.check_model(model),
            alias,
            asked.version,
            origin_of(request, idempotency_key),
            allow_signature_change=asked.allow_signature_change,
        )
        return AliasState.of(alias, outcome)

    @routes.post("/models/{model}/rollback")
    async def rollback(
        request: Request, model: ModelName, asked: RollbackAsked | None = None, idempotency_key: IdempotencyKey = None
    ) -> AliasState:
        """Roll an alias back; answered when requests are routed to the earlier version."""
        asked = asked or RollbackAsked()
        origin = origin_of(request, idempotency_key)
        outcome = await rollout.rollback(names.check_model(model), asked.alias, asked.to, origin)
        return AliasState.of(asked.alias, outcome)


def origin_of(request: Request, key: str | None) -> Origin:
    """The caller of a change (name of the key, or address; identity) and the idempotency key `key`.

    BadRequest for an invalid idempotency key.
    """
    caller = request.state.caller
    actor = caller.name or (request.client.host if request.client else "")
    return Origin(actor, names.check_key(key) if key is not None else None, space=caller.identity)


def check_headers(request: Request, most: int, what: str) -> None:
    """Refuse an upload by its headers, before its body is received; `what` names the content in errors.

    UnsupportedMedia for a content coding or a multipart form, TooLarge for more than `most` bytes.
    """
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


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the chunks of the body as they arrive; ClientLeft if the client disconnects."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as error:
        raise ClientLeft from error


async def _find(rollout: Rollout, model: str, version: int) -> VersionInfo | None:
    try:
        return await rollout.catalog.version(model, version)
    except NotFound:
        return None  # the answer is a replay, and the version was deleted since
