"""Distillation: a loss that compares a student with a teacher as well as with the targets.

Hinton, Vinyals, Dean 2015 (https://arxiv.org/abs/1503.02531), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef.terms import Term
from lathe.core.train.training_step.losses import (
    CrossEntropy,
    Huber,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    logits_of,
)

_OF_NUMBERS = (Huber, MeanAbsoluteError, MeanSquaredError)


@dataclass(frozen=True)
class Distillation:
    """(1 - weight) * loss(output, target) + weight * the distance of the output from the teacher's.

    For `CrossEntropy` the distance is T^2 times the Kullback-Leibler divergence of softmax(output / T) from
    softmax(teacher / T), the mean over the batch, for the temperature T; for losses of numbers it is the loss with the
    teacher's output as target. The teacher reads the student's inputs, and its first output counts; of a final softmax
    of the teacher or the student, the numbers before it. It is part of the step, and not trained. UnsupportedError for
    another loss, unless `temperature` > 0 and 0 < `weight` <= 1.
    """

    loss: Loss
    teacher: Graph
    temperature: float = 2.0
    weight: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.loss, (CrossEntropy, *_OF_NUMBERS)):
            raise UnsupportedError(
                f"loss: expected cross entropy, mse, l1 or huber for distillation, got {type(self.loss).__name__}"
            )
        if not self.temperature > 0:
            raise UnsupportedError(f"temperature: expected more than 0, got {self.temperature}")
        if not 0 < self.weight <= 1:
            raise UnsupportedError(f"weight: expected more than 0, at most 1, got {self.weight}")

    def target(self, output: TensorType) -> TensorType:
        return self.loss.target(output)

    def __call__(self, output: Term, target: Term) -> Term:
        """ModelError if the teacher's inputs or output do not fit the student's."""
        answer = self._answer(output)
        if isinstance(self.loss, CrossEntropy):
            logits = (answer / self.temperature).op("LogSoftmax", axis=1)
            mine = (logits_of(output, axis=1) / self.temperature).op("LogSoftmax", axis=1)
            divergence = (logits.exp() * (logits - mine)).sum([1])
            distance = divergence.mean(keepdims=False) * self.temperature**2
        else:
            distance = self.loss(output, answer)
        if self.weight == 1:
            return distance
        return self.loss(output, target) * (1 - self.weight) + distance * self.weight

    def _answer(self, output: Term) -> Term:
        """The teacher's output for the inputs of the student's graph."""
        teacher = _without_softmax(self.teacher)
        graph = output.writer.graph
        answer = Term(output.writer, output.writer.inline(teacher, _arguments(graph, teacher))[0])
        if answer.rank != output.rank or answer.shape[1:] != output.shape[1:]:
            raise ModelError(
                f"its output is {answer.value.tensor}, expected {output.value.tensor} as the student's",
                where=f"teacher '{self.teacher.name}'",
            )
        return answer


def _without_softmax(teacher: Graph) -> Graph:
    """A copy with the first output alone; if Softmax or LogSoftmax computes it, with the input of that node."""
    copy = teacher.clone()
    copy.defaults.clear()
    node = copy.outputs[0].producer
    copy.outputs = [
        node.required_input(0) if node is not None and node.op in ("Softmax", "LogSoftmax") else copy.outputs[0]
    ]
    copy.remove_dead()
    return copy


def _arguments(student: Graph, teacher: Graph) -> list[Value]:
    """The student's inputs for those of the teacher: of the same names, or the only ones."""
    by_name = {value.name: value for value in student.inputs}
    found = [by_name.get(value.name) for value in teacher.inputs]
    if len(found) == 1 and found[0] is None and student.inputs:
        found = [student.inputs[0]]
    arguments = [value for value in found if value is not None]
    for value, given in zip(teacher.inputs, found, strict=True):
        if given is None:
            names = ", ".join(value.name for value in student.inputs)
            raise ModelError(f"has an input '{value.name}', expected one of {names}", where=f"teacher '{teacher.name}'")
        if given.dtype is not value.dtype or given.tensor.rank != value.tensor.rank:
            raise ModelError(
                f"its input '{value.name}' is {value.tensor}, the student's {given.tensor}",
                where=f"teacher '{teacher.name}'",
            )
    return arguments
