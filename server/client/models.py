"""Operations on the server and its models: state, versions, aliases, canaries."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson

from lathe.server.api.management.canary_schemas import CanaryState
from lathe.server.api.management.schemas import (
    AliasState,
    AuditEntry,
    ModelState,
    Published,
    VersionDetail,
    VersionState,
)
from lathe.server.archive import body_of
from lathe.server.client.call import (
    Call,
    Content,
    Progress,
    Upload,
    file_or_bytes,
    ignore_body,
    json_arguments,
    operation,
    parse_list,
    parse_object,
    parse_objects,
    parse_one,
    parse_text,
    path,
)
from lathe.server.client.errors import ClientError
from lathe.server.client.exporting import Options, export_model
from lathe.server.repository.names import KEY_PATTERN, LIVE_ALIAS

_MODELS, _V2, _CONTROL = "/api/v1/models", "/v2/models", "/v2/repository/models"


class ModelOperations:
    """The operations of both clients on a server and its models."""

    # the server

    @operation
    def ready(self) -> Call[bool]:
        """Return whether the server is ready; raises ClientError if the server cannot be reached."""
        return Call("GET", "/v2/health/ready", lambda answer: answer.is_success, is_repeatable=False, any_status=True)

    @operation
    def server(self) -> Call[dict[str, Any]]:
        """Return the server's name, version and extensions."""
        return Call("GET", "/v2", parse_object("name", "version"))

    @operation
    def metrics(self) -> Call[str]:
        """Return the metrics in Prometheus' text format."""
        return Call("GET", "/metrics", parse_text)

    @operation
    def status(self) -> Call[list[dict[str, Any]]]:
        """Return the repository index: name, version, state and reason of all versions. `lathe status` shows more."""
        return Call("POST", "/v2/repository/index", parse_objects)

    # models

    @operation
    def models(self) -> Call[list[ModelState]]:
        """List the models."""
        return Call("GET", _MODELS, parse_list(ModelState))

    @operation
    def model(self, model: str) -> Call[ModelState]:
        """Return the state of one model."""
        return Call("GET", path(_MODELS, model), parse_one(ModelState))

    @operation
    def describe(self, model: str, version: str | int = "") -> Call[dict[str, Any]]:
        """Return the metadata of a version: names, datatypes and shapes (-1: any size) of its inputs and outputs.

        `version` is a number or an alias, by default the live version.
        """
        return Call("GET", path(_V2, model, *version_segments(version)), parse_object("inputs", "outputs"))

    @operation
    def config(self, model: str, version: str | int = "") -> Call[dict[str, Any]]:
        """Return the configuration of a version, with `max_batch_size` and the reason for or against batching.

        `version` is a number or an alias, by default the live version.
        """
        return Call("GET", path(_V2, model, *version_segments(version), "config"), parse_object())

    @operation
    def statistics(self, model: str, version: str | int = "") -> Call[dict[str, Any]]:
        """Return the statistics of a version, by default of all versions of the model.

        They are counts of requests, rows and executions, and times by phase.
        """
        return Call("GET", path(_V2, model, *version_segments(version), "stats"), parse_object())

    @operation
    def load(self, model: str) -> Call[None]:
        """Load a model after `unload`, a change on disk or a failure; returns once its versions are ready or failed.

        Raises ApiError if no version answers as live then.
        """
        return Call("POST", path(_CONTROL, model, "load"), ignore_body, is_long=True)

    @operation
    def unload(self, model: str) -> Call[None]:
        """Unload a model from memory; its versions stay in the repository."""
        return Call("POST", path(_CONTROL, model, "unload"), ignore_body)

    @operation
    def audit(self, model: str, limit: int = 1000) -> Call[list[AuditEntry]]:
        """List the last changes of a model: the newest `limit` (at most 10,000), oldest first."""
        return Call("GET", path(_MODELS, model, "audit"), parse_list(AuditEntry), {"limit": str(limit)})

    # versions

    @operation
    def versions(self, model: str) -> Call[list[VersionState]]:
        """List a model's versions."""
        return Call("GET", path(_MODELS, model, "versions"), parse_list(VersionState))

    @operation
    def version(self, model: str, version: int) -> Call[VersionDetail]:
        """Return one version with its manifest."""
        return Call("GET", path(_MODELS, model, "versions", version), parse_one(VersionDetail))

    @operation
    def upload(
        self,
        model: str,
        content: Content,
        *,
        promote: bool = False,
        allow_signature_change: bool = False,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        progress: Progress | None = None,
    ) -> Call[Published]:
        """Upload a model file, its path or its bytes; returns once the version is compiled, loaded and durable.

        External weights in the model's folder are uploaded with it, in an archive, and so are the files that the steps
        of a `pipeline.toml` read, and those of a language model in a Hugging Face folder. Raises OSError for files that
        cannot be read, and lathe.core.errors.ModelError for weights that are not there.

        With `promote` the version goes live; the server refuses if its inputs or outputs differ from those of the live
        version, unless `allow_signature_change` is true. `metadata` is stored in the manifest. `key` is an idempotency
        key: a second call with the same key returns the same answer, without a second change. `progress` gets the bytes
        sent so far, and all bytes.
        """
        file = file_or_bytes(content)
        body = Upload(lambda: nullcontext(body_of(file)), progress)
        return upload_call(model, body, promote, allow_signature_change, metadata, key)

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
        adapters: Mapping[str, Path | str] | None = None,
        draft: Path | str | None = None,
        promote: bool = False,
        allow_signature_change: bool = False,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        progress: Progress | None = None,
    ) -> Call[Published]:
        """Export a model to ONNX on this machine, and upload it; the server gets only ONNX.

        `content`: a torch.nn.Module with an `example` of its inputs (a tensor, a tuple of them, or a mapping by
        name), a torch.export.ExportedProgram, a torch.onnx.ONNXProgram or the path of a .pt2 file; a fitted
        scikit-learn estimator; an onnx.ModelProto, a lathe.Graph; or a file or bytes as for `upload`. The leading
        dimensions of a module's inputs are the batch, unless `dynamic_shapes` (as in torch.onnx.export) says otherwise.
        A .pt2 file is read by `python`, an interpreter that has torch, by default this one. `adapters` are folders of
        LoRA adapters by name, and `draft` is the GGUF file of a draft model, for a language model. The other arguments
        are those of `upload`.

        Raises ClientError for a model that cannot be exported, and OSError and ModelError as `upload`.
        """
        options = Options(example, dynamic_shapes, input_names, output_names, python, adapters, draft)
        body = Upload(lambda: export_model(content, options), progress)
        return upload_call(model, body, promote, allow_signature_change, metadata, key)

    @operation
    def delete(self, model: str, version: int, *, key: str | None = None) -> Call[AuditEntry]:
        """Delete a version; the server refuses while an alias, a canary or a pipeline names it.

        `key` is an idempotency key: a second call with the same key makes no second change.
        """
        return Call(
            "DELETE", path(_MODELS, model, "versions", version), parse_one(AuditEntry), headers=idempotency_header(key)
        )

    # aliases

    @operation
    def promote(
        self, model: str, version: int, *, allow_signature_change: bool = False, key: str | None = None
    ) -> Call[AliasState]:
        """Make a version live; returns once it answers the requests.

        The server refuses if its inputs or outputs differ from those of the live version, unless
        `allow_signature_change` is true. `key` is an idempotency key: a second call with the same key makes no second
        change.
        """
        return _move(model, LIVE_ALIAS, version, allow_signature_change, key)

    @operation
    def set_alias(
        self, model: str, alias: str, version: int, *, allow_signature_change: bool = False, key: str | None = None
    ) -> Call[AliasState]:
        """Point an alias to a version; returns once that version answers the alias' requests.

        The server refuses if its inputs or outputs differ from those of the alias' present version, unless
        `allow_signature_change` is true. `key` is an idempotency key: a second call with the same key makes no second
        change.
        """
        return _move(model, alias, version, allow_signature_change, key)

    @operation
    def rollback(
        self, model: str, *, alias: str = LIVE_ALIAS, to: int | None = None, key: str | None = None
    ) -> Call[AliasState]:
        """Move an alias back to its previous version, or to the version `to`; returns once that version answers.

        `key` is an idempotency key: a second call with the same key makes no second change.
        """
        return _change("POST", path(_MODELS, model, "rollback"), parse_one(AliasState), key, {"alias": alias, "to": to})

    # canaries

    @operation
    def start_canary(self, /, model: str, version: int, *, key: str | None = None, **options: Any) -> Call[CanaryState]:
        """Start a canary: test a version on a share of the requests; it ends by the evidence, or by `cancel_canary`.

        `options`: `weight` is the share of the requests, default 0.1. `shadow` is the share of the live version's
        requests whose answers are compared, default 0: none; with it `rtol`, `atol` and `tolerated` (share of the
        answers that may differ). `promote=False` keeps a candidate that passed from going live. `steps`, a list of
        `{"weight": 0.01, "seconds": 600}`, replace `weight`. `start_at` is a time in RFC 3339. `key` is an idempotency
        key: a second call with the same key makes no second change.
        """
        return _change(
            "POST", path(_MODELS, model, "canary"), parse_one(CanaryState), key, {"version": version, **options}
        )

    @operation
    def canary(self, model: str) -> Call[CanaryState]:
        """Return the state of the current canary; raises ApiError with status 404 if there is none."""
        return Call("GET", path(_MODELS, model, "canary"), parse_one(CanaryState))

    @operation
    def cancel_canary(self, model: str, *, key: str | None = None) -> Call[AuditEntry]:
        """Cancel the current canary; the live version answers all requests again.

        `key` is an idempotency key: a second call with the same key makes no second change.
        """
        return Call("DELETE", path(_MODELS, model, "canary"), parse_one(AuditEntry), headers=idempotency_header(key))


