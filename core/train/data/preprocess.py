"""Preprocessing as the first nodes of the model's graph.

So the served model takes raw values, and its preprocessing cannot differ from that of the training.

ready = plan([Scale(factor=1 / 255)], examples, split.train)
model = architecture(settings, ready.rows, outputs)            # takes float32, channels first
graph = ready.write(model)                                     # takes rows of the types in `examples.inputs`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import Field

from lathe.core.errors import DataError
from lathe.core.ir.graph import SHAPE_ONLY_OPS, Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.reference import interpret
from lathe.core.section import Section
from lathe.core.train.data.dataset import Column, Row, Rows, Values
from lathe.core.train.data.examples import Examples
from lathe.core.train.data.moments import Moments

SCOPE = "preprocess."  # prefix of the names of its constants, which are never trained

_Numbers: TypeAlias = Annotated[tuple[float, ...], Field(strict=False)]
_TOKENS = (DType.INT32, DType.INT64)
_CHUNK_BYTES = 16 << 20


class Step(Section):
    """The base class of preprocessing steps."""

    input: str | None = Field(default=None, description="Input to preprocess; by default all inputs.")

    def emit(self, x: Term) -> Term:
        """Write the step's nodes for `x`, float32 [N, ...], images channels first; returns their result."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `emit`")


class Scale(Step):
    """x * factor + offset."""

    kind: Literal["scale"] = Field(default="scale", description="x * factor + offset.")
    factor: float = Field(default=1.0, description="Factor of all numbers.")
    offset: float = Field(default=0.0, description="Number that is added afterwards.")

    def emit(self, x: Term) -> Term:
        x = x if self.factor == 1 else x * _constant(x, np.float32(self.factor), "factor")
        return x if self.offset == 0 else x + _constant(x, np.float32(self.offset), "offset")


class Standardize(Step):
    """(x - mean) / deviation, per channel of images with channels, per number of flat rows, otherwise one for all.

    Mean and standard deviation are by default those of the training rows.
    """

    kind: Literal["standardize"] = Field(
        default="standardize",
        description="(x - mean) / deviation. Images with channels have a mean and a deviation for each channel. Flat "
        "rows (one axis) have them for each number. All other rows have one mean and one deviation for all values.",
    )
    mean: _Numbers | None = Field(
        default=None,
        description="A list of one number for all values, or of one number per channel or per number of a flat row; by "
        "default the means of the training rows.",
    )
    deviation: _Numbers | None = Field(
        default=None,
        description="As `mean`; by default the standard deviations of the training rows.",
    )

    def emit(self, x: Term) -> Term:
        deviation = _broadcast_constant(x, self.deviation or (1.0,), "deviation")
        return (x - _broadcast_constant(x, self.mean or (0.0,), "mean")) / deviation

    def with_statistics(self, moments: Moments) -> Standardize:
        """The step with missing statistics taken from `moments`. A deviation of 0 is replaced by 1."""
        deviation = np.where(moments.deviation > 0, moments.deviation, 1.0)
        mean = tuple(moments.mean.tolist()) if self.mean is None else self.mean
        given = tuple(deviation.tolist()) if self.deviation is None else self.deviation
        return Standardize(input=self.input, mean=mean, deviation=given)


class Resize(Step):
    """Resizes images with bilinear interpolation."""

    kind: Literal["resize"] = Field(default="resize", description="Resize images with bilinear interpolation.")
    height: int = Field(ge=1, le=8192, description="Height in pixels.")
    width: int = Field(ge=1, le=8192, description="Width in pixels.")

    def emit(self, x: Term) -> Term:
        sizes = (self.height, self.width)
        axes = (x.rank - 2, x.rank - 1)
        return x.op("Resize", None, None, None, sizes=sizes, axes=axes, mode="linear")


Preprocess: TypeAlias = Annotated[Scale | Standardize | Resize, Field(discriminator="kind")]


@dataclass(frozen=True)
class Plan:
    """Preprocessing steps with known statistics, by input.

    `raw` are the types of the raw rows by input; `rows` are those of the preprocessed rows, which the model takes.
    """

    raw: Mapping[str, Column]
    steps: Mapping[str, tuple[Step, ...]]

    @property
    def rows(self) -> dict[str, Column]:
        return {name: _graph_of(column, self.steps[name])[1] for name, column in self.raw.items()}

    def write(self, model: Graph) -> Graph:
        """A copy of `model` with the preprocessing in front of it, so that it takes raw rows.

        Inputs of the model that `raw` does not name stay as they are.
        """
        graph = Graph(model.name)
        writer = Writer(graph)
        arguments = []
        for value in model.inputs:
            writer.scope = ""
            column = self.raw.get(value.name)
            type_ = value.tensor if column is None else TensorType(column.dtype, (value.shape[0], *column.shape))
            given = writer.input(value.name, type_)
            writer.scope = f"{SCOPE}{value.name}."
            arguments.append((given if column is None else _emit(given, column, self.steps[value.name])).value)
        writer.scope = ""
        graph.outputs = writer.inline(model, arguments)
        return graph


