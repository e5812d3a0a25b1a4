"""State shared by all graphs of one model: its opset, its cases, its random numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import onnx

from tests.fuzz.graphs.evaluate import Evaluator
from tests.fuzz.graphs.values import Item

if TYPE_CHECKING:
    from tests.fuzz.graphs.grower import Grower


class Disguise(Protocol):
    """Changes how operands are computed: see `tests.fuzz.graphs.operand_forms`."""

    def wanted(self, f: Grower, op: str, inputs: int) -> bool: ...

    def inputs(self, f: Grower, op: str, inputs: Sequence[Item | None]) -> Sequence[Item | None]: ...


@dataclass
class SharedState:
    """The state that all graphs and bodies of a model share."""

    rng: random.Random
    numbers: np.random.Generator
    opset: int
    cases: list[dict[str, int]]
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    count: int = 0
    rowwise: bool = False  # nodes that read rows must return rows: most of these models can be batched
    settled: bool = False  # conditions do not depend on the inputs, so that rows stay independent
    hidden: str = ""  # values of unknown rank give "extents", or "numbers" from all their elements
    refused: Counter[str] = field(default_factory=Counter)

    disguise: Disguise | None = None

    def __post_init__(self) -> None:
        self.alive = list(range(len(self.cases)))
        self.evaluator = Evaluator(self.opset, self.functions)

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"
