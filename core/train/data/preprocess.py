"""Preprocessing inside the model: the first nodes of its graph make what it learns from out of what the data hold.

So the served model takes raw values, and what is served cannot differ from what was trained.

ready = plan([Scale(factor=1 / 255)], examples, split.train)
model = architecture(settings, ready.rows, outputs)            # takes float32, channels first
graph = ready.write(model)                                     # takes what `examples.inputs` says
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import Field

from core.errors import DataError
from core.ir.graph import Graph
from core.ir.types import DType, TensorType, symbol
from core.ops.terms import Term, Writer
from core.reference import interpret
from core.train.data.dataset import Column, Row, Rows, Values
from core.train.data.examples import Examples
from core.train.data.moments import Moments
from core.train.section import Section

SCOPE = "preprocess."  # what the names of its constants begin with: training leaves them alone

_Numbers: TypeAlias = Annotated[tuple[float, ...], Field(strict=False)]
_TOKENS = (DType.INT32, DType.INT64)
_CHUNK_BYTES = 16 << 20


class Step(Section):
    """Family base."""

    input: str | None = Field(default=None, description="The input it is for; without it, all.")

    def emit(self, x: Term) -> Term:
        """The step's nodes behind x, float32 [N, ...], images channels first."""
        raise NotImplementedError(f"{type(self).__name__} does nothing")


class Scale(Step):
    """x * factor + offset."""

    kind: Literal["scale"] = Field(default="scale", description="x * factor + offset.")
    factor: float = Field(default=1.0, description="What numbers are multiplied by.")
    offset: float = Field(default=0.0, description="What is added afterwards.")

    def emit(self, x: Term) -> Term:
        x = x if self.factor == 1 else x * _constant(x, np.float32(self.factor), "factor")
        return x if self.offset == 0 else x + _constant(x, np.float32(self.offset), "offset")


class Standardize(Step):
    """(x - mean) / deviation, per channel of images, else per number of a row; from the training rows unless given."""

    kind: Literal["standardize"] = Field(
        default="standardize", description="(x - mean) / deviation, per channel or number."
    )
    mean: _Numbers | None = Field(
        default=None, description="One number, or one per channel; without it the training rows'."
    )
    deviation: _Numbers | None = Field(default=None, description="Likewise.")

    def emit(self, x: Term) -> Term:
        deviation = _spread(x, self.deviation or (1.0,), "deviation")
        return (x - _spread(x, self.mean or (0.0,), "mean")) / deviation

    def fitted(self, moments: Moments) -> Standardize:
        """With the statistics that are not given. A number that never changes keeps deviation 1."""
        deviation = np.where(moments.deviation > 0, moments.deviation, 1.0)
        mean = tuple(moments.mean.tolist()) if self.mean is None else self.mean
        given = tuple(deviation.tolist()) if self.deviation is None else self.deviation
        return Standardize(input=self.input, mean=mean, deviation=given)


class Resize(Step):
    """Images at another size, linear between pixels."""

    kind: Literal["resize"] = Field(default="resize", description="Images at another size, linear between pixels.")
    height: int = Field(ge=1, le=8192, description="Rows of pixels.")
    width: int = Field(ge=1, le=8192, description="Columns of pixels.")

    def emit(self, x: Term) -> Term:
        sizes = (self.height, self.width)
        axes = (x.rank - 2, x.rank - 1)
        return x.op("Resize", None, None, None, sizes=sizes, axes=axes, mode="linear")


Preprocess: TypeAlias = Annotated[Scale | Standardize | Resize, Field(discriminator="kind")]


@dataclass(frozen=True)
class Plan:
    """Steps, their statistics known, for each input: `raw` is what comes in, `rows` what the model behind sees."""

    raw: Mapping[str, Column]
    steps: Mapping[str, tuple[Step, ...]]

    @property
    def rows(self) -> dict[str, Column]:
        return {name: _written(column, self.steps[name])[1] for name, column in self.raw.items()}

    def write(self, model: Graph) -> Graph:
        """A model that takes the raw inputs; `model` is left as it is. Its other inputs stay."""
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
    """Find the statistics that the steps need: those of `rows`, which are the training's.

    DataError for steps of an input that does not exist, or that cannot follow each other.
    """
    for step in steps:
        if step.input is not None and step.input not in examples.inputs:
            known = ", ".join(examples.inputs)
            message = f"preprocess: there is no input '{step.input}', only {known}"
            raise DataError(message, file=examples.dataset.name)
    own = {name: [step for step in steps if step.input in (None, name)] for name in examples.inputs}
    ready = Plan(examples.inputs, {name: _fitted(own[name], examples, name, rows) for name in own})
    _ = ready.rows  # steps that do not fit each other are refused now
    return ready


