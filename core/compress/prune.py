"""`prune_channels` and `prune_weights`: a model with fewer channels, or with zeros among its weights."""

from __future__ import annotations

import os
from collections.abc import Collection

from lathe.core.compress.channel_pruning import ChannelPruning, Measure, remove_channels
from lathe.core.compress.quantize import graph_of
from lathe.core.compress.weight_pruning import WeightPruning
from lathe.core.compress.weight_pruning import prune_weights as prune_weights_of
from lathe.core.ir.graph import Graph


def prune_channels(
    model: Graph | str | os.PathLike[str] | bytes,
    share: float = 0.5,
    measure: Measure = "l2",
    multiple: int = 1,
    skip: Collection[str] = (),
) -> Graph:
    """A copy of `model` (a graph, a path to an ONNX file, or its bytes) without a share of the channels of its layers.

    Channels of convolutions and matrix products go, and heads of attention, with all that depends on them: the weights
    of least magnitude, by the sum of magnitudes ("l1") or of squares ("l2"). The number of channels that are left is
    rounded up to a `multiple`. Channels that the nodes named in `skip` compute stay. Train the result further: it is an
    ordinary model. `lathe.core.compress.channel_pruning.remove_channels` also returns the number of channels of each
    group.

    ModelError if the model is not valid; OSError if its file cannot be read; UnsupportedError for an unknown choice, a
    name in `skip` without a node, and a model that computes with integers already or has no channels that can go.
    """
    return remove_channels(graph_of(model), ChannelPruning(share, measure, multiple, frozenset(skip)))[0]


def prune_weights(
    model: Graph | str | os.PathLike[str] | bytes,
    sparsity: float = 0.5,
    pattern: str = "element",
    is_global: bool = False,
    skip: Collection[str] = (),
) -> Graph:
    """A copy of `model` (a graph, a path to an ONNX file, or its bytes) in which the smallest weights are 0.

    `sparsity` is the share of zeros among the weights of each Conv, MatMul and Gemm, or with `is_global` of all
    together. `pattern`: "element"; "2:4": two of four consecutive inputs of an output stay; "4x1": blocks of four
    inputs of an output. The nodes of `skip` stay as they are. `lathe.core.compress.weight_pruning.prune_weights` also
    returns the sparsity of each product.

    ModelError if the model is not valid; OSError if its file cannot be read; UnsupportedError for an unknown choice, a
    name in `skip` without a node, and a model that computes with integers already or has no products of constant
    weights.
    """
    options = WeightPruning(sparsity, pattern, is_global, skip=frozenset(skip))
    return prune_weights_of(graph_of(model), options)[0]
