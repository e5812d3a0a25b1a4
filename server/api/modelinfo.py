"""What a loaded model says about itself, in the wire's words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from server.scheduling.servable import Servable
from server.types import TensorSpec

_CONFIG_TYPE = {"BYTES": "STRING"}


def metadata(servable: Servable, loaded: Iterable[Servable]) -> dict[str, Any]:
    """Return the metadata object; ``versions`` are those loaded now."""
    name = servable.ref.name
    versions = sorted(other.ref.version for other in loaded if other.ref.name == name)
    return {
        "name": name,
        "versions": [str(version) for version in versions],
        "platform": servable.model.platform,
        "inputs": [spec.describe() for spec in servable.model.inputs],
        "outputs": [spec.describe() for spec in servable.model.outputs],
    }


def configuration(servable: Servable) -> dict[str, Any]:
    """Return the configuration as Triton writes it: with a batch axis, ``dims`` leave it out."""
    model = servable.model
    config: dict[str, Any] = {
        "name": servable.ref.name,
        "platform": model.platform,
        "backend": "lathe",
        "max_batch_size": model.max_batch if model.batchable else 0,
        "input": [_tensor(spec, model.batchable) for spec in model.inputs],
        "output": [_tensor(spec, model.batchable) for spec in model.outputs],
        "model_transaction_policy": {"decoupled": False},
        "parameters": {"batching": {"string_value": model.batch_reason}},
    }
    if model.batchable:
        config["dynamic_batching"] = {"max_queue_delay_microseconds": 0}
    return config


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    kind = _CONFIG_TYPE.get(spec.datatype, spec.datatype)
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape[1:] if batched else spec.shape)}
