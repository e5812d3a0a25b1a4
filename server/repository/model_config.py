"""`config.toml` beside a model's versions: the settings of one model. All of them are optional.

Names and meaning follow Triton's `config.pbtxt` where it has the setting.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from lathe.core.files import open_plain
from lathe.core.language.generation.options import DRAFT_TOKENS, CacheType, GeneratorOptions
from lathe.core.toml_text import NotToml, parse_toml
from lathe.core.validation_errors import error_messages
from lathe.server.access.quotas import LEAST_RATE, Quota
from lathe.server.batching.padding import PaddingRule
from lathe.server.batching.policy import BatchPolicy
from lathe.server.repository import names
from lathe.server.repository.artifacts import TOKEN_PACKING, BuildOptions
from lathe.server.settings import Device

CONFIG = "config.toml"
_MAX_CONFIG_BYTES = 1 << 16  # bytes
_MAX_LABEL_BYTES = 16 << 20  # bytes of one file

Labels = dict[str, tuple[bytes, ...]]  # output name -> class names, in order
FileName = Annotated[str, Field(pattern=f"^(?:{names.FILE_PATTERN.pattern})$")]
Size = Annotated[int, Field(ge=1, le=4096)]


class BadConfig(ValueError):
    """The file is not a valid configuration; the message names the field."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DynamicBatching(_Section):
    """How requests become batches."""

    preferred_batch_size: tuple[Size, ...] = Field(
        default=(),
        strict=False,
        description="Batch sizes to form: requests wait for the smallest of them, at most for the delay "
        "(`max_queue_delay_microseconds`, which must be above 0). Then requests that fill no preferred size are "
        "batched.",
    )
    max_queue_delay_microseconds: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="Longest time that a request waits to be batched with others although a batch could run.",
    )
    priority_levels: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Number of priorities, of which 1 is the most urgent. 0: all requests are equal.",
    )
    default_priority_level: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Priority of requests that set none, or one that does not exist: from 1 to `priority_levels`. "
        "Required if `priority_levels` is above 0.",
    )
    starvation_ms: float = Field(
        default=1000.0,
        gt=0,
        strict=False,
        description="A request that has waited longer counts as most urgent.",
    )


class QueuePolicy(_Section):
    """Bounds and load shedding of a version's queue."""

    max_queue_size: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of waiting and running requests; default: `LATHE_QUEUE_ITEMS`.",
    )
    max_queue_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of input bytes of waiting and running requests; default: `LATHE_QUEUE_BYTES`.",
    )
    delay_target_ms: float | None = Field(
        default=None,
        gt=0,
        strict=False,
        description="CoDel load shedding: when the queue has not been empty for `delay_interval_ms`, requests that "
        "waited longer than this, and longer than a full batch takes, get 503. Default: no load shedding.",
    )
    delay_interval_ms: float = Field(
        default=100.0,
        gt=0,
        strict=False,
        description="Time without an empty queue after which requests are shed (`delay_target_ms`).",
    )


class ClientQuota(_Section):
    """Rate limit per client for this model, in addition to the server's `client_rate`."""

    rate: float | None = Field(
        default=None,
        ge=LEAST_RATE,
        strict=False,
        description="Rate limit: rows per second of each client; further requests get 429.",
    )
    burst: float | None = Field(
        default=None,
        ge=1,
        strict=False,
        description="Rows that a client may send at once under the rate limit; default: those of one second, at least "
        "one.",
    )

    @property
    def quota(self) -> Quota | None:
        """The quota of each client, None if `rate` is not set."""
        return None if self.rate is None else Quota.of(self.rate, self.burst)


class ResponseCaching(_Section):
    """The response cache: equal requests are answered from memory."""

    max_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of the cache of each version; 0: no cache. A cache suits only deterministic models.",
    )


class PaddingRules(_Section):
    """Padding, so that requests of different lengths share a batch; the model must use a mask."""

    mask: str | None = Field(
        default=None, description="Name of the mask input: 1 for real elements, padded with 0. Default: no padding."
    )
    inputs: tuple[str, ...] = Field(default=(), strict=False, description="Other inputs to pad, with `value`.")
    outputs: tuple[str, ...] = Field(
        default=(), strict=False, description="Outputs to cut back to the request's own length."
    )
    axis: int = Field(default=1, ge=1, le=7, description="Axis to pad and cut.")
    multiple: int = Field(default=16, ge=1, le=1 << 20, description="Lengths are padded to a multiple of this.")
    longest: int | None = Field(
        default=None, ge=1, description="Largest padded length; longer requests are not padded."
    )
    value: float = Field(default=0, strict=False, description="Padding value of `inputs`.")

    @property
    def rule(self) -> PaddingRule | None:
        """The padding rule of the batcher, None without a mask."""
        if self.mask is None:
            return None
        return PaddingRule(self.mask, self.inputs, self.outputs, self.axis, self.multiple, self.longest, self.value)


