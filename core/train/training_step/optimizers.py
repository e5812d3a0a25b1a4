"""Optimizers: write the graph from a parameter, its gradient and its moments to their next values.

Each update is that of PyTorch's optimizer of the same name. Factors that depend only on the learning rate and the
number of the update are computed outside the graph in double precision, and are inputs of the graph: `scalars`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import ClassVar, Protocol

from lathe.core.ops.opdef.terms import Term

Scalars = Mapping[str, Term]
Update = tuple[Term, list[Term]]  # the next value of the parameter, and the next values of its moments


class Optimizer(Protocol):
    """The interface of an optimizer."""

    @property
    def rate(self) -> float:
        """The learning rate without a schedule."""
        ...

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the states of each parameter. A state has the type of the parameter and is initially zero."""
        ...

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        """The numbers that `update` needs, by name: for update number `step`, counted from 1, with the rate `rate`."""
        ...

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        """Write the update of the parameter `x`; returns its next value and the next values of its moments.

        `s` holds the scalars as float32 terms of rank 0.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, optionally with momentum or Nesterov momentum."""

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
        grad = _regularized_gradient(x, gradient, self.weight_decay)
        if not self.momentum:
            return x - s["rate"] * grad, []
        added = grad * s["taken"] if self.dampening else grad
        momentum = moments[0] * self.momentum + added
        ahead = grad + momentum * self.momentum if self.nesterov else momentum
        return x - s["rate"] * ahead, [momentum]


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (J. Duchi, E. Hazan, Y. Singer, 2011)."""

    rate: float = 1e-2
    rate_decay: float = 0.0
    weight_decay: float = 0.0
    epsilon: float = 1e-10
    moments: ClassVar[tuple[str, ...]] = ("squares",)

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"rate": rate / (1 + (step - 1) * self.rate_decay)}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        grad = _regularized_gradient(x, gradient, self.weight_decay)
        squares = moments[0] + grad * grad
        return x - s["rate"] * grad / (squares.sqrt() + self.epsilon), [squares]


@dataclass(frozen=True)
class Adadelta:
    """Adadelta (M. D. Zeiler, 2012)."""

    rate: float = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    moments: ClassVar[tuple[str, ...]] = ("squares", "moves")

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"rate": rate}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        grad = _regularized_gradient(x, gradient, self.weight_decay)
        squares = _running_mean(moments[0], grad * grad, self.rho)
        delta = (moments[1] + self.epsilon).sqrt() / (squares + self.epsilon).sqrt() * grad
        return x - s["rate"] * delta, [squares, _running_mean(moments[1], delta * delta, self.rho)]


@dataclass(frozen=True)
class RMSprop:
    """RMSprop (T. Tieleman, G. Hinton, 2012).

    `centered` divides by the standard deviation instead of the root mean square (A. Graves, 2013).
    """

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
        grad = _regularized_gradient(x, gradient, self.weight_decay)
        squares = _running_mean(moments[0], grad * grad, self.alpha)
        next_moments, spread = [squares], squares
        if self.centered:
            next_moments.append(_running_mean(moments[1], grad, self.alpha))
            spread = squares - next_moments[1].square()
        delta = grad / (spread.sqrt() + self.epsilon)
        if self.momentum:
            delta = moments[-1] * self.momentum + delta
            next_moments.append(delta)
        return x - s["rate"] * delta, next_moments


@dataclass(frozen=True)
class Adam:
    """Adam (D. P. Kingma, J. Ba, 2015).

    `amsgrad` divides by the largest mean square so far (S. J. Reddi et al., 2018). `decoupled` applies weight decay to
    the parameter instead of the gradient (see `AdamW`).
    """

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
        factors = {"step": rate / (1 - self.beta1**step), "square": 1 / sqrt(1 - self.beta2**step)}
        return {**factors, "kept": 1 - rate * self.weight_decay} if self.decoupled else factors

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        grad = gradient if self.decoupled else _regularized_gradient(x, gradient, self.weight_decay)
        mean = _running_mean(moments[0], grad, self.beta1)
        square = _running_mean(moments[1], grad * grad, self.beta2)
        next_moments = [mean, square]
        if self.amsgrad:
            next_moments.append(moments[2].op("Max", square))
        before = x * s["kept"] if self.decoupled and self.weight_decay else x
        return before - s["step"] * mean / (next_moments[-1].sqrt() * s["square"] + self.epsilon), next_moments


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (I. Loshchilov, F. Hutter, 2019)."""

    weight_decay: float = 1e-2
    decoupled: bool = True


@dataclass(frozen=True)
class AdaMax:
    """AdaMax: Adam with the infinity norm of the gradient instead of the mean square (Adam's paper, section 7.1)."""

    rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    moments: ClassVar[tuple[str, ...]] = ("mean", "greatest")

    def scalars(self, step: int, rate: float) -> dict[str, float]:
        return {"step": rate / (1 - self.beta1**step)}

    def update(self, x: Term, gradient: Term, moments: Sequence[Term], s: Scalars) -> Update:
        grad = _regularized_gradient(x, gradient, self.weight_decay)
        mean = _running_mean(moments[0], grad, self.beta1)
        greatest = (moments[1] * self.beta2).op("Max", grad.abs() + self.epsilon)
        return x - s["step"] * mean / greatest, [mean, greatest]


@dataclass(frozen=True)
class NAdam:
    """NAdam: Adam with Nesterov momentum (T. Dozat, 2016)."""

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
        grad = _regularized_gradient(x, gradient, self.weight_decay)
        mean = _running_mean(moments[0], grad, self.beta1)
        square = _running_mean(moments[1], grad * grad, self.beta2)
        spread = square.sqrt() * s["square"] + self.epsilon
        return x - (s["slope"] * grad + s["mean"] * mean) / spread, [mean, square]


def _nadam_momentum(beta: float, decay: float, step: int) -> float:
    return float(beta * (1 - 0.5 * 0.96 ** (step * decay)))


@lru_cache(maxsize=64)
def _nadam_product(beta: float, decay: float, step: int) -> float:
    product = 1.0
    for t in range(1, step + 1):
        product *= _nadam_momentum(beta, decay, t)
    return product


def _regularized_gradient(x: Term, gradient: Term, decay: float) -> Term:
    """The gradient with L2 regularization: of the loss plus decay/2 times the sum of squared weights."""
    return gradient + x * decay if decay else gradient


def _running_mean(mean: Term, new: Term, decay: float) -> Term:
    return mean * decay + new * (1 - decay)
