"""Metadata, statistics and configuration of the server and its models, in the protocol's format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lathe.server.backends.base import LoadedModel, devices, optional_inputs
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.signature import first_names
from lathe.server.errors import NotFound
from lathe.server.repository import names
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import TensorSpec

VERSION = "0.1.0"
EXTENSIONS = [
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "schedule_policy",
    "statistics",
    "logging",
    "trace",
]
_CONFIG_TYPE = {"BYTES": "STRING"}


def server_metadata(plane: DataPlane) -> dict[str, Any]:
    """The protocol's metadata object of the server: name, version and extensions."""
    shared = ["system_shared_memory"] if plane.regions.allowed else []
    return {"name": "lathe", "version": VERSION, "extensions": [*EXTENSIONS, *shared]}


def metadata(servable: Servable, loaded: Iterable[Servable]) -> dict[str, Any]:
    """The protocol's metadata object of a version; its `versions` are those of the same model among `loaded`."""
    name = servable.ref.name
    versions = sorted(other.ref.version for other in loaded if other.ref.name == name)
    return {
        "name": name,
        "versions": [str(version) for version in versions],
        "platform": servable.model.platform,
        "inputs": [spec.describe() for spec in servable.model.inputs],
        "outputs": [spec.describe() for spec in servable.model.outputs],
    }


def statistics(plane: DataPlane, book: StatsBook, model: str = "", version: str = "") -> dict[str, Any]:
    """The statistics of all versions, of one model's versions, or of one version (a number or an alias).

    NotFound for an unknown model or version, BadRequest for text that is neither a number nor an alias, or another
    error of `DataPlane.resolve`.
    """
    pages = [page for page in book.all() if model in ("", page.ref.name)]
    if model and version:
        is_number = names.is_version_number(version)
        wanted = int(version) if is_number else plane.resolve(model, version).ref.version
        pages = [page for page in pages if page.ref.version == wanted]
    if model and not pages:
        plane.is_ready(model)  # raises for an unknown one
        raise NotFound(f"model {model!r}{f' version {version!r}' if version else ''} is not known")
    return {"model_stats": [page.describe() for page in pages]}


def configuration(servable: Servable) -> dict[str, Any]:
    """The configuration of a version in Triton's format; if its requests share batches, `dims` omit the batch axis."""
    model, policy = servable.model, servable.batcher.policy
    batched = servable.signature.batchable
    config: dict[str, Any] = {
        "name": servable.ref.name,
        "platform": model.platform,
        "backend": "lathe",
        "max_batch_size": min(policy.max_rows or model.max_batch, model.max_batch) if batched else 0,
        "input": [_tensor(spec, batched) for spec in model.inputs],
        "output": [_tensor(spec, batched) for spec in model.outputs],
        "instance_group": [{"count": policy.instances, **_placement(model)}],
        "model_transaction_policy": {"decoupled": False},
        "parameters": {
            "batching": {"string_value": _batching_reason(servable)},
            **_optional(model),
            **_any_rank(model),
        },
    }
    if servable.lookup is not None:
        config["response_cache"] = {"enable": True}
    if batched:
        config["dynamic_batching"] = _dynamic_batching(policy)
    return config


def _batching_reason(servable: Servable) -> str:
    """The reason why requests share batches, or why they do not."""
    model = servable.model
    if model.batchable and not servable.signature.batchable:
        return "the model's config.toml says max_batch_size = 0"
    return model.batch_reason


def _placement(model: LoadedModel) -> dict[str, Any]:
    """The `kind` and `gpus` of Triton's instance group, by the devices of a model."""
    used = devices(model)
    if not used:
        return {"kind": "KIND_CPU"}
    return {"kind": "KIND_GPU", "gpus": [int(device.partition(":")[2]) for device in used]}


def _dynamic_batching(policy: BatchPolicy) -> dict[str, Any]:
    batching: dict[str, Any] = {"max_queue_delay_microseconds": int(policy.max_delay * 1e6)}
    if policy.preferred:
        batching["preferred_batch_size"] = list(policy.preferred)
    if policy.priority_levels:
        batching["priority_levels"] = policy.priority_levels
        batching["default_priority_level"] = policy.default_priority
    return batching


def _optional(model: LoadedModel) -> dict[str, Any]:
    """The parameter `optional_inputs`, a text with name, datatype and shape of each; {} without optional inputs.

    They are not listed as inputs, because clients send all listed inputs, and Triton's configuration cannot express
    inputs without the batch axis.
    """
    texts = [f"{spec.name} ({spec.datatype} {list(spec.shape)})" for spec in optional_inputs(model)]
    return {"optional_inputs": {"string_value": first_names(texts)}} if texts else {}


def _any_rank(model: LoadedModel) -> dict[str, Any]:
    """The parameter `any_rank` with the names of tensors of any rank, {} without; their shape is a single -1."""
    names = [spec.name for spec in (*model.inputs, *model.outputs) if spec.any_rank]
    return {"any_rank": {"string_value": first_names(names)}} if names else {}


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    kind = _CONFIG_TYPE.get(spec.datatype, spec.datatype)
    dims = spec.shape[1:] if batched and not spec.any_rank else spec.shape
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(dims)}