def upload_call(
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
    return Call("POST", where, parse_one(Published), query, idempotency_header(key), upload=body, is_long=True)


def idempotency_header(key: str | None) -> dict[str, str]:
    """Return the idempotency header, which makes a change repeatable: with the caller's key, or a random one.

    Raises ClientError for a key that a header cannot have.
    """
    if key is not None and KEY_PATTERN.fullmatch(key) is None:
        raise ClientError(f"key: expected 1 to 255 visible ASCII characters, got {key[:80]!r}")
    return {"idempotency-key": secrets.token_hex(16) if key is None else key}


def version_segments(version: str | int) -> tuple[str, ...]:
    """Return the path segments of a version or alias; none for ""."""
    return ("versions", str(version)) if version != "" else ()


def _move(model: str, alias: str, version: int, allow_signature_change: bool, key: str | None) -> Call[AliasState]:
    fields = {"version": version, "allow_signature_change": allow_signature_change}
    return _change("PUT", path(_MODELS, model, "aliases", alias), parse_one(AliasState), key, fields)


def _change(method: str, where: str, read: Any, key: str | None, fields: Mapping[str, Any]) -> Call[Any]:
    """Return a call with a JSON body and an idempotency key; `is_long`, since a version may have to be compiled."""
    body = json_arguments(fields)
    return Call(
        method,
        where,
        read,
        headers={**body["headers"], **idempotency_header(key)},
        content=body["content"],
        is_long=True,
    )
