"""Operations on the server and its models: state, versions, aliases, candidates."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson

from server.api.canary_schemas import CanaryState
from server.api.schemas import AliasState, AuditEntry, ModelState, Published, VersionDetail, VersionState
from server.archive import body_of
from server.client.call import Call, Progress, Upload, document, many, nothing, one, operation, path, text, values
from server.client.exporting import Options, exported
from server.repository.names import LIVE

_MODELS, _V2, _CONTROL = "/api/v1/models", "/v2/models", "/v2/repository/models"


class ModelOperations:
    """What both clients can ask about a server and its models."""

    # the server

    @operation
    def ready(self) -> Call[bool]:
        """Say whether the server wants requests; raises ClientError when it cannot be reached."""
        return Call("GET", "/v2/health/ready", lambda answer: answer.is_success, is_repeatable=False, any_status=True)

    @operation
    def server(self) -> Call[dict[str, Any]]:
        """Return the server's name, version and extensions."""
        return Call("GET", "/v2", values)

    @operation
    def metrics(self) -> Call[str]:
        """Return the metrics in Prometheus' text format."""
        return Call("GET", "/metrics", text)

    @operation
    def status(self) -> Call[list[dict[str, Any]]]:
        """Return name, version, state and reason of every version there is."""
        return Call("POST", "/v2/repository/index", values)

    # models

    @operation
    def models(self) -> Call[list[ModelState]]:
        """List the models."""
        return Call("GET", _MODELS, many(ModelState))

    @operation
    def model(self, model: str) -> Call[ModelState]:
        """Return one model."""
        return Call("GET", path(_MODELS, model), one(ModelState))

    @operation
    def describe(self, model: str, version: str | int = "") -> Call[dict[str, Any]]:
        """Return the inputs and outputs of a version: names, datatypes, shapes (-1: any size)."""
        return Call("GET", path(_V2, model, *of_version(version)), values)

    @operation
    def config(self, model: str, version: str | int = "") -> Call[dict[str, Any]]:
        """Return how a version is served: whether it batches, and why not."""
        return Call("GET", path(_V2, model, *of_version(version), "config"), values)

    @operation
    def statistics(self, model: str, version: str | int = "") -> Call[dict[str, Any]]:
        """Return what a version has answered, and where the time went."""
        return Call("GET", path(_V2, model, *of_version(version), "stats"), values)

    @operation
    def load(self, model: str) -> Call[None]:
        """Load a model, or load it again; returns once its versions are ready or have failed."""
        return Call("POST", path(_CONTROL, model, "load"), nothing, is_long=True)

    @operation
    def unload(self, model: str) -> Call[None]:
        """Take a model out of service; its versions stay in the repository."""
        return Call("POST", path(_CONTROL, model, "unload"), nothing)

    @operation
    def audit(self, model: str, limit: int = 1000) -> Call[list[AuditEntry]]:
        """List the last changes of a model, oldest first."""
        return Call("GET", path(_MODELS, model, "audit"), many(AuditEntry), {"limit": str(limit)})

    # versions

    @operation
    def versions(self, model: str) -> Call[list[VersionState]]:
        """List a model's versions."""
        return Call("GET", path(_MODELS, model, "versions"), many(VersionState))

    @operation
    def version(self, model: str, version: int) -> Call[VersionDetail]:
        """Return one version with its manifest."""
        return Call("GET", path(_MODELS, model, "versions", version), one(VersionDetail))

    @operation
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
    ) -> Call[Published]:
        """Upload a model file; returns once it is compiled, loaded and durable. ``key`` makes repeating it harmless.

        Weights that lie in other files of its folder go along, in an archive that is made on the way; raises
        core.errors.ModelError when they do not lie there.
        """
        body = Upload(lambda: nullcontext(body_of(content)), progress)
        return publishing(model, body, promote, allow_signature_change, metadata, key)

    @operation
    def push(
        self,
        model: str,
        content: Any,
        example: Any = None,
        *,
        dynamic_shapes: Any = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        python: Path | str | None = None,
        promote: bool = False,
        allow_signature_change: bool = False,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        progress: Progress | None = None,
    ) -> Call[Published]:
        """Export a model to ONNX, here, and upload it; the server gets nothing but ONNX.

        ``content``: a torch.nn.Module with an ``example`` of its inputs (a tensor, a tuple of them, or a mapping by
        name), a torch.export.ExportedProgram or the path of a .pt2 file; a fitted scikit-learn estimator; an
        onnx.ModelProto, a core.Graph; or what `upload` takes. Leading dimensions of a module's inputs are the batch,
        unless ``dynamic_shapes`` says otherwise, as torch.onnx.export takes it. A .pt2 file is read by ``python``, an
        interpreter that has torch, by default this one. The other arguments are those of `upload`.

        Raises ClientError for what cannot be exported.
        """
        options = Options(example, dynamic_shapes, input_names, output_names, python)
        body = Upload(lambda: exported(content, options), progress)
        return publishing(model, body, promote, allow_signature_change, metadata, key)

    @operation
    def delete(self, model: str, version: int, *, key: str | None = None) -> Call[AuditEntry]:
        """Delete a version that no alias names."""
        return Call("DELETE", path(_MODELS, model, "versions", version), one(AuditEntry), headers=keyed(key))

    # aliases

    @operation
    def promote(
        self, model: str, version: int, *, allow_signature_change: bool = False, key: str | None = None
    ) -> Call[AliasState]:
        """Make a version live; returns once requests go there."""
        return _move(model, LIVE, version, allow_signature_change, key)

    @operation
    def set_alias(
        self, model: str, alias: str, version: int, *, allow_signature_change: bool = False, key: str | None = None
    ) -> Call[AliasState]:
        """Let an alias name a version; returns once requests go there."""
        return _move(model, alias, version, allow_signature_change, key)

    @operation
    def rollback(
        self, model: str, *, alias: str = LIVE, to: int | None = None, key: str | None = None
    ) -> Call[AliasState]:
        """Take an alias one step back, or to a version on its history; returns once requests go there."""
        return _change("POST", path(_MODELS, model, "rollback"), one(AliasState), key, {"alias": alias, "to": to})

    # candidates

    @operation
    def start_canary(self, /, model: str, version: int, *, key: str | None = None, **options: Any) -> Call[CanaryState]:
        """Try a version on a share of the requests; ``options`` are the fields of the API's body."""
        return _change("POST", path(_MODELS, model, "canary"), one(CanaryState), key, {"version": version, **options})

    @operation
    def canary(self, model: str) -> Call[CanaryState]:
        """Return the trial under way."""
        return Call("GET", path(_MODELS, model, "canary"), one(CanaryState))

    @operation
    def cancel_canary(self, model: str, *, key: str | None = None) -> Call[AuditEntry]:
        """End the trial."""
        return Call("DELETE", path(_MODELS, model, "canary"), one(AuditEntry), headers=keyed(key))


