"""Sums over decision trees, walked without branches: each walk takes the steps to the deepest leaf of its tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import Block, In, KernelCall, KernelSpec, Out, Request
from lathe.core.ops.ml import forest
from lathe.core.ops.ml.forest import Forest
from lathe.core.ops.ml.trees import Trees
from lathe.core.ops.opdef import registry

WALKERS = 8  # walks at once: enough independent chains of loads to hide their latency
WORDS = 4  # per node: feature; split (for a leaf: its weight, or the index of its weights); links for yes and no
MISSING = 1 << 30  # a flag in the word of the feature: NaN goes to yes

_COMPARISONS = (forest.LEQ, forest.LT, forest.GTE, forest.GT)
_MOST_DENSE = 1 << 24  # leaf weights
_MOST_NODES = (1 << 31) // WORDS - 1


@dataclass(frozen=True)
class TreesSpec(KernelSpec):
    """y[rows, targets] = base + the sum over `trees` trees (a multiple of WALKERS) of the weights of the row's leaf.

    The operands are x, the nodes (int32 [nodes, WORDS], links in words), the trees (int32 [trees, 2]: root in words,
    depth), the greatest depth of each WALKERS trees (int32), the weights of leaves (float32 [nodes, targets], read only
    if there are several targets), the base (float32 [targets]), and y.
    """

    family: ClassVar[str] = "trees"
    generator: ClassVar[str] = "trees.cpu"
    rows: Dim
    features: int
    targets: int
    trees: int
    comparison: int
    missing: bool

    @property
    def summary(self) -> str:
        return f"trees({self.trees} over {self.features} features, {WALKERS} walks at once)"


def trees(request: Request) -> KernelCall | None:
    """Selector of TreeEnsembleRegressor and TreeEnsemble over rows of float32: sums or means in single precision.

    None for other nodes, for several comparisons, for a `post_transform`, for tables that are too large
    (`_is_covered`), and if the rows have fewer features than the trees read, or an unknown number of them.
    """
    node, x = request.node, request.node.inputs[0]
    if x is None or x.dtype is not DType.FLOAT32 or x.tensor.rank != 2 or not _is_plain_sum(node):
        return None
    op = registry.get(node.op)
    assert isinstance(op, Trees)
    view = registry.NodeView(op, node)
    found, targets, features = op.forest(view), op.targets(view), x.shape[1]
    if not isinstance(features, int) or features < found.features or not _is_covered(found, targets):
        return None
    weights, base = found.weight, op.base(view)
    if node.attrs.get("aggregate_function") in ("AVERAGE", forest.AVERAGE):
        weights = weights / np.float32(len(found.roots))
    return _call(node, found, weights, targets, features, base)


def _is_plain_sum(node: Node) -> bool:
    """Whether scores are added up or averaged, without a transformation afterwards."""
    how, after = node.attrs.get("aggregate_function", "SUM"), node.attrs.get("post_transform", "NONE")
    return how in ("SUM", "AVERAGE", forest.SUM, forest.AVERAGE) and after in ("NONE", 0)


def _is_covered(found: Forest, targets: int) -> bool:
    """Whether all nodes have the same comparison, splits and weights are float32, and the tables stay small."""
    single = found.split.dtype == np.float32 and found.weight.dtype == np.float32
    small = len(found.mode) < _MOST_NODES and (targets == 1 or len(found.mode) * targets <= _MOST_DENSE)
    return single and small and len(found.modes) <= 1 and set(found.modes) <= set(_COMPARISONS)


def _call(node: Node, found: Forest, weights: Array, targets: int, features: int, base: Array) -> KernelCall:
    x = node.required_input(0)
    roots, depths = _pad_trees(found)
    comparison = found.modes[0] if found.modes else forest.LEQ
    spec = TreesSpec(x.shape[0], features, targets, len(roots), comparison, bool(found.missing.any()))
    dense = _weight_table(found, weights, targets)
    blocks = (
        Block("nodes", _nodes(found, dense, targets)),
        Block("trees", np.stack([roots * WORDS, depths], axis=1).astype(np.int32)),
        Block("depths", depths.reshape(-1, WALKERS).max(axis=1).astype(np.int32)),
        Block("weights", dense),
        Block("base", np.broadcast_to(base, targets).astype(np.float32)),
    )
    steps = int(depths.sum())
    return KernelCall(
        spec, (In(0), *blocks, Out()), flops=x.shape[0] * (steps + len(roots) * targets), bytes=x.tensor.nbytes
    )


def _pad_trees(found: Forest) -> tuple[Array, Array]:
    """The root node and the depth of each tree, padded to a multiple of WALKERS with trees of one leaf.

    That leaf is a node after all others.
    """
    depths = _depths(found)
    more = -len(depths) % WALKERS
    return np.append(found.roots, [len(found.mode)] * more), np.append(depths, [0] * more)


def _depths(found: Forest) -> Array:
    """The number of steps from each tree's root to its farthest leaf."""
    height = np.zeros(len(found.mode), np.int64)
    for _ in range(found.depth):
        above = np.where(found.mode == forest.LEAF, 0, 1 + np.maximum(height[found.yes], height[found.no]))
        if np.array_equal(above, height):
            break
        height = above
    return height[found.roots]


def _weight_table(found: Forest, weights: Array, targets: int) -> Array:
    """Weights [nodes + 1, targets]: 0 for targets without a weight, and for the leaf of padding trees."""
    table = np.zeros((len(found.mode) + 1, targets), np.float32)
    owners = np.repeat(np.arange(len(found.mode)), np.diff(found.first))
    np.add.at(table, (owners, found.target), weights)
    return table


def _nodes(found: Forest, dense: Array, targets: int) -> Array:
    """The table of nodes, int32 [nodes + 1, WORDS], with the leaf of padding trees at the end.

    `dense` are the weights [nodes + 1, targets]. The words are the feature (with a bit for missing values), the split
    or the leaf's weight or place of weights, and the links to both successors in words.
    """
    size = len(found.mode)
    table = np.empty((size + 1, WORDS), np.int32)
    leaves, own = np.append(found.mode == forest.LEAF, True), np.arange(size + 1)
    table[:, 0] = np.append(np.where(leaves[:-1], 0, found.feature | np.where(found.missing, MISSING, 0)), 0)
    at_leaf = dense[:, 0].view(np.int32) if targets == 1 else own * targets
    table[:, 1] = np.where(leaves, at_leaf, np.append(found.split, np.float32(0)).view(np.int32))
    table[:, 2] = np.append(found.yes, size) * WORDS
    table[:, 3] = np.append(found.no, size) * WORDS
    return table