def plan(steps: Sequence[Step], examples: Examples, rows: Rows) -> Plan:
    """The plan for these steps, with missing means and deviations measured on `rows`, the training rows.

    DataError for a step of an input that does not exist, or for steps that do not fit together.
    """
    for step in steps:
        if step.input is not None and step.input not in examples.inputs:
            known = ", ".join(examples.inputs)
            message = f"preprocess: expected an input of {known}, got '{step.input}'"
            raise DataError(message, file=examples.dataset.name)
    own = {name: [step for step in steps if step.input in (None, name)] for name in examples.inputs}
    ready = Plan(examples.inputs, {name: _with_statistics(own[name], examples, name, rows) for name in own})
    _ = ready.rows  # raises DataError for steps that do not fit together
    return ready


def taking(model: Graph, rows: Mapping[str, Row]) -> Graph:
    """A copy of the model whose inputs have the element types in `rows`; inputs that are not named there keep theirs.

    So augmented pixels can be float32 in training and uint8 in serving. DataError if a changed input is used by
    anything but casts and operators that read its shape.
    """
    copy = model.clone()
    uses = copy.uses()
    for value in copy.inputs:
        row = rows.get(value.name)
        if row is None or row.dtype is value.dtype:
            continue
        any_type = {"Cast", *SHAPE_ONLY_OPS}
        if any(node.op not in any_type for node in uses.get(value, ())) or value in copy.outputs:
            raise DataError(f"input '{value.name}': the model takes {value.dtype} only, got {row.dtype}")
        value.type = TensorType(row.dtype, value.shape)
    return copy


def _with_statistics(steps: Sequence[Step], examples: Examples, name: str, rows: Rows) -> tuple[Step, ...]:
    column = examples.inputs[name]
    done: tuple[Step, ...] = ()
    for step in steps:
        if isinstance(step, Standardize) and (step.mean is None or step.deviation is None):
            step = step.with_statistics(_moments(examples, name, column, done, rows))
        done = (*done, step)
    return done


def _moments(examples: Examples, name: str, column: Column, before: tuple[Step, ...], rows: Rows) -> Moments:
    """Mean and deviation of the given rows of input `name` after the steps `before`, per channel or number."""
    graph, after = _graph_of(column, before)
    moments = Moments()
    chunk = max(_CHUNK_BYTES // max(column.row_bytes, 1), 1)
    for start in range(0, len(rows), chunk):
        raw = examples.features[name].take(examples.dataset, rows[start : start + chunk])
        (values,) = interpret(graph, {name: raw}).values() if graph.nodes else (raw,)
        moments.add(_per_statistic(values, after))
    return moments


def _per_statistic(values: Values, column: Column) -> Values:
    """Values as [samples, statistics], with one statistic per channel of CHW images, or per number of flat rows.

    Rows of any other shape have a single statistic for all values.
    """
    if column.layout == "CHW":
        return np.moveaxis(values, 1, -1).reshape(-1, values.shape[1])
    return values.reshape(len(values), -1) if len(column.shape) == 1 else values.reshape(-1, 1)


def _graph_of(column: Column, steps: Sequence[Step]) -> tuple[Graph, Column]:
    """The preprocessing of an input of type `column` as a graph of its own, and the type of its result."""
    graph = Graph(SCOPE.rstrip("."))
    raw = Writer(graph).input(column.name, TensorType(column.dtype, (symbol("n"), *column.shape)))
    result = _emit(raw, column, steps)
    graph.outputs = [result.value]
    shape = tuple(int(size) for size in result.shape[1:] if isinstance(size, int))
    layout = "CHW" if column.layout == "HWC" else column.layout
    return graph, replace(column, dtype=result.dtype, shape=shape, layout=layout)


def _emit(x: Term, column: Column, steps: Sequence[Step]) -> Term:
    """Write the preprocessing of `x`, rows of type `column`: cast to float32, channels first, then the steps.

    Tokens (int32 or int64 of rank 0 or 1 per row, without steps) and text are not cast. DataError for a resize of rows
    that are no images.
    """
    tokens = column.dtype in _TOKENS and len(column.shape) < 2 and not steps
    x = x if tokens or column.dtype is DType.STRING else x.cast(DType.FLOAT32)
    x = x.transpose(0, 3, 1, 2) if column.layout == "HWC" else x
    for step in steps:
        if isinstance(step, Resize) and not column.layout:
            raise DataError(f"resize: expected an input of images, got '{column.name}' {column}")
        x = step.emit(x)
    return x


def _broadcast_constant(x: Term, numbers: Sequence[float], name: str) -> Term:
    """A constant that broadcasts to `x`: one number, or one per channel of [N, C, H, W] or per number of [N, k].

    DataError for another count of `numbers`.
    """
    if len(numbers) != 1 and (x.rank not in (2, 4) or len(numbers) != x.shape[1]):
        rows = ", ".join(map(str, x.shape[1:]))
        raise DataError(f"standardize: {name}: expected 1 number or 1 per channel of [{rows}], got {len(numbers)}")
    shape = () if len(numbers) == 1 else (-1,) + (1,) * (x.rank - 2)
    return _constant(x, np.array(numbers, np.float32).reshape(shape), name)


def _constant(x: Term, array: object, name: str) -> Term:
    return x.writer.array(array, name=f"{x.writer.scope}{name}")
