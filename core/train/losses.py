"""Losses: graph from a model's output and a target to one number, the mean over the batch.

Formulas and defaults are those of PyTorch's losses of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from core.errors import UnsupportedError
from core.ir.dim import product
from core.ir.types import DType, TensorType
from core.ops.terms import Term


class Loss(Protocol):
    """What a training step needs to know of a loss."""

    def target(self, output: TensorType) -> TensorType:
        """The type of the target that goes with an output of this type."""
        ...

    def __call__(self, output: Term, target: Term) -> Term:
        """The loss, of rank 0."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Of logits [N, C, D1..] and classes [N, D1..] (int64). With `label_smoothing` e every other class gets e / C."""

    label_smoothing: float = 0.0

    def target(self, output: TensorType) -> TensorType:
        return _classes(output)

    def __call__(self, output: Term, target: Term) -> Term:
        log_probabilities = output.op("LogSoftmax", axis=1)
        picked = -_picked(log_probabilities, target)
        if not self.label_smoothing:
            return picked
        uniform = log_probabilities.mean([1])
        return picked * (1 - self.label_smoothing) - _mean(uniform) * self.label_smoothing


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Of log-probabilities [N, C, D1..] and classes [N, D1..] (int64)."""

    def target(self, output: TensorType) -> TensorType:
        return _classes(output)

    def __call__(self, output: Term, target: Term) -> Term:
        return -_picked(output, target)


@dataclass(frozen=True)
class MeanSquaredError:
    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        return _mean((output - target).square())


@dataclass(frozen=True)
class MeanAbsoluteError:
    """PyTorch's L1Loss."""

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        return _mean((output - target).abs())


@dataclass(frozen=True)
class Huber:
    """Quadratic up to a distance of `delta`, linear beyond (P. J. Huber, 1964)."""

    delta: float = 1.0

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        distance = (output - target).abs()
        linear = self.delta * (distance - 0.5 * self.delta)
        return _mean((distance <= self.delta).where(0.5 * distance.square(), linear))


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Of logits (PyTorch's BCEWithLogitsLoss) and probabilities of the same shape."""

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        """max(x, 0) - x*y + log(1 + exp(-|x|)), which does not overflow."""
        return _mean(output.op("Relu") - output * target + (-output.abs()).op("Softplus"))


@dataclass(frozen=True)
class KullbackLeibler:
    """Of log-probabilities and probabilities [N, ..]: the sum of p * (log p - output) over all but the batch."""

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        known = target > 0
        log_target = known.where(target, 1.0).log()
        return _mean((target * (log_target - output)).sum(range(1, output.rank)))


def _classes(output: TensorType) -> TensorType:
    shape = output.dims
    return TensorType(DType.INT64, (shape[0], *shape[2:]))


def _picked(values: Term, target: Term) -> Term:
    """The mean of the values of the target classes; as a comparison with every class, which needs no gather."""
    count = values.shape[1]
    if not isinstance(count, int):
        raise UnsupportedError(f"the number of classes is {count}, expected a number", where=f"%{values.value.name}")
    classes = values.writer.array(np.arange(count).reshape(-1, *(1,) * (values.rank - 2)))
    chosen = target.unsqueeze(1).equals(classes).where(values, 0.0)
    return chosen.sum(keepdims=False) / _places(target)


def _places(target: Term) -> Term | float:
    total = product(target.shape)
    return float(total) if isinstance(total, int) else target.cast(DType.FLOAT32).count(range(target.rank))


def _mean(term: Term) -> Term:
    return term.mean(keepdims=False)
