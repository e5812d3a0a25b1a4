"""Losses: write the graph from a model's output and a target to a scalar, the mean over the batch.

Formulas and defaults are those of PyTorch's losses, with the mean over the batch as reduction. Losses of logits read
the numbers before a final Softmax or Sigmoid: a model that gives probabilities is trained as its users expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.terms import Term


class Loss(Protocol):
    """The interface of a loss."""

    def target(self, output: TensorType) -> TensorType:
        """The type of the target for an output of this type."""
        ...

    def __call__(self, output: Term, target: Term) -> Term:
        """Write the nodes of the loss, and return the loss as a term of rank 0.

        UnsupportedError for a loss of classes if the number of classes is symbolic.
        """
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of logits [N, C, D1..] and class indices [N, D1..] (int64); PyTorch's CrossEntropyLoss.

    If a Softmax over the classes computes the output, its input has the logits.
    `label_smoothing` e mixes the target distribution with the uniform one: (1 - e) * target + e / C. An index outside 0
    to C - 1 is not refused: it has no target class, and counts in the mean.
    """

    label_smoothing: float = 0.0

    def target(self, output: TensorType) -> TensorType:
        return _class_indices(output)

    def __call__(self, output: Term, target: Term) -> Term:
        log_probabilities = logits_of(output, axis=1).op("LogSoftmax", axis=1)
        loss = -_mean_at_target(log_probabilities, target)
        if not self.label_smoothing:
            return loss
        uniform = log_probabilities.mean([1])
        return loss * (1 - self.label_smoothing) - _mean(uniform) * self.label_smoothing


IGNORED = -100  # the target of a token that does not count, as in PyTorch's CrossEntropyLoss


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of logits [N, L, C] and the tokens that follow, int64 [N, L]: the mean over the tokens that count.

    A token with the target -100 does not count, such as one of a prompt; PyTorch's CrossEntropyLoss with its
    `ignore_index`. Without a token that counts the loss is 0. If a Softmax over the tokens computes the output, its
    input has the logits.
    """

    def target(self, output: TensorType) -> TensorType:
        return TensorType(DType.INT64, output.dims[:-1])

    def __call__(self, output: Term, target: Term) -> Term:
        count = output.shape[-1]
        if not isinstance(count, int):
            raise UnsupportedError(f"the number of tokens is {count}, expected a number", where=f"%{output.value.name}")
        tokens = output.writer.array(np.arange(count))
        chosen = target.unsqueeze(2).equals(tokens).where(logits_of(output, axis=-1).op("LogSoftmax", axis=-1), 0.0)
        counted = (target >= 0).cast(DType.FLOAT32).sum(keepdims=False)
        return -chosen.sum(keepdims=False) / counted.op("Max", 1.0)


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Negative log-likelihood of log-probabilities [N, C, D1..] and class indices [N, D1..]; PyTorch's NLLLoss.

    The indices are int64. An index outside 0 to C - 1 is not refused: its loss is 0, and counts in the mean.
    """

    def target(self, output: TensorType) -> TensorType:
        return _class_indices(output)

    def __call__(self, output: Term, target: Term) -> Term:
        return -_mean_at_target(output, target)


@dataclass(frozen=True)
class MeanSquaredError:
    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        return _mean((output - target).square())


@dataclass(frozen=True)
class MeanAbsoluteError:
    """The mean absolute error (PyTorch's L1Loss)."""

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        return _mean((output - target).abs())


@dataclass(frozen=True)
class Huber:
    """The Huber loss: quadratic up to a distance of `delta`, linear beyond (P. J. Huber, 1964; PyTorch's HuberLoss)."""

    delta: float = 1.0

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        distance = (output - target).abs()
        linear = self.delta * (distance - 0.5 * self.delta)
        return _mean((distance <= self.delta).where(0.5 * distance.square(), linear))


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross entropy of logits and probabilities of the same shape (PyTorch's BCEWithLogitsLoss).

    If a Sigmoid computes the output, its input has the logits.
    """

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        """Computed as max(x, 0) - x*y + log(1 + exp(-|x|)) for output x and target y, which does not overflow."""
        logits = _before(output, "Sigmoid")
        return _mean(logits.op("Relu") - logits * target + (-logits.abs()).op("Softplus"))


@dataclass(frozen=True)
class KullbackLeibler:
    """Kullback-Leibler divergence of log-probabilities and target probabilities p, both [N, ..].

    The sum of p * (log p - output) over all axes but the first, averaged over the first (PyTorch's KLDivLoss with
    the reduction "batchmean").
    """

    def target(self, output: TensorType) -> TensorType:
        return output

    def __call__(self, output: Term, target: Term) -> Term:
        known = target > 0
        log_target = known.where(target, 1.0).log()
        return _mean((target * (log_target - output)).sum(range(1, output.rank)))


def logits_of(output: Term, axis: int) -> Term:
    """The input of the Softmax along `axis` that computes a term, or the term itself.

    The derivative of a Softmax of a Softmax is small where the model is sure and wrong, so such a model learns slowly.
    """
    return _before(output, "Softmax", axis % output.rank)


def _before(output: Term, op: str, axis: int | None = None) -> Term:
    """The input of the node with operator `op` that computes a term, or the term itself."""
    node = output.value.producer
    while node is not None and node.op == "Identity":
        node = node.required_input(0).producer
    if node is None or node.op != op:
        return output
    own_axis: Any = node.attrs.get("axis", -1)
    return output if axis not in (None, own_axis % output.rank) else output.writer.term(node.required_input(0))


def _class_indices(output: TensorType) -> TensorType:
    shape = output.dims
    return TensorType(DType.INT64, (shape[0], *shape[2:]))


def _mean_at_target(values: Term, target: Term) -> Term:
    """The mean of the values [N, C, D1..] at the target classes [N, D1..].

    The values are selected by a comparison with every class index instead of a gather, so a target outside 0 to C - 1
    adds 0 to the sum. UnsupportedError if C is symbolic.
    """
    count = values.shape[1]
    if not isinstance(count, int):
        raise UnsupportedError(f"the number of classes is {count}, expected a number", where=f"%{values.value.name}")
    classes = values.writer.array(np.arange(count).reshape(-1, *(1,) * (values.rank - 2)))
    chosen = target.unsqueeze(1).equals(classes).where(values, 0.0)
    return chosen.sum(keepdims=False) / _target_count(target)


def _target_count(target: Term) -> Term | float:
    total = product(target.shape)
    return float(total) if isinstance(total, int) else target.cast(DType.FLOAT32).count(range(target.rank))


def _mean(term: Term) -> Term:
    return term.mean(keepdims=False)
