"""Optimizers: graph from a parameter, its gradient and its moments to their next values.

Each update is that of PyTorch's optimizer of the same name. What depends on the number of the step only is computed
outside of the graph, in double precision, and fed as numbers: `scalars`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import ClassVar, Protocol

from core.ops.terms import Term

Scalars = Mapping[str, Term]
Update = tuple[Term, list[Term]]  # the parameter's next value, and its moments'


class Optimizer(Protocol):
    """What a training step needs to know of an optimizer."""

    @property
    def rate(self) -> float:
        """The learning rate, where no schedule gives another."""
        ...

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of what is kept for every parameter, beginning as zeros."""
        ...

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        """The numbers that `update` needs in this step, counted from 1."""
        ...

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update: ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum or Nesterov's if asked."""

    rate: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"rate": rate, "taken": 1.0 if step == 1 else 1 - self.dampening} if self.momentum else {"rate": rate}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        slope = _decayed(x, gradient, self.weight_decay)
        if not self.momentum:
            return x - s["rate"] * slope, []
        taken = slope * s["taken"] if self.dampening else slope
        momentum = moments[0] * self.momentum + taken
        ahead = slope + momentum * self.momentum if self.nesterov else momentum
        return x - s["rate"] * ahead, [momentum]


@dataclass(frozen=True)
class Adagrad:
    """J. Duchi, E. Hazan, Y. Singer, 2011."""

    rate: float = 1e-2
    rate_decay: float = 0.0
    weight_decay: float = 0.0
    epsilon: float = 1e-10
    moments: ClassVar[tuple[str, ...]] = ("squares",)

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"rate": rate / (1 + (step - 1) * self.rate_decay)}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        slope = _decayed(x, gradient, self.weight_decay)
        squares = moments[0] + slope * slope
        return x - s["rate"] * slope / (squares.sqrt() + self.epsilon), [squares]


@dataclass(frozen=True)
class Adadelta:
    """M. D. Zeiler, 2012."""

    rate: float = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    moments: ClassVar[tuple[str, ...]] = ("squares", "moves")

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"rate": rate}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        slope = _decayed(x, gradient, self.weight_decay)
        squares = _running(moments[0], slope * slope, self.rho)
        move = (moments[1] + self.epsilon).sqrt() / (squares + self.epsilon).sqrt() * slope
        return x - s["rate"] * move, [squares, _running(moments[1], move * move, self.rho)]


@dataclass(frozen=True)
class RMSprop:
    """T. Tieleman, G. Hinton, 2012; `centered`: by the variance instead of the mean square (A. Graves, 2013)."""

    rate: float = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        return ("squares", *(("mean",) if self.centered else ()), *(("momentum",) if self.momentum else ()))

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"rate": rate}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        slope = _decayed(x, gradient, self.weight_decay)
        squares = _running(moments[0], slope * slope, self.alpha)
        kept, spread = [squares], squares
        if self.centered:
            kept.append(_running(moments[1], slope, self.alpha))
            spread = squares - kept[1].square()
        move = slope / (spread.sqrt() + self.epsilon)
        if self.momentum:
            move = moments[-1] * self.momentum + move
            kept.append(move)
        return x - s["rate"] * move, kept


@dataclass(frozen=True)
class Adam:
    """D. P. Kingma, J. Ba, 2015; `amsgrad`: by the greatest mean square so far (S. J. Reddi et al., 2018);
    `decoupled`: the decay of weights does not pass through the moments (see `AdamW`)."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    decoupled: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        return ("mean", "square", "greatest") if self.amsgrad else ("mean", "square")

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        found = {"step": rate / (1 - self.beta1**step), "square": 1 / sqrt(1 - self.beta2**step)}
        return {**found, "kept": 1 - rate * self.weight_decay} if self.decoupled else found

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        slope = gradient if self.decoupled else _decayed(x, gradient, self.weight_decay)
        mean = _running(moments[0], slope, self.beta1)
        square = _running(moments[1], slope * slope, self.beta2)
        kept = [mean, square]
        if self.amsgrad:
            kept.append(moments[2].op("Max", square))
        before = x * s["kept"] if self.decoupled and self.weight_decay else x
        return before - s["step"] * mean / (kept[-1].sqrt() * s["square"] + self.epsilon), kept


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (I. Loshchilov, F. Hutter, 2019)."""

    weight_decay: float = 1e-2
    decoupled: bool = True


@dataclass(frozen=True)
class AdaMax:
    """Adam by the greatest slope instead of the mean square (section 7.1 of its paper)."""

    rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    moments: ClassVar[tuple[str, ...]] = ("mean", "greatest")

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"step": rate / (1 - self.beta1**step)}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        slope = _decayed(x, gradient, self.weight_decay)
        mean = _running(moments[0], slope, self.beta1)
        greatest = (moments[1] * self.beta2).op("Max", slope.abs() + self.epsilon)
        return x - s["step"] * mean / greatest, [mean, greatest]


@dataclass(frozen=True)
class NAdam:
    """Adam with Nesterov's momentum (T. Dozat, 2016)."""

    rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    moments: ClassVar[tuple[str, ...]] = ("mean", "square")

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        now, following = (_nadam_momentum(self.beta1, self.momentum_decay, t) for t in (step, step + 1))
        product = _nadam_product(self.beta1, self.momentum_decay, step)
        return {
            "slope": rate * (1 - now) / (1 - product),
            "mean": rate * following / (1 - product * following),
            "square": 1 / sqrt(1 - self.beta2**step),
        }

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        slope = _decayed(x, gradient, self.weight_decay)
        mean = _running(moments[0], slope, self.beta1)
        square = _running(moments[1], slope * slope, self.beta2)
        spread = square.sqrt() * s["square"] + self.epsilon
        return x - (s["slope"] * slope + s["mean"] * mean) / spread, [mean, square]


def _nadam_momentum(beta: float, decay: float, step: int) -> float:
    return float(beta * (1 - 0.5 * 0.96 ** (step * decay)))


@lru_cache(maxsize=64)
def _nadam_product(beta: float, decay: float, step: int) -> float:
    product = 1.0
    for t in range(1, step + 1):
        product *= _nadam_momentum(beta, decay, t)
    return product


def _decayed(x: Term, gradient: Term, decay: float) -> Term:
    """The gradient of the loss plus decay/2 times the sum of squared weights."""
    return gradient + x * decay if decay else gradient


def _running(mean: Term, new: Term, kept: float) -> Term:
    return mean * kept + new * (1 - kept)
