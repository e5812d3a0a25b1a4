"""Random programs over matrices [3, 4] that both Lathe and PyTorch can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.terms import Term, Writer

INPUTS, LENGTH, SHAPE = 3, 12, (3, 4)


@dataclass(frozen=True)
class Instruction:
    """An operation on two earlier matrices, numbered `left` and `right`; the inputs have the first numbers."""

    name: str
    left: int
    right: int


def program(seed: int) -> list[Instruction]:
    rng = np.random.default_rng(seed)
    names = list(VOCABULARY)
    return [
        Instruction(names[int(rng.integers(len(names)))], *(int(at) for at in rng.integers(0, INPUTS + i, 2)))
        for i in range(LENGTH)
    ]


def given(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"x{i}": rng.uniform(-1, 1, SHAPE) for i in range(INPUTS)}


def run(instructions: Sequence[Instruction], inputs: Sequence[Any], vocabulary: dict[str, Callable[..., Any]]) -> Any:
    """The sum of the last two matrices of a program, run on any kind of matrices."""
    known = list(inputs)
    for each in instructions:
        known.append(vocabulary[each.name](known[each.left], known[each.right]))
    return known[-1] + known[-2]


def written(seed: int) -> Graph:
    graph = Graph("random")
    writer = Writer(graph)
    inputs = [writer.input(f"x{i}", TensorType(DType.FLOAT64, SHAPE)) for i in range(INPUTS)]
    graph.outputs = [run(program(seed), inputs, VOCABULARY).value]
    return graph


def _normalized(a: Term, b: Term) -> Term:
    ones = a.writer.fill(1, a.dtype, SHAPE[1:])
    return a.op("LayerNormalization", ones, axis=-1) * b


def _picked(a: Term, b: Term) -> Term:
    rows = a.writer.array(np.array([2, 0, 2]))
    return a.gather(rows) * b


def _convolved(a: Term, b: Term) -> Term:
    """A 1-D convolution of three channels (the rows) of four positions, with a window of one position."""
    image, window = a.unsqueeze(0), b.slice(1, 0, 3).unsqueeze(2)
    return image.op("Conv", window).reshape(SHAPE).op("Tanh")


VOCABULARY: dict[str, Callable[[Term, Term], Term]] = {
    "tanh of product": lambda a, b: (a * b).op("Tanh"),
    "sigmoid and sum": lambda a, b: a.op("Sigmoid") + b,
    "sine of matrix product": lambda a, b: (a @ b.swap() @ a).op("Sin"),
    "softmax of rows": lambda a, b: a.op("Softmax", axis=-1) * b,
    "logsoftmax of columns": lambda a, b: a.op("LogSoftmax", axis=0) - b,
    "less its mean": lambda a, b: a - b.mean([1]),
    "turned and divided": lambda a, b: a.reshape((4, 3)).swap() / (b.square() + 1),
    "cut and joined": lambda a, b: a.slice(0, 0, 2).op("Concat", b.slice(0, 2, 3), axis=0),
    "gelu": lambda a, b: a.op("Gelu") - b * 0.3,
    "chosen": lambda a, b: (a < b).where(a * 2, b),
    "bell": lambda a, b: (-a.square()).exp() * b,
    "root": lambda a, b: (a.square() + 1).sqrt() - b.op("Erf"),
    "running sum": lambda a, b: a.op("CumSum", a.writer.array(1)).op("Cos") + b,
    "sum of powers": lambda a, b: a.op("ReduceLogSumExp", axes=(1,), keepdims=1) * b,
    "normalized": _normalized,
    "picked": _picked,
    "padded": lambda a, b: a.pad([(1, 0), (0, 0)]).slice(0, 0, 3) * b,
    "convolved": _convolved,
}
