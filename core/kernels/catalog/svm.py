"""Support vector machines: the kernel of each row with all support vectors, and what is made of it, in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from core.ir.graph import Array
from core.ir.types import Dim, DType
from core.kernels.catalog.base import Block, In, KernelCall, KernelSpec, Operand, Out, Request, Scratch, covers
from core.kernels.target import Target
from core.ops import registry
from core.ops.registry import NodeView
from core.ops.scores import floats
from core.ops.svm import Machine, SVMClassifier, SVMRegressor

WORDS = 8  # a number of float64, in bytes
_LINE = 64
_MOST_CLASSES = 128
_MOST_SCRATCH = 1 << 22


@dataclass(frozen=True)
class SvmSpec(KernelSpec):
    """Scores of rows, and labels where there are classes.

    Support vectors lie in blocks of as many as a vector register holds numbers, [blocks, features, lanes]: those of
    one class in blocks of their own, the last one filled up with vectors of weight 0. `kernel`, `gamma`, `coef0` and
    `degree`: see `core.ops.svm`. `direct`: the vectors are weights [decisions, features] themselves, so that each
    kernel is a decision. A regressor has no classes, and one decision.

    Operands: x; the vectors; their weights, float64 [classes - 1, blocks, lanes] (regressor: [1, ...]); where the
    blocks of each class begin and end, int64 [classes + 1]; float64 vectors of rho, prob_a and prob_b; the labels,
    int64; the outputs; scratch.
    """

    family: ClassVar[str] = "svm"
    rows: Dim
    features: int
    blocks: int
    classes: int
    kernel: str
    gamma: float
    coef0: float
    degree: float
    direct: bool
    probable: bool
    one_class: bool
    lanes: int
    together: int  # rows of a task, the lanes of a vector of float64

    @property
    def decisions(self) -> int:
        return self.classes * (self.classes - 1) // 2 if self.classes else 1

    @property
    def shares(self) -> int:
        """Sums of weighed kernels that decisions are made of: for each row of weights over each class."""
        return (self.classes - 1) * self.classes if self.classes else 1

    @property
    def columns(self) -> int:
        """Scores of a row."""
        if not self.classes:
            return 1
        return self.classes if self.probable or self.decisions == 1 else self.decisions

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Kernels of a row; shares of its decisions; then for all rows of a task: decisions, votes or probabilities,
        and for those the matrix Q and its product."""
        wide = self.together * WORDS
        square = self.classes * self.classes + self.classes if self.probable else 0
        sizes = (
            self.blocks * self.lanes * DType.FLOAT32.itemsize, self.shares * WORDS, self.decisions * wide,
            max(self.classes, 1) * wide, square * wide, 2 * wide,
        )  # fmt: skip
        return tuple(Scratch(-(-size // _LINE) * _LINE) for size in sizes)

    @property
    def summary(self) -> str:
        return f"svm({self.kernel.lower()}, {self.blocks * self.lanes} vectors of {self.features} features)"


@covers("SVMRegressor", "SVMClassifier")
def svm(request: Request) -> KernelCall | None:
    """None for other inputs than rows of float32, labels of strings, and scores that are transformed."""
    node, x = request.node, request.node.inputs[0]
    if x is None or x.dtype is not DType.FLOAT32 or x.tensor.rank != 2:
        return None
    op = registry.get(node.op)
    assert isinstance(op, SVMRegressor | SVMClassifier)
    view, labels = NodeView(op, node), None
    if isinstance(op, SVMClassifier):
        labels = view.attr("classlabels_ints")
        if labels is None or len(labels) > _MOST_CLASSES or not sum(view.attr("vectors_per_class") or ()):
            return None
    if len(node.outputs) < (2 if labels else 1):
        return None
    machine = op.machine(view)
    if view.attr("post_transform") != "NONE" or machine.vectors.shape[1] != x.shape[1]:
        return None
    return _call(request.cpu, view, machine, np.array(labels or (0,), np.int64))


def _call(target: Target, view: NodeView, machine: Machine, labels: Array) -> KernelCall | None:
    node, x = view.node, view.node.inputs[0]
    assert x is not None
    direct, probabilities = view.attr("kernel_type") == "LINEAR", _probabilities(view)
    vectors = machine.linear() if direct else machine.vectors
    sizes = (len(vectors),) if direct else machine.sizes
    places, lanes = _places(sizes, target.lanes), target.lanes
    gamma, coef0, degree = (float(each) for each in view.attr("kernel_params") or (0.0, 0.0, 0.0))
    spec = SvmSpec(
        x.shape[0], vectors.shape[1], len(places) // lanes, len(labels) if len(machine.sizes) > 1 else 0,
        view.attr("kernel_type"), gamma, coef0, degree, direct, probabilities is not None,
        bool(view.op.attrs.get("one_class") is not None and view.attr("one_class")), lanes,
        max(target.vector_bytes // WORDS, 1),
    )  # fmt: skip
    if sum(int(each.nbytes) for each in spec.scratch if isinstance(each.nbytes, int)) > _MOST_SCRATCH:
        return None
    a, b = probabilities or (machine.rho, machine.rho)
    operands: list[Operand] = [
        In(0),
        Block("vectors", _in_lanes(vectors[np.maximum(places, ~places)], lanes)),
        Block("weights", machine.rho if direct else np.where(places < 0, 0.0, machine.weights[:, places])),
        Block("spans", np.cumsum([0, *(-(-size // lanes) for size in sizes)]).astype(np.int64)),
        Block("rho", machine.rho), Block("prob_a", a), Block("prob_b", b), Block("labels", labels),
        *(Out(index) for index in range(len(node.outputs))),
        *spec.scratch,
    ]  # fmt: skip
    flops = x.shape[0] * (len(places) * (3 * spec.features + 2 * len(machine.weights)))
    return KernelCall(spec, tuple(operands), flops=flops, bytes=x.tensor.nbytes)


def _probabilities(view: NodeView) -> tuple[Array, Array] | None:
    """Platt's a and b of each pair of classes, where there are any."""
    if "prob_a" not in view.op.attrs or not view.attr("prob_a"):
        return None
    return floats(view.attr("prob_a"), np.float64), floats(view.attr("prob_b"), np.float64)


def _places(sizes: Sequence[int], lanes: int) -> Array:
    """Which vector lies in each lane of the blocks; ~vector where that one fills up the last block of a class."""
    found: list[int] = []
    for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True):
        found += [*range(end - size, end), *[~(end - 1)] * (-size % lanes)]
    return np.array(found, np.int64)


def _in_lanes(vectors: Array, lanes: int) -> Array:
    """[blocks * lanes, features] as [blocks, features, lanes]."""
    return np.ascontiguousarray(vectors.astype(np.float32).reshape(-1, lanes, vectors.shape[1]).swapaxes(1, 2))