class VersionPolicy(_Section):
    """The versions kept in memory besides those that aliases name, now or after one rollback."""

    latest: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Keep this many versions in memory: the highest ones that can be loaded. Those that aliases need "
        "stay as well, and may be among them. Default: 1, unless `all` or `specific` is set.",
    )
    all: bool = Field(default=False, description="Keep all versions in memory.")
    specific: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        strict=False,
        description="Versions to keep in memory; those that aliases need stay as well. Retention does not delete the "
        "listed versions, and no other version goes live by itself. At most one of `latest`, `all` and `specific` may "
        "be set.",
    )

    def chosen(self, versions: Collection[int]) -> list[int]:
        """Return those of `versions` that the policy selects, the newest first."""
        ordered = sorted(versions, reverse=True)
        if self.all:
            return ordered
        return (
            [version for version in ordered if version in self.specific]
            if self.specific
            else ordered[: self.latest or 1]
        )


class Compilation(_Section):
    """Compiler options; a change compiles the versions in memory again, then switches to the new code."""

    device: Device | None = Field(default=None, description="Device that the model runs on; default: `LATHE_DEVICE`.")
    device_memory: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of the device's memory that a version may use at its largest batch. What exceeds it waits "
        "in the host's memory between its uses (see docs/gpu.md). Default: all memory of the device.",
    )
    precision: Literal["float32", "bfloat16", "float16", "int8-activations"] | None = Field(
        default=None, description="Precision of products and convolutions; default: `LATHE_PRECISION`."
    )
    max_batch: Size | None = Field(default=None, description="Largest batch; default: `LATHE_MAX_BATCH`.")
    threads: int | None = Field(
        default=None, ge=1, description="Threads per batch; default and maximum: `LATHE_THREADS`."
    )
    packing: int | None = Field(
        default=None,
        ge=0,
        le=1 << 20,
        description="Most tokens of a packed run, in which sequences of different lengths follow one another without "
        f"padding (Triton's ragged batches). 0: no packing. Default: {TOKEN_PACKING} on CPUs for models all of whose "
        "inputs are integers [n, length], if they can be packed, otherwise 0.",
    )

    def options(self, server: BuildOptions) -> BuildOptions:
        """Return the server's options, overridden by those that are set here; the number of threads is never raised."""
        return BuildOptions(
            self.max_batch or server.max_batch,
            self.precision or server.precision,
            min(self.threads or server.threads, server.threads),
            self.device or server.device,
            self.device_memory or 0,
            server.packing if self.packing is None else self.packing,
        )


class Generation(_Section):
    """How a language model generates; a change loads the versions in memory again, then switches to them."""

    speculation: Literal["none", "lookup", "model"] | None = Field(
        default=None,
        description="Where drafts come from, which the model checks in one run: `lookup` takes what followed earlier "
        "in the text, `model` asks the version's draft model. Default: `model` if the version has one, else `none`.",
    )
    draft_tokens: int = Field(
        default=DRAFT_TOKENS, ge=1, le=15, description="Most tokens of a draft; a text that misses gets shorter ones."
    )
    cache_dtype: CacheType = Field(
        default="float32",
        description="Type of the cached keys and values. `int8`, with a scale for each token and head, has room for "
        "nearly four times as many tokens in `LATHE_GENERATION_CACHE`.",
    )

    def options(self, server: GeneratorOptions) -> GeneratorOptions:
        """Return the server's options with those that are set here."""
        return replace(
            server, speculation=self.speculation, draft_tokens=self.draft_tokens, cache_dtype=self.cache_dtype
        )


