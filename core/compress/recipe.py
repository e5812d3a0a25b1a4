"""Methods of compression as data: tables with a `kind`, read from JSON and TOML, or made in Python.

`lathe quantize`, `lathe.compress` and jobs of kind `compress` read the same tables. A further method is a class below,
and an entry in `Method` and `METHODS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from lathe.core.compress.calibration import Feeds
from lathe.core.compress.channel_pruning import DEFAULTS as CHANNEL_DEFAULTS
from lathe.core.compress.channel_pruning import ChannelPruning, Measure, check_channels, remove_channels
from lathe.core.compress.dynamic import DEFAULTS as DYNAMIC_DEFAULTS
from lathe.core.compress.dynamic import DynamicQuantization, check_dynamic, quantize_dynamic
from lathe.core.compress.mixed import LayerChoice, measure_layers, quantize_within
from lathe.core.compress.products import prepare
from lathe.core.compress.quantize import feeds_of, graph_of
from lathe.core.compress.ranges import Method as RangeMethod
from lathe.core.compress.rounding import DirectRounding, Rounding
from lathe.core.compress.static import DEFAULTS, StaticQuantization, activation_type, calibrate, layers_of
from lathe.core.compress.weight_only import DEFAULTS as WEIGHT_DEFAULTS
from lathe.core.compress.weight_only import Activations, WeightQuantization, check_weights, quantize_weights
from lathe.core.compress.weight_only import Method as WeightMethod
from lathe.core.compress.weight_pruning import DEFAULTS as SPARSITY_DEFAULTS
from lathe.core.compress.weight_pruning import WeightPruning, check_sparsity, prune_weights
from lathe.core.errors import LatheError, UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.section import Section
from lathe.core.validation_errors import error_messages, short_repr

NodeNames = Annotated[tuple[str, ...], Field(strict=False)]  # JSON and TOML have lists
Seed = Annotated[int, Field(ge=0, lt=1 << 32, description="Seed of the rounding `stochastic`.")]


@dataclass(frozen=True)
class Compressed:
    """A compressed graph. `choices` are those of a method that measures each product; empty for other methods."""

    graph: Graph
    choices: Sequence[LayerChoice] = ()


class CompressionMethod(Section):
    """A method of compression and its settings."""

    @property
    def needs_data(self) -> bool:
        """Whether `compress` runs the graph on data."""
        return True

    def check(self, graph: Graph) -> None:
        """UnsupportedError if the method has nothing to change in `graph`, or if a setting does not fit it.

        Also if `graph` computes with integers already.
        Nothing is run.
        """

    def compress(self, graph: Graph, batches: Iterable[Feeds], threads: int | None = None) -> Compressed:
        """Compress a copy of `graph`. `batches` are representative inputs, by name, and are iterated once.

        Errors as in `check`; DataError and FeedError for batches that are missing or do not fit.
        """
        raise NotImplementedError


class _Integers(CompressionMethod):
    """The settings of methods whose products are computed with int8."""

    calibration: RangeMethod = Field(
        default=DEFAULTS.calibration, description="How the range of numbers that 8 bits represent is chosen."
    )
    percentile: float = Field(
        default=DEFAULTS.percentile,
        gt=50,
        le=100,
        description="With the calibration `percentile`: the share of numbers within the range, in percent.",
    )
    activations: Literal["uint8", "int8"] = Field(default="uint8", description="Type of quantized activations.")
    symmetric: bool = Field(default=DEFAULTS.symmetric, description="Ranges with 0 in the middle.")
    per_tensor: bool = Field(
        default=not DEFAULTS.per_channel,
        description="One scale for a tensor of weights, not one for each output channel.",
    )
    smoothing: float = Field(
        default=DEFAULTS.smoothing,
        ge=0,
        lt=1,
        description="Strength of SmoothQuant, which moves outliers of activations into the weights; 0: off.",
    )
    correct_bias: bool = Field(
        default=DEFAULTS.corrects_bias, description="The mean error of rounded weights is taken out of the results."
    )
    rounding: Rounding = Field(
        default=DEFAULTS.rounding, description="Rounding of weights; `adaround` learns it from the data."
    )
    seed: Seed = DEFAULTS.seed
    equalize: bool = Field(
        default=DEFAULTS.equalizes,
        description="The channels between two products get equal ranges in the weights of both.",
    )
    skip: NodeNames = Field(default=(), description="Names of nodes that stay float32.")

    @property
    def options(self) -> StaticQuantization:
        """The choices that `core/compress/static.py` reads."""
        return StaticQuantization(
            self.calibration,
            self.percentile,
            activation_type(self.activations),
            self.symmetric,
            not self.per_tensor,
            self.smoothing,
            self.correct_bias,
            frozenset(self.skip),
            self.rounding,
            self.seed,
            self.equalize,
        )

    def check(self, graph: Graph) -> None:
        layers_of(prepare(graph), self.skip)


class Static(_Integers):
    """Post-training static quantization: all products with constant weights are of int8."""

    kind: Literal["static"] = Field(default="static", description="int8 products by calibration.")
    sensitivity: bool = Field(
        default=False,
        description="Also measure, for each product, the error of the outputs when it alone is quantized, and its "
        "times in both forms. The model is compiled once for each product.",
    )

    def compress(self, graph: Graph, batches: Iterable[Feeds], threads: int | None = None) -> Compressed:
        first: list[Feeds] = []
        calibrated = calibrate(graph, _keeping_first(batches, first), self.options, threads)
        small = calibrated.quantized(calibrated.layers)
        if not self.sensitivity:
            return Compressed(small)
        measured = measure_layers(calibrated, first[0], threads)
        return Compressed(small, [replace(layer, is_quantized=True) for layer in measured])


def _keeping_first(batches: Iterable[Feeds], first: list[Feeds]) -> Iterator[Feeds]:
    """Yield the batches, and put the first one into the empty list `first`: they may not be iterable again."""
    for batch in batches:
        if not first:
            first.append(batch)
        yield batch


class Mixed(_Integers):
    """int8 only for products that are faster so on this machine, within a budget of error."""

    kind: Literal["mixed"] = Field(
        default="mixed", description="int8 products only where they are faster, and within the budget of error."
    )
    budget: float = Field(
        gt=0,
        description="Most root mean square error of each output, relative to its root mean square (0.01: one percent).",
    )

    def compress(self, graph: Graph, batches: Iterable[Feeds], threads: int | None = None) -> Compressed:
        small, choices, _ = quantize_within(graph, list(batches), self.budget, self.options, threads)
        return Compressed(small, choices)


class Dynamic(CompressionMethod):
    """int8 products whose ranges of activations are found in each run, so that no data are needed."""

    kind: Literal["dynamic"] = Field(default="dynamic", description="int8 products with ranges found in each run.")
    per_tensor: bool = Field(
        default=not DYNAMIC_DEFAULTS.per_channel,
        description="One scale for a tensor of weights, not one for each output channel.",
    )
    rounding: DirectRounding = Field(default="nearest", description="Rounding of weights.")
    seed: Seed = DYNAMIC_DEFAULTS.seed
    skip: NodeNames = Field(default=(), description="Names of nodes that stay float32.")

    @property
    def needs_data(self) -> bool:
        return False

    @property
    def options(self) -> DynamicQuantization:
        """The choices that `core/compress/dynamic.py` reads."""
        return DynamicQuantization(not self.per_tensor, self.rounding, self.seed, skip=frozenset(self.skip))

    def check(self, graph: Graph) -> None:
        check_dynamic(graph, self.options)

    def compress(self, graph: Graph, batches: Iterable[Feeds], threads: int | None = None) -> Compressed:
        return Compressed(quantize_dynamic(graph, self.options))


class WeightOnly(CompressionMethod):
    """Large weights of MatMul and Gemm have few bits, and inputs and results stay float32.

    Products may round their inputs to int8 in each run, with `activations`.
    """

    kind: Literal["weight-only"] = Field(default="weight-only", description="Weights of few bits.")
    weights: WeightMethod = Field(
        default=WEIGHT_DEFAULTS.method,
        description="How weights are rounded: `nearest` needs no data, except with the rounding `adaround`; `gptq` "
        "corrects the weights that are left; `awq` rounds the weights of large inputs more finely.",
    )
    bits: Literal[2, 4, 8] = Field(default=4, description="Bits of a weight.")
    block: Literal[0, 16, 32, 64, 128, 256] = Field(
        default=32, description="Adjacent weights of an output that share a scale; 0: all weights of the output."
    )
    symmetric: bool = Field(default=WEIGHT_DEFAULTS.symmetric, description="Codes whose zero point is 0.")
    rounding: Rounding = Field(
        default=WEIGHT_DEFAULTS.rounding,
        description="Rounding of `nearest` and `awq`; `adaround` learns it from the data; `gptq` takes only `nearest`.",
    )
    activations: Activations = Field(
        default=WEIGHT_DEFAULTS.activations,
        description="`int8`: where that is faster, products round their inputs to int8 in each run, with a scale for "
        "each block, but for at most 128 elements of a row.",
    )
    seed: Seed = WEIGHT_DEFAULTS.seed
    skip: NodeNames = Field(default=(), description="Names of nodes that stay float32.")

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        try:
            _ = self.options
        except LatheError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def needs_data(self) -> bool:
        return self.options.needs_data

    @property
    def options(self) -> WeightQuantization:
        """The choices that `core/compress/weight_only.py` reads."""
        return WeightQuantization(
            self.bits,
            self.block,
            self.symmetric,
            self.weights,
            self.rounding,
            self.seed,
            skip=frozenset(self.skip),
            activations=self.activations,
        )

    def check(self, graph: Graph) -> None:
        check_weights(graph, self.options)

    def compress(self, graph: Graph, batches: Iterable[Feeds], threads: int | None = None) -> Compressed:
        return Compressed(quantize_weights(graph, self.options, batches if self.needs_data else (), threads))


class Channels(CompressionMethod):
    """Structured pruning: channels of layers and heads of attention are removed, with all that depends on them."""

    kind: Literal["channels"] = Field(default="channels", description="Fewer channels of each layer.")
    share: float = Field(
        default=CHANNEL_DEFAULTS.share, gt=0, lt=1, description="Share of the channels of each layer that is removed."
    )
    measure: Measure = Field(
        default=CHANNEL_DEFAULTS.measure,
        description="The channels of the least sum of magnitudes (`l1`) or squares (`l2`) of their weights go.",
    )
    multiple: int = Field(
        default=CHANNEL_DEFAULTS.multiple, ge=1, description="The number of channels that stay is a multiple of this."
    )
    skip: NodeNames = Field(default=(), description="Names of nodes that keep their channels.")

    @property
    def needs_data(self) -> bool:
        return False

    @property
    def options(self) -> ChannelPruning:
        """The choices that `core/compress/channel_pruning.py` reads."""
        return ChannelPruning(self.share, self.measure, self.multiple, frozenset(self.skip))

    def check(self, graph: Graph) -> None:
        check_channels(graph, self.options)

    def compress(self, graph: Graph, batches: Iterable[Feeds], threads: int | None = None) -> Compressed:
        return Compressed(remove_channels(graph, self.options)[0])


class Zeros(CompressionMethod):
    """Unstructured pruning: the smallest weights become 0. The file becomes smaller only when it is packed."""

    kind: Literal["zeros"] = Field(default="zeros", description="The smallest weights become 0.")
    sparsity: float = Field(
        default=SPARSITY_DEFAULTS.sparsity,
        gt=0,
        lt=1,
        description="Share of zeros; patterns `N:M` ignore it: `2:4` has half zeros.",
    )
    pattern: str = Field(
        default=SPARSITY_DEFAULTS.pattern,
        description="`element`; `2:4`: two of four consecutive inputs of an output stay; `4x1`: blocks of four inputs.",
    )
    together: bool = Field(
        default=SPARSITY_DEFAULTS.is_global,
        description="The sparsity is that of all products together, not of each one.",
    )
    skip: NodeNames = Field(default=(), description="Names of nodes whose weights stay.")

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        try:
            _ = self.options
        except LatheError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def needs_data(self) -> bool:
        return False

    @property
    def options(self) -> WeightPruning:
        """The choices that `core/compress/weight_pruning.py` reads."""
        return WeightPruning(self.sparsity, self.pattern, self.together, skip=frozenset(self.skip))

    def check(self, graph: Graph) -> None:
        check_sparsity(graph, self.options)

    def compress(self, graph: Graph, batches: Iterable[Feeds], threads: int | None = None) -> Compressed:
        return Compressed(prune_weights(graph, self.options)[0])


Method: TypeAlias = Annotated[Static | Mixed | Dynamic | WeightOnly | Channels | Zeros, Field(discriminator="kind")]
METHODS: Mapping[str, type[CompressionMethod]] = {
    "static": Static,
    "mixed": Mixed,
    "dynamic": Dynamic,
    "weight-only": WeightOnly,
    "channels": Channels,
    "zeros": Zeros,
}


def method_from_values(values: Mapping[str, Any]) -> CompressionMethod:
    """A method from a table such as `{"kind": "static", "smoothing": 0.5}`, as JSON or TOML gives it.

    UnsupportedError names every field that is not valid.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in METHODS:
        raise UnsupportedError(f"kind: expected one of {', '.join(METHODS)}, got {short_repr(kind)}")
    table = METHODS[kind]
    try:
        return table.model_validate_json(json.dumps(values))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise UnsupportedError(f"expected text, numbers, booleans, lists and tables: {error}") from None
        messages = error_messages(error.errors(include_url=False), table, values)
        raise UnsupportedError("; ".join(messages)) from None


def compress(
    model: Graph | str | os.PathLike[str] | bytes,
    method: CompressionMethod | Mapping[str, Any],
    data: Mapping[str, NDArray[np.generic]] | Iterable[Feeds] = (),
    batch: int = 32,
    threads: int | None = None,
) -> Graph:
    """A copy of `model` (a graph, a path to an ONNX file, or its bytes), compressed by `method`.

    `method` is an object of this module (one of `METHODS`) or the same as a table:
    `{"kind": "static", "calibration": "mse"}`. `data`, `batch` and `threads` are as in `quantize`; methods that need no
    data ignore them.

    ModelError if the model is not valid; OSError if its file cannot be read; UnsupportedError for an invalid method or
    `batch`, and for a model in which the method has nothing to change, or which computes with integers already;
    DataError and FeedError for data that are missing or do not fit.
    """
    chosen = method if isinstance(method, CompressionMethod) else method_from_values(method)
    graph = graph_of(model)
    return chosen.compress(graph, feeds_of(graph, data, batch), threads).graph
