"""Support vector machines: kernel values, decisions, labels and probabilities in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import Block, In, KernelCall, KernelSpec, Operand, Out, Request, Scratch
from lathe.core.kernels.target import Target
from lathe.core.ops.ml.scores import floats
from lathe.core.ops.ml.svm import Machine, SVMClassifier, SVMRegressor
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView

WORDS = 8  # bytes of a float64
_LINE = 64
_MOST_CLASSES = 128
_MOST_SCRATCH = 1 << 22


@dataclass(frozen=True)
class SvmSpec(KernelSpec):
    """Scores of rows, and labels if there are classes.

    Support vectors lie in blocks of `lanes` vectors, [blocks, features, lanes]. Each class has blocks of its own, the
    last one padded with vectors of weight 0. `kernel`, `gamma`, `coef0` and `degree` are those of
    `lathe.core.ops.ml.svm`. A regressor has no classes and one decision. If `direct`, the vectors are instead the
    weights [decisions, features] of a linear machine, in one range of blocks, so that each kernel value is a decision.

    The operands are x; the vectors; their weights, float64 [classes - 1, blocks, lanes] (regressor: [1, ...]); the
    first block of each class and the end, int64 [classes + 1] (regressor: [2]); float64 vectors of rho, prob_a and
    prob_b; the labels, int64; the outputs; scratch. If `direct`, the operand of weights is rho, the first block and the
    end are those of the one range, and the kernel uses neither. Without probabilities, prob_a and prob_b are rho, also
    unused.
    """

    family: ClassVar[str] = "svm"
    generator: ClassVar[str] = "svm.cpu"
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
        """The number of decisions: one per pair of classes; 1 for a regressor."""
        return self.classes * (self.classes - 1) // 2 if self.classes else 1

    @property
    def shares(self) -> int:
        """The number of weighted sums from which decisions are computed: one per row of weights and class.

        A direct machine has scratch for them, but does not compute them.
        """
        return (self.classes - 1) * self.classes if self.classes else 1

    @property
    def columns(self) -> int:
        """The number of scores per row: 1 for a regressor.

        For a classifier one per class, if it has two classes or probabilities, otherwise one per pair of classes.
        """
        if not self.classes:
            return 1
        return self.classes if self.probable or self.decisions == 1 else self.decisions

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Scratch operands: kernel values and weighted sums of a row, then data of all rows of a task.

        These are decisions, votes or probabilities, the matrix Q with its product, and labels or a flag.
        """
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


def svm(request: Request) -> KernelCall | None:
    """Selector of SVMRegressor and SVMClassifier over rows of float32, with integer labels and untransformed scores.

    None for other nodes, if x is not of rank 2 or has other features than the support vectors, for classifiers without
    support vectors, for more than 128 classes, for more than 4 MiB of scratch per thread, and if an output is missing.
    """
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
    """Platt's a and b of each pair of classes; None if the machine has no probabilities."""
    if "prob_a" not in view.op.attrs or not view.attr("prob_a"):
        return None
    return floats(view.attr("prob_a"), np.float64), floats(view.attr("prob_b"), np.float64)


def _places(sizes: Sequence[int], lanes: int) -> Array:
    """The index of the vector in each lane of the blocks, for classes of `sizes` vectors; ~index where it is padding.

    Each class begins a new block of `lanes` vectors.
    """
    found: list[int] = []
    for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True):
        found += [*range(end - size, end), *[~(end - 1)] * (-size % lanes)]
    return np.array(found, np.int64)


def _in_lanes(vectors: Array, lanes: int) -> Array:
    """[blocks * lanes, features] as [blocks, features, lanes]."""
    return np.ascontiguousarray(vectors.astype(np.float32).reshape(-1, lanes, vectors.shape[1]).swapaxes(1, 2))