def taking(model: Graph, rows: Mapping[str, Row]) -> Graph:
    """The model with other element types of its inputs, where it begins by casting them: augmented pixels are float32
    while training, and uint8 when served. DataError where it does not."""
    copy = model.clone()
    uses = copy.uses()
    for value in copy.inputs:
        row = rows.get(value.name)
        if row is None or row.dtype is value.dtype:
            continue
        if any(node.op != "Cast" for node in uses.get(value, ())) or value in copy.outputs:
            raise DataError(f"input '{value.name}' is {value.dtype}, and the model cannot take {row.dtype} instead")
        value.type = TensorType(row.dtype, value.shape)
    return copy


def _fitted(steps: Sequence[Step], examples: Examples, name: str, rows: Rows) -> tuple[Step, ...]:
    column = examples.inputs[name]
    done: tuple[Step, ...] = ()
    for step in steps:
        if isinstance(step, Standardize) and (step.mean is None or step.deviation is None):
            step = step.fitted(_moments(examples, name, column, done, rows))
        done = (*done, step)
    return done


def _moments(examples: Examples, name: str, column: Column, before: tuple[Step, ...], rows: Rows) -> Moments:
    """Mean and deviation of the rows as they are after the steps before."""
    graph, after = _written(column, before)
    moments = Moments()
    chunk = max(_CHUNK_BYTES // max(column.row_bytes, 1), 1)
    for start in range(0, len(rows), chunk):
        raw = examples.features[name].take(examples.dataset, rows[start : start + chunk])
        (values,) = interpret(graph, {name: raw}).values() if graph.nodes else (raw,)
        moments.add(_by_channel(values, after))
    return moments


def _by_channel(values: Values, column: Column) -> Values:
    """[samples, numbers], of each of which there is one statistic: a channel, a number of a row, or everything."""
    if column.layout == "CHW":
        return np.moveaxis(values, 1, -1).reshape(-1, values.shape[1])
    return values.reshape(len(values), -1) if len(column.shape) == 1 else values.reshape(-1, 1)


def _written(column: Column, steps: Sequence[Step]) -> tuple[Graph, Column]:
    """The steps as a graph of their own, and the column that comes out."""
    graph = Graph(SCOPE.rstrip("."))
    raw = Writer(graph).input(column.name, TensorType(column.dtype, (symbol("n"), *column.shape)))
    result = _emit(raw, column, steps)
    graph.outputs = [result.value]
    shape = tuple(int(size) for size in result.shape[1:] if isinstance(size, int))
    layout = "CHW" if column.layout == "HWC" else column.layout
    return graph, replace(column, dtype=result.dtype, shape=shape, layout=layout)


def _emit(x: Term, column: Column, steps: Sequence[Step]) -> Term:
    """Numbers as float32 (but tokens stay whole numbers), channels first, then the steps."""
    tokens = column.dtype in _TOKENS and len(column.shape) < 2 and not steps
    x = x if tokens or column.dtype is DType.STRING else x.cast(DType.FLOAT32)
    x = x.transpose(0, 3, 1, 2) if column.layout == "HWC" else x
    for step in steps:
        if isinstance(step, Resize) and not column.layout:
            raise DataError(f"resize: input '{column.name}' is {column}, which is no image")
        x = step.emit(x)
    return x


def _spread(x: Term, numbers: Sequence[float], name: str) -> Term:
    """A constant beside x: one number, one per channel of [N, C, H, W], or one per number of [N, k]."""
    if len(numbers) != 1 and (x.rank not in (2, 4) or len(numbers) != x.shape[1]):
        rows = ", ".join(map(str, x.shape[1:]))
        raise DataError(f"standardize: {len(numbers)} numbers as {name}, expected one, or one per channel of [{rows}]")
    shape = () if len(numbers) == 1 else (-1,) + (1,) * (x.rank - 2)
    return _constant(x, np.array(numbers, np.float32).reshape(shape), name)


def _constant(x: Term, array: object, name: str) -> Term:
    return x.writer.array(array, name=f"{x.writer.scope}{name}")