def publishing(
    model: str,
    body: Upload,
    promote: bool,
    allow_signature_change: bool,
    metadata: Mapping[str, Any] | None,
    key: str | None,
) -> Call[Published]:
    """Return the call that uploads a version."""
    query = {"promote": str(promote), "allow_signature_change": str(allow_signature_change)}
    if metadata:
        query["metadata"] = orjson.dumps(metadata).decode()
    where = path(_MODELS, model, "versions")
    return Call("POST", where, one(Published), query, keyed(key), upload=body, is_long=True)


def keyed(key: str | None) -> dict[str, str]:
    """Return the header that makes a change repeatable: the caller's idempotency key, or one of this call's own."""
    return {"idempotency-key": secrets.token_hex(16) if key is None else key}


def of_version(version: str | int) -> tuple[str, ...]:
    """Return the part of a path that names a version or alias; "": none."""
    return ("versions", str(version)) if version != "" else ()


def _move(model: str, alias: str, version: int, allow_signature_change: bool, key: str | None) -> Call[AliasState]:
    asked = {"version": version, "allow_signature_change": allow_signature_change}
    return _change("PUT", path(_MODELS, model, "aliases", alias), one(AliasState), key, asked)


def _change(method: str, where: str, read: Any, key: str | None, asked: Mapping[str, Any]) -> Call[Any]:
    """Return a change whose body is JSON, under a key. What it makes live may have to be compiled."""
    body = document(asked)
    return Call(method, where, read, headers={**body["headers"], **keyed(key)}, content=body["content"], is_long=True)
