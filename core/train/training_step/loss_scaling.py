"""Loss scaling: multiplies the loss by a large factor, so that small gradients do not underflow in float16.

The factor is dynamic (P. Micikevicius et al., 2018, "Mixed Precision Training"), with the arithmetic of PyTorch's
`torch.amp.GradScaler`. An update whose gradients are not all finite is skipped, and the factor is reduced. After a
number of good updates in a row the factor grows. The factor and the counters are state of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from lathe.core.ir.graph import State, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.terms import Term, Writer

SCALE, GOOD_UPDATES, SKIPPED = "loss_scale", "loss_scale.good", "loss_scale.skipped"
_NEXT = ".next"


@dataclass(frozen=True)
class LossScaling:
    """How the factor of the loss changes; defaults are those of `torch.amp.GradScaler`.

    The factor begins as `initial`. `interval` good updates in a row multiply it by `growth`, unless it would become
    infinite; a skipped update multiplies it by `backoff`.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        """ValueError for numbers out of range."""
        finite = 0 < self.initial < inf and 1 < self.growth < inf
        if not (finite and 0 < self.backoff < 1 and self.interval >= 1):
            raise ValueError(f"{self}, expected initial > 0, growth > 1, 0 < backoff < 1 and interval >= 1")


DYNAMIC_SCALING = LossScaling()


class Scaler:
    """Writes the loss scaling of one step.

    Call `scale_loss`, then `unscale` and `are_finite`, then `guard` and `count`.
    """

    def __init__(self, writer: Writer, settings: LossScaling) -> None:
        self.writer, self.settings = writer, settings
        self.scale = self._state(SCALE, np.float32(settings.initial))
        self.good = self._state(GOOD_UPDATES, np.int64(0))  # updates since the factor last changed
        self.skipped = self._state(SKIPPED, np.int64(0))  # updates

    @property
    def outputs(self) -> dict[str, Term]:
        """The factor and the number of skipped updates after this run, by name: float32 and int64, of rank 0.

        Valid only after `count`.
        """
        states = {SCALE: self.scale, SKIPPED: self.skipped}
        return {name + _NEXT: Term(self.writer, state.update) for name, state in states.items()}

    def scale_loss(self, loss: Term) -> Term:
        return loss * self._term(self.scale)

    def unscale(self, gradients: Sequence[Term]) -> list[Term]:
        """The gradients of the loss from those of the scaled loss. Gradients that overflowed stay infinite or NaN."""
        factor = 1.0 / self._term(self.scale)
        return [gradient * factor for gradient in gradients]

    def are_finite(self, gradients: Sequence[Term]) -> Term:
        """bool, rank 0: whether the sum of the L1 norms of all gradients, scaled or not, is finite."""
        sizes = [gradient.op("ReduceL1", axes=tuple(range(gradient.rank)), keepdims=0) for gradient in gradients]
        return sizes[0].op("Sum", *sizes[1:]) < inf

    def guard(self, fine: Term, states: Sequence[State]) -> None:
        """Make the states keep their values if `fine`, the result of `are_finite`, is false."""
        for state in states:
            state.update = fine.where(Term(self.writer, state.update), self._term(state)).value

    def count(self, fine: Term) -> None:
        """Write the next factor and counters after an update that was made (if `fine`) or skipped."""
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
