"""``config.toml`` beside a model's versions: what its owner wants otherwise. Everything in it is optional.

Names and meaning are those of Triton's ``config.pbtxt`` where it has them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from core.mistakes import mistakes
from server.access.quotas import Quota
from server.batching.padding import Padding
from server.batching.policy import BatchPolicy
from server.repository import names
from server.repository.artifacts import BuildOptions
from server.settings import Device

CONFIG = "config.toml"
_LARGEST = 1 << 16  # bytes
_LARGEST_LABELS = 16 << 20  # bytes of one file

Labels = dict[str, tuple[bytes, ...]]  # by output: the classes' names, in their order
FileName = Annotated[str, Field(pattern=f"^(?:{names.FILE.pattern})$")]
Size = Annotated[int, Field(ge=1, le=4096)]


class BadConfig(ValueError):
    """The file does not read as a configuration; the message names the field."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DynamicBatching(_Section):
    """How requests become batches."""

    preferred_batch_size: tuple[Size, ...] = Field(
        default=(),
        strict=False,
        description="Sizes to form; waits for the smallest of them up to the delay. Requests that make up none of them "
        "go together all the same.",
    )
    max_queue_delay_microseconds: int = Field(
        default=0, ge=0, le=10_000_000, description="How long a request may wait for others while nothing runs."
    )
    priority_levels: int = Field(default=0, ge=0, le=16, description="1 is the most urgent; 0: all requests are equal.")
    default_priority_level: int = Field(default=0, ge=0, le=16, description="Of requests that name none.")
    starvation_ms: float = Field(
        default=1000.0, gt=0, strict=False, description="A request that waited for longer goes before all others."
    )


class QueuePolicy(_Section):
    """What may wait per version."""

    max_queue_size: int | None = Field(default=None, ge=1, description="Requests; else the server's `queue_items`.")
    max_queue_bytes: int | None = Field(
        default=None, ge=1, description="Bytes of input; else the server's `queue_bytes`."
    )
    delay_target_ms: float | None = Field(
        default=None,
        gt=0,
        strict=False,
        description="Who waited for longer gets 503 once the queue has not been empty for the interval. What one batch "
        "takes is always allowed. Without it nobody waits too long.",
    )
    delay_interval_ms: float = Field(
        default=100.0, gt=0, strict=False, description="After it a queue is no burst that works off by itself."
    )


class ClientQuota(_Section):
    """What each client may ask of this model, beside the server's `client_rate`."""

    rate: float | None = Field(
        default=None, gt=0, strict=False, description="Rows per second for each client before 429."
    )
    burst: float | None = Field(
        default=None, ge=1, strict=False, description="Rows at once; without it those of one second."
    )

    @property
    def quota(self) -> Quota | None:
        """The quota, if there is one."""
        return None if self.rate is None else Quota.of(self.rate, self.burst)


class ResponseCaching(_Section):
    """Whether answers are kept for equal requests."""

    max_bytes: int = Field(
        default=0, ge=0, description="Bytes per version; 0 turns it off. Only for models that answer alike each time."
    )


class PaddingRules(_Section):
    """Requests of different lengths in one batch, where the model heeds a mask."""

    mask: str | None = Field(
        default=None, description="The input that is 1 for what is real; padded with 0. Without it nothing is padded."
    )
    inputs: tuple[str, ...] = Field(default=(), strict=False, description="Inputs padded likewise, with `value`.")
    outputs: tuple[str, ...] = Field(
        default=(), strict=False, description="Outputs cut back to a request's own length."
    )
    axis: int = Field(default=1, ge=1, le=7, description="Along which they are padded and cut.")
    multiple: int = Field(default=16, ge=1, le=1 << 20, description="Lengths are padded to multiples of it.")
    longest: int | None = Field(default=None, ge=1, description="No length is padded beyond it.")
    value: float = Field(default=0, strict=False, description="What `inputs` are padded with.")

    @property
    def rule(self) -> Padding | None:
        """What is done with each request."""
        if self.mask is None:
            return None
        return Padding(self.mask, self.inputs, self.outputs, self.axis, self.multiple, self.longest, self.value)


class VersionPolicy(_Section):
    """Which versions are in memory beside those that aliases name, or would after one rollback."""

    latest: int | None = Field(
        default=None, ge=1, le=1000, description="So many of the newest; 1 where neither of the next two is given."
    )
    all: bool = Field(default=False, description="All there are.")
    specific: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), strict=False, description="These; retention keeps them, too, and no other goes live unasked."
    )

    def chosen(self, versions: Collection[int]) -> list[int]:
        """Return those it asks for, the newest first."""
        ordered = sorted(versions, reverse=True)
        if self.all:
            return ordered
        return (
            [version for version in ordered if version in self.specific]
            if self.specific
            else ordered[: self.latest or 1]
        )


class Compilation(_Section):
    """What a model is compiled for; changing it compiles the versions in memory again, and then switches to that."""

    device: Device | None = Field(default=None, description="Else the server's `device`.")
    device_memory: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of the device's memory that a version may take at its largest batch; nodes that would go "
        "beyond it run on the processor. Without it as much as is free.",
    )
    precision: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Else the server's `precision`."
    )
    max_batch: Size | None = Field(default=None, description="Largest batch; else the server's `max_batch`.")
    threads: int | None = Field(default=None, ge=1, description="Else, and at most, the server's `threads`.")
    packing: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Tokens of a run at most, in which sequences of different lengths lie one after the other, without "
        "padding (Triton's ragged batches). Without it they are not packed.",
    )

    def options(self, server: BuildOptions) -> BuildOptions:
        """Return the server's options with what is asked for in their place."""
        return BuildOptions(
            self.max_batch or server.max_batch,
            self.precision or server.precision,
            min(self.threads or server.threads, server.threads),
            self.device or server.device,
            self.device_memory or 0,
            self.packing or 0,
        )


