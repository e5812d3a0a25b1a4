"""Pruning during training: weights are multiplied by masks, which follow a schedule of growing sparsity.

`add_masks` makes the model that is trained, `Masks` computes new masks from its weights or scores, and `fold_masks`
makes the final model, whose pruned weights are 0. The schedule is that of Zhu and Gupta 2017
(https://arxiv.org/abs/1710.01878), equation 1; scores that training learns are movement pruning (Sanh et al. 2020,
https://arxiv.org/abs/2005.07683). Beyond the paper, the scores start at 1 and are multiplied by the magnitudes of the
weights. Adam divides a gradient by its size, so that scores alone do not tell a large weight from one that hardly
matters, and scores that start at 0 say nothing when the first weights are pruned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.masks import Pattern, masks_of, parse_pattern
from lathe.core.compress.product_moments import as_matrices, from_matrices
from lathe.core.compress.products import CHANNEL_AXIS, check_skipped
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import perm_of

Method = Literal["magnitude", "movement"]
METHODS: tuple[Method, ...] = get_args(Method)
_ROUNDING = 1e-9  # shares of updates are quotients
MASK, SCORES = ".mask", ".scores"  # suffixes of the names of constants, after the name of the weight


@dataclass(frozen=True)
class MaskedTraining:
    """The choices of pruning during training.

    `sparsity` is the final share of zeros of each product, or with `is_global` of all together; N:M patterns ignore it.
    `pattern`: see `masks.py`. `method`: the smallest weights go ("magnitude"), or those of the smallest products of
    magnitude and learned score ("movement"). From the share `start` of all updates to the share `end` the sparsity
    grows, `changes` times; then it stays. The nodes of `skip` are not pruned. UnsupportedError unless 0 < `sparsity` <
    1, 0 <= `start` < `end` <= 1 and `changes` >= 1, and for another `pattern` or `method`.
    """

    sparsity: float = 0.9
    pattern: str = "element"
    method: Method = "magnitude"
    is_global: bool = False
    start: float = 0.0
    end: float = 0.7
    changes: int = 100
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.sparsity < 1:
            raise UnsupportedError(f"sparsity: expected more than 0, below 1, got {self.sparsity}")
        if self.method not in METHODS:
            raise UnsupportedError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        if not 0 <= self.start < self.end <= 1:
            raise UnsupportedError(f"start, end: expected 0 <= start < end <= 1, got {self.start} and {self.end}")
        if self.changes < 1:
            raise UnsupportedError(f"changes: expected at least 1, got {self.changes}")
        parse_pattern(self.pattern)

    @property
    def blocks(self) -> Pattern:
        return parse_pattern(self.pattern)

    def sparsity_after(self, update: int, updates: int) -> float | None:
        """The sparsity that masks get after this update (counted from 1) of `updates`; None if they stay."""
        first, last = self.start * updates, max(self.end * updates, 1.0)
        passed = min(max((update - first) / max(last - first, 1.0), 0.0), 1.0)
        before = min(max((update - 1 - first) / max(last - first, 1.0), 0.0), 1.0)
        number, last_number = (int(share * self.changes + _ROUNDING) for share in (passed, before))
        if number == last_number:
            return None
        return self.sparsity * (1 - (1 - passed) ** 3)


DEFAULTS = MaskedTraining()


def add_masks(graph: Graph, options: MaskedTraining = DEFAULTS) -> Graph:
    """A copy of `graph` whose weights of Conv, MatMul and Gemm pass through masks of ones.

    The mask of the weight `w` is the constant `w.mask`; its scores, with the method "movement", are `w.scores`: ones.
    Training must not change masks. UnsupportedError if `options.skip` names no node, or there is no weight.
    """
    copy = graph.clone()
    infer_graph(copy)
    check_skipped(copy, options.skip)
    editor = Editor(copy)
    found = dict.fromkeys(each.value for each in _weights(copy, options.skip))
    if not found:
        raise UnsupportedError("expected a Conv, MatMul or Gemm with constant weights, got none")
    for value in found:
        array = copy.constants[value]
        readers = editor.readers(value)
        others = [editor.constant(np.ones_like(array), value.name + MASK)]
        if options.method == "movement":
            others.append(editor.constant(np.ones_like(array), value.name + SCORES))
        masked = editor.emit(readers[0], "MaskedWeight", value, *others, name=f"{value.name}_masked")
        for reader in readers:
            editor.set_inputs(reader, [masked if each is value else each for each in reader.inputs])
    editor.finish()
    return copy


@dataclass(frozen=True)
class _Weight:
    """The constant `value`, transposed if `is_transposed`, is input 1 of `product`."""

    value: Value
    product: Node
    is_transposed: bool

    def as_matrices(self, array: NDArray[Any]) -> NDArray[Any]:
        return as_matrices(self.product, array.T if self.is_transposed else array)

    def from_matrices(self, matrices: NDArray[Any]) -> NDArray[Any]:
        shape = self.value.shape[::-1] if self.is_transposed else self.value.shape
        array = from_matrices(self.product, matrices, shape)  # type: ignore[arg-type]
        return np.ascontiguousarray(array.T if self.is_transposed else array)


def _weights(graph: Graph, skip: Collection[str]) -> list[_Weight]:
    """The constant float32 weights of products, also behind a transposition or a mask; each once."""
    found: dict[Value, _Weight] = {}
    for node in graph.nodes:
        if node.op not in CHANNEL_AXIS or node.name in skip:
            continue
        value, is_transposed = node.input(1), False
        while value is not None and value.producer is not None:
            before = value.producer
            if before.op == "Transpose" and perm_of(before) == (1, 0):
                is_transposed = not is_transposed
            elif before.op not in ("MaskedWeight", "Identity"):
                break
            value = before.input(0)
        array = graph.constant_of(value)
        rank = 2 if node.op != "Conv" else None
        if (
            value is None
            or array is None
            or array.dtype != np.float32
            or array.ndim < 2
            or rank not in (None, array.ndim)
        ):
            continue
        found.setdefault(value, _Weight(value, node, is_transposed))
    return list(found.values())


class Masks:
    """The masks of a graph that `add_masks` made, computed from the present weights or scores."""

    def __init__(self, graph: Graph, options: MaskedTraining) -> None:
        self._options = options
        masked = {node.inputs[0]: node for node in graph.nodes if node.op == "MaskedWeight"}
        self._weights = [each for each in _weights(graph, options.skip) if each.value in masked]

    @property
    def names(self) -> frozenset[str]:
        """The names of the constants that hold the masks."""
        return frozenset(each.value.name + MASK for each in self._weights)

    def of(self, constants: Mapping[str, Array], sparsity: float) -> dict[str, Array]:
        """The masks of this sparsity, float32, by the names of their constants; `constants` are weights by name."""
        is_learned = self._options.method == "movement"
        scores = {}
        for each in self._weights:
            size = np.abs(constants[each.value.name])
            scores[each.value.name] = each.as_matrices(
                size * constants[each.value.name + SCORES] if is_learned else size
            )
        masks = masks_of(scores, sparsity, self._options.blocks, self._options.is_global)
        return {
            each.value.name + MASK: each.from_matrices(masks[each.value.name]).astype(np.float32)
            for each in self._weights
        }


def fold_masks(graph: Graph) -> Graph:
    """A copy of `graph` with masked weights as constants of the same names, without masks and scores."""
    copy = graph.clone()
    editor = Editor(copy)
    for node in [node for node in copy.nodes if node.op == "MaskedWeight"]:
        weights, mask = (editor.array(node.input(place)) for place in (0, 1))
        assert weights is not None, "add_masks"
        assert mask is not None, "add_masks"
        value = node.required_input(0)
        folded = editor.constant(np.asarray(weights * mask, DType.FLOAT32.numpy), value.name)
        editor.replace(node.output, folded)
        folded.name, value.name = value.name, folded.name
    editor.finish()
    return copy