class ModelConfig(_Section):
    """The configuration of one model."""

    max_batch_size: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="Largest batch, at most `compile.max_batch`. If a version cannot run such batches, `config_error` "
        "gives the reason. 0: the leading dimension is not a batch dimension, and each request runs alone, unchanged.",
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="Batches of a version that may run at once; at most `LATHE_WORKERS`."
    )
    compute_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        strict=False,
        description="Share of the workers' time while other models compete for this time; without competition a model "
        "may use all of it. Models without a share split the rest equally.",
    )
    max_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Most memory that one version may need, counted as for `LATHE_MAX_MEMORY`; a version that needs "
        "more is not loaded (507).",
    )
    latency_target_ms: float | None = Field(
        default=None,
        gt=0,
        strict=False,
        description="Target for the time from arrival to answer. Batches without deadlines are no larger than the "
        "target allows. While other requests wait or run, requests that are expected to miss the target get 503.",
    )
    label_filename: dict[str, FileName] = Field(
        default={},
        description="Table from output names to files beside `config.toml`, which have a class name per line (UTF-8). "
        "The classification extension then answers `value:index:label`. After a change of `config.toml` the "
        "server reads these files again.",
    )
    dynamic_batching: DynamicBatching = DynamicBatching()
    queue: QueuePolicy = QueuePolicy()
    client_quota: ClientQuota = ClientQuota()
    response_cache: ResponseCaching = ResponseCaching()
    padding: PaddingRules = PaddingRules()
    version_policy: VersionPolicy = VersionPolicy()
    compile: Compilation = Compilation()
    generation: Generation = Generation()
    _labels: Labels = PrivateAttr(default_factory=dict)

    @property
    def labels(self) -> Labels:
        """The class names of each output, read from the files of `label_filename`."""
        return self._labels

    @property
    def build(self) -> tuple[Compilation, Generation]:
        """What a version in memory was built with: after a change it is built again."""
        return self.compile, self.generation

    @property
    def batches(self) -> bool:
        """Whether the leading dimension may be a batch dimension: not if `max_batch_size` is 0."""
        return self.max_batch_size != 0

    @property
    def policy(self) -> BatchPolicy:
        """The settings of the batcher, with times in seconds."""
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
    """Read a model's configuration; the defaults if there is no file. Raises BadConfig, OSError."""
    try:
        with open_plain(folder / CONFIG) as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return ModelConfig()
    if len(content) > _MAX_CONFIG_BYTES:
        raise BadConfig(f"{CONFIG}: expected at most {_MAX_CONFIG_BYTES} bytes, got more")
    document: dict[str, Any] = {}
    try:
        document = parse_toml(content)
        config = _check(ModelConfig(**document))
    except NotToml as error:
        raise BadConfig(f"{CONFIG}: not TOML: {error}") from error
    except ValidationError as error:
        found = error_messages(error.errors(include_url=False), ModelConfig, document)
        raise BadConfig(f"{CONFIG}: {'; '.join(found)}") from error
    config._labels.update({name: _read_labels(folder, name, file) for name, file in config.label_filename.items()})
    return config


def _read_labels(folder: Path, output: str, name: str) -> tuple[bytes, ...]:
    field = f"{CONFIG}: label_filename.{output}: file {name!r}"
    try:
        with open_plain(folder / name) as file:
            content = file.read(_MAX_LABEL_BYTES + 1)
        content.decode()
    except OSError as error:
        raise BadConfig(f"{field}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"{field}: expected UTF-8, {error.reason} at byte {error.start}") from error
    if len(content) > _MAX_LABEL_BYTES:
        raise BadConfig(f"{field}: expected at most {_MAX_LABEL_BYTES} bytes, got more")
    return tuple(content.splitlines())  # as bytes: str.splitlines() would also split at U+2028 and the like


def _check(config: ModelConfig) -> ModelConfig:
    batching = config.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    if not min(1, levels) <= default <= levels:  # as in Triton: 0 is no level of a model that has some
        expected = f"a level from 1 to priority_levels, {levels}" if levels else "0 because priority_levels is 0"
        raise BadConfig(f"{CONFIG}: dynamic_batching.default_priority_level: expected {expected}, got {default}")
    if batching.preferred_batch_size and not batching.max_queue_delay_microseconds:
        raise BadConfig(
            f"{CONFIG}: dynamic_batching.preferred_batch_size: expected max_queue_delay_microseconds above 0 with it"
        )
    policy = config.version_policy
    if sum((policy.latest is not None, policy.all, bool(policy.specific))) > 1:
        raise BadConfig(f"{CONFIG}: version_policy: expected one of latest, all and specific")
    return config