class ModelConfig(_Section):
    """One model's configuration."""

    max_batch_size: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="Largest batch; at most what a version is compiled for (`compile.max_batch`). Where a version "
        "cannot have such batches, `config_error` says why. 0: the leading dimension is no batch; each request runs "
        "alone, as it is.",
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="Batches of a version that run at once; at most the server's `workers`."
    )
    compute_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        strict=False,
        description="Share of the workers' time while other models want it, too; alone it may have all. Without it an "
        "equal part of what others were not promised.",
    )
    max_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Memory one version may come to need, counted as for the server's `max_memory`; what needs more is "
        "not loaded (507).",
    )
    latency_target_ms: float | None = Field(
        default=None,
        gt=0,
        strict=False,
        description="From arrival to answer: batches are sized for it; requests it cannot be kept for get 503.",
    )
    label_filename: dict[str, FileName] = Field(
        default={},
        description="By output, the file beside this one that names its classes, one a line, in UTF-8; the "
        "classification extension then answers `value:index:label`. The files are read whenever this one is.",
    )
    dynamic_batching: DynamicBatching = DynamicBatching()
    queue: QueuePolicy = QueuePolicy()
    client_quota: ClientQuota = ClientQuota()
    response_cache: ResponseCaching = ResponseCaching()
    padding: PaddingRules = PaddingRules()
    version_policy: VersionPolicy = VersionPolicy()
    compile: Compilation = Compilation()
    _labels: Labels = PrivateAttr(default_factory=dict)

    @property
    def labels(self) -> Labels:
        """The classes' names, as they were read beside the configuration."""
        return self._labels

    @property
    def batches(self) -> bool:
        """Whether the leading dimension may be a batch."""
        return self.max_batch_size != 0

    @property
    def policy(self) -> BatchPolicy:
        """What the batcher needs of it."""
        batching = self.dynamic_batching
        return BatchPolicy(
            max_rows=self.max_batch_size or None,
            preferred=tuple(sorted(batching.preferred_batch_size)),
            max_delay=batching.max_queue_delay_microseconds / 1e6,
            latency_target=self.latency_target_ms / 1e3 if self.latency_target_ms else None,
            priority_levels=batching.priority_levels,
            default_priority=batching.default_priority_level,
            starvation=batching.starvation_ms / 1e3,
            instances=self.instances,
            compute_share=self.compute_share,
            delay_target=self.queue.delay_target_ms / 1e3 if self.queue.delay_target_ms else None,
            delay_interval=self.queue.delay_interval_ms / 1e3,
        )


def read_config(folder: Path) -> ModelConfig:
    """Read a model's configuration; the defaults where there is no file. Raises BadConfig, OSError."""
    try:
        with (folder / CONFIG).open("rb") as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return ModelConfig()
    if len(content) > _LARGEST:
        raise BadConfig(f"{CONFIG}: expected at most {_LARGEST} bytes, got more")
    document: dict[str, Any] = {}
    try:
        document = tomllib.loads(content.decode())
        config = _checked(ModelConfig(**document))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{CONFIG}: not TOML: {error}") from error
    except ValidationError as error:
        found = mistakes(error.errors(include_url=False), ModelConfig, document)
        raise BadConfig(f"{CONFIG}: {'; '.join(found)}") from error
    config._labels.update({name: _read_labels(folder, name, file) for name, file in config.label_filename.items()})
    return config


def _read_labels(folder: Path, output: str, name: str) -> tuple[bytes, ...]:
    field = f"{CONFIG}: label_filename.{output}: file {name!r}"
    try:
        with (folder / name).open("rb") as file:
            content = file.read(_LARGEST_LABELS + 1)
        content.decode()
    except OSError as error:
        raise BadConfig(f"{field}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"{field}: expected UTF-8, {error.reason} at byte {error.start}") from error
    if len(content) > _LARGEST_LABELS:
        raise BadConfig(f"{field}: expected at most {_LARGEST_LABELS} bytes, got more")
    return tuple(
        content.splitlines()
    )  # of bytes: U+2028 and the like, where text has lines end, may be part of a label


def _checked(config: ModelConfig) -> ModelConfig:
    batching = config.dynamic_batching
    if batching.default_priority_level > batching.priority_levels:
        raise BadConfig(
            f"{CONFIG}: dynamic_batching.default_priority_level: expected at most priority_levels, "
            f"{batching.priority_levels}, got {batching.default_priority_level}"
        )
    if batching.preferred_batch_size and not batching.max_queue_delay_microseconds:
        raise BadConfig(
            f"{CONFIG}: dynamic_batching.preferred_batch_size: expected max_queue_delay_microseconds above 0 with it"
        )
    policy = config.version_policy
    if sum((policy.latest is not None, policy.all, bool(policy.specific))) > 1:
        raise BadConfig(f"{CONFIG}: version_policy: expected one of latest, all and specific")
    return config
