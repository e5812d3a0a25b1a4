"""Cross-layer equalization: gives the channels between two products equal ranges in the weights of both.

Nagel et al. 2019 (https://arxiv.org/abs/1906.04721), section 4.1. For a function f with f(s * x) = s * f(x) for s > 0,
such as a ReLU, f(W1 x + b1) = s * f((W1 x + b1) / s). So each output channel of the first product is divided by a
factor, and the weights of the second product that read it are multiplied.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.products import CHANNEL_AXIS, has_constant_weights
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.passes.rewrite.editor import Editor

_ROUNDS = 20  # over all pairs: each pair changes the ranges of its neighbours
_CLOSE = 1e-3  # of a factor to 1
# Nodes of one activation that keep its channels, and commute with positive factors of channels.
_HOMOGENEOUS = frozenset({
    "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Identity", "LeakyRelu", "MaxPool", "Relu",
})  # fmt: skip
_FLATTENING = frozenset({"Flatten", "Reshape"})


@dataclass(frozen=True)
class _Pair:
    """Two products; `adding` adds a constant bias after the first one. Each channel has `repeat` inputs in `second`."""

    first: Node
    adding: Node | None
    second: Node
    repeat: int


def equalize(graph: Graph, skip: Collection[str] = ()) -> int:
    """Rewrite the products of `graph` in place; returns the number of pairs whose channels were equalized.

    A pair is a Conv, MatMul or Gemm with constant weights (and a MatMul's Add of a constant), nodes that commute with
    positive factors, and a second such product, where nothing else reads the values between. Nodes named in `skip` stay
    as they are. The results of the graph stay the same up to rounding.
    """
    editor = Editor(graph)
    pairs = [pair for node in graph.nodes if (pair := _pair(editor, node, skip)) is not None]
    for _ in range(_ROUNDS):
        changes = [_equalize(editor, pair) for pair in pairs]
        if not any(changes):
            break
    editor.finish()
    return len(pairs)


def _pair(editor: Editor, node: Node, skip: Collection[str]) -> _Pair | None:
    if node.name in skip or not _is_product(editor, node):
        return None
    value, adding, repeat = node.output, None, 1
    reader = editor.only_reader(value)
    if reader is not None and node.op == "MatMul" and _adds_bias(editor, reader, value):
        adding, value = reader, reader.output
        reader = editor.only_reader(value)
    channels = _channel_axis(node)
    while reader is not None and reader.input(0) is value:
        if _is_product(editor, reader):
            is_pair = reader.name not in skip and _reads_along(reader, value, channels)
            return _Pair(node, adding, reader, repeat) if is_pair else None
        if reader.op in _FLATTENING:
            spread = _elements_per_channel(value, reader.output, channels)
            if spread is None:
                return None
            repeat, channels = repeat * spread, len(reader.output.shape) - 1
        elif reader.op not in _HOMOGENEOUS:
            return None
        value, reader = reader.output, editor.only_reader(reader.output)
    return None


def _is_product(editor: Editor, node: Node) -> bool:
    """Whether a node is a product with constant weights, of rank 2 unless it is a Conv."""
    if not has_constant_weights(editor, node):
        return False
    weights, bias = editor.array(node.input(1)), editor.array(node.input(2))
    assert weights is not None, "has_constant_weights"
    channels = weights.shape[CHANNEL_AXIS[node.op](node)]
    has_plain_bias = node.input(2) is None or (bias is not None and bias.shape == (channels,))
    return has_plain_bias and (node.op == "Conv" or weights.ndim == 2)


def _adds_bias(editor: Editor, node: Node, value: Value) -> bool:
    """Whether a node adds a constant [channels] to a value."""
    arrays = [editor.array(each) for each in node.inputs if each is not value]
    return node.op == "Add" and len(arrays) == 1 and arrays[0] is not None and arrays[0].shape == value.shape[-1:]


def _channel_axis(node: Node) -> int:
    """The axis of the channels in the result of a product."""
    return 1 if node.op == "Conv" else len(node.output.shape) - 1


def _reads_along(node: Node, value: Value, channels: int) -> bool:
    """Whether a product sums over the axis `channels` of the value that it reads."""
    return channels == (1 if node.op == "Conv" else len(value.shape) - 1)


def _elements_per_channel(before: Value, after: Value, channels: int) -> int | None:
    """The number of elements per channel if a reshape [N, C, D1..] -> [N, C * D1 * ..] merges the channels' elements.

    None for other reshapes, and if an extent is not known.
    """
    if channels != 1 or len(after.shape) != 2 or before.shape[0] != after.shape[0]:
        return None
    rest = [extent for extent in before.shape[1:] if isinstance(extent, int)]
    is_known = len(rest) == len(before.shape) - 1
    return int(np.prod(rest[1:])) if is_known and int(np.prod(rest)) == after.shape[1] else None


def _equalize(editor: Editor, pair: _Pair) -> bool:
    """Change the weights of a pair; whether a factor was not close to 1."""
    first, second = editor.array(pair.first.input(1)), editor.array(pair.second.input(1))
    assert first is not None, "_is_product"
    assert second is not None, "_is_product"
    axis = CHANNEL_AXIS[pair.first.op](pair.first) % first.ndim
    outgoing = np.abs(first).max(axis=tuple(each for each in range(first.ndim) if each != axis))
    inputs = _by_input(pair.second, second)
    incoming = np.abs(inputs).max(axis=(1, 3)).reshape(len(outgoing), pair.repeat).max(axis=1)
    is_used = (outgoing > 0) & (incoming > 0)
    factors = np.sqrt(np.where(is_used, outgoing, 1) / np.where(is_used, incoming, 1)).astype(np.float32)
    if np.abs(factors - 1).max() < _CLOSE:
        return False
    spread = factors.reshape([-1 if each == axis else 1 for each in range(first.ndim)])
    bias = editor.array(pair.first.input(2))
    others = [] if bias is None else [editor.constant(bias / factors, f"{pair.first.name}_bias")]
    weights = editor.constant(first / spread, f"{pair.first.name}_equalized")
    editor.set_inputs(pair.first, [pair.first.inputs[0], weights, *others])
    if pair.adding is not None:
        editor.set_inputs(pair.adding, [_divided(editor, value, factors) for value in pair.adding.inputs])
    scaled = inputs * np.repeat(factors, pair.repeat).reshape(len(inputs), 1, -1, 1)
    stored = _from_inputs(pair.second, scaled, second.shape)
    weights = editor.constant(np.ascontiguousarray(stored), f"{pair.second.name}_equalized")
    editor.set_inputs(pair.second, [pair.second.inputs[0], weights, *pair.second.inputs[2:]])
    return True


def _divided(editor: Editor, value: Value | None, factors: NDArray[np.float32]) -> Value | None:
    array = editor.array(value)
    return value if array is None else editor.constant(array / factors, "bias")


def _by_input(node: Node, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights as [groups, outputs of a group, inputs of a group, elements of the kernel]."""
    if node.op == "Conv":
        groups = node.attrs.get("group", 1)
        assert isinstance(groups, int), "type inference checks it"
        return weights.reshape(groups, len(weights) // groups, weights.shape[1], -1)
    return (weights if node.attrs.get("transB") else weights.T)[None, :, :, None]


def _from_inputs(node: Node, weights: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The inverse of `_by_input`."""
    if node.op == "Conv":
        return weights.reshape(shape)
    return weights[0, :, :, 0] if node.attrs.get("transB") else weights[0, :, :, 0].T
