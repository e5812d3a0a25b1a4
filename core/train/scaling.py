"""Loss scaling: float16 cannot hold small gradients, so those of a loss many times as large are computed.

The factor is dynamic (P. Micikevicius et al., 2018, "Mixed Precision Training"), by the arithmetic of PyTorch's
`torch.amp.GradScaler`: an update whose gradients are not all finite is skipped, and the factor falls; after some
updates without such a one it rises. Factor and counters are state of the step, and its graph takes the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from core.ir.graph import State, Value
from core.ir.types import DType, TensorType
from core.ops.terms import Term, Writer

SCALE, GOOD, SKIPPED = "loss_scale", "loss_scale.good", "loss_scale.skipped"
_NEXT = ".next"


@dataclass(frozen=True)
class LossScaling:
    """The factor begins as `initial`, is multiplied by `growth` after `interval` good updates in a row, and by
    `backoff` after each that had to be skipped."""

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        """ValueError for factors that go the wrong way."""
        finite = 0 < self.initial < inf and 1 < self.growth < inf
        if not (finite and 0 < self.backoff < 1 and self.interval >= 1):
            raise ValueError(f"{self}, expected initial > 0, growth > 1, 0 < backoff < 1 and interval >= 1")


DYNAMIC = LossScaling()


class Scaler:
    """Writes the scaling of one step: `scaled`, then `unscaled` and `are_fine`, then `guard`."""

    def __init__(self, writer: Writer, settings: LossScaling) -> None:
        self.writer, self.settings = writer, settings
        self.scale = self._state(SCALE, np.float32(settings.initial))
        self.good = self._state(GOOD, np.int64(0))  # updates since the factor last changed
        self.skipped = self._state(SKIPPED, np.int64(0))  # updates

    @property
    def outputs(self) -> dict[str, Term]:
        """The factor and the number of skipped updates after this run: float32 and int64, of rank 0."""
        states = {SCALE: self.scale, SKIPPED: self.skipped}
        return {name + _NEXT: Term(self.writer, state.update) for name, state in states.items()}

    def scaled(self, loss: Term) -> Term:
        return loss * self._term(self.scale)

    def unscaled(self, slopes: Sequence[Term]) -> list[Term]:
        """The gradients of the loss, from those of the scaled one; what was too large stays infinite, or no number."""
        factor = 1.0 / self._term(self.scale)
        return [slope * factor for slope in slopes]

    def are_fine(self, slopes: Sequence[Term]) -> Term:
        """Whether all gradients, scaled or not, are finite: their sizes add up to something finite."""
        sizes = [slope.op("ReduceL1", axes=tuple(range(slope.rank)), keepdims=0) for slope in slopes]
        return sizes[0].op("Sum", *sizes[1:]) < inf

    def guard(self, fine: Term, moved: Sequence[State]) -> None:
        """States only move where gradients are fine."""
        for state in moved:
            state.update = fine.where(Term(self.writer, state.update), self._term(state)).value

    def count(self, fine: Term) -> None:
        """There was an update, made or skipped."""
        settings, scale = self.settings, self._term(self.scale)
        good, skipped = self._term(self.good) + 1, self._term(self.skipped)
        full = good >= settings.interval
        larger = scale * settings.growth
        grown = (full.op("And", larger < inf)).where(larger, scale)
        self.scale.update = fine.where(grown, scale * settings.backoff).value
        self.good.update = fine.where(full.where(0, good), 0).value
        self.skipped.update = fine.where(skipped, skipped + 1).value

    def _term(self, state: State) -> Term:
        return Term(self.writer, state.value)

    def _state(self, name: str, initial: Any) -> State:
        array = np.array(initial)
        value = Value(self.writer.fresh(name), TensorType(DType.from_numpy(array.dtype), ()))
        state = State(value, value, array)
        self.writer.graph.states.append(state)
        return state
