"""Fuses a depthwise convolution with the 1x1 convolutions around it: the intermediate images stay in the cache.

In an inverted residual block (MobileNetV2), a 1x1 convolution adds channels, a depthwise convolution filters them, and
a 1x1 convolution reduces them again. The wide images between them cause most of the memory traffic. The fused kernel
computes a few lines of them at a time, when the next convolution needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView
from lathe.core.passes.rewrite.base import PassResult, shape_of
from lathe.core.passes.rewrite.editor import Editor


@dataclass(frozen=True)
class ChainConvolutions:
    """Fuses depthwise convolutions with the 1x1 convolutions around them into ConvChain.

    `least_bytes`: the smallest size of the intermediate images of one batch row; smaller ones stay in the cache anyway.
    `worthwhile`: the least ratio of those bytes to the bytes of the weights, since each row reads all weights again.
    """

    least_bytes: int = 1 << 17
    worthwhile: int = 6
    name: str = "conv_chain"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            chain = _chain(editor, node) if _is_depthwise(editor, node) else []
            if len(chain) > 1 and self._pays(chain):
                editor.replace(chain[-1].output, _fuse(editor, chain))
        return editor.finish()

    def _pays(self, chain: Sequence[Node]) -> bool:
        """Whether the intermediate images of a row have `least_bytes`, and `worthwhile` times the bytes of weights."""
        wide = sum(_bytes(node.output, 1) for node in chain[:-1])
        weights = sum(_bytes(node.inputs[1]) for node in chain)
        return wide >= max(self.worthwhile * weights, self.least_bytes)


def _chain(editor: Editor, middle: Node) -> list[Node]:
    """The depthwise convolution `middle`, in order with the 1x1 convolutions before and after it that can be fused."""
    before, after = middle.required_input(0).producer, editor.only_reader(middle.output)
    chain = [middle]
    if before is not None and _is_pointwise(editor, before) and editor.only_reader(before.output) is middle:
        chain = [before, *chain] if all(_is_per_channel(value) for value in _extras(before)) else chain
    if after is not None and _is_pointwise(editor, after) and after.required_input(0) is middle.output:
        fits = all(_is_per_channel(value) or _is_whole(value, after) for value in _extras(after))
        chain = [*chain, after] if fits and middle.output not in _extras(after) else chain
    return chain


def _fuse(editor: Editor, chain: Sequence[Node]) -> Value:
    """Emits one ConvChain for the chain, and returns its output.

    The inputs of its body are named by position, so that equal bodies print equal.
    """
    inner: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in chain:
        inputs = [None if value is None else _inner_value(inner, value) for value in node.inputs]
        copy = Node(node.op, inputs, [], dict(node.attrs), node.name)
        copy.outputs = [Value(f"y{len(nodes)}", node.output.type, copy)]
        inner[node.output] = copy.output
        nodes.append(copy)
    sources = {outer: value for outer, value in inner.items() if value.producer is None}
    body = Graph("chain", list(sources.values()), [nodes[-1].output], nodes)
    last = chain[-1]
    return editor.emit(last, "ConvChain", *sources, attrs={"body": body}, name=last.name)


def _inner_value(inner: dict[Value, Value], outer: Value) -> Value:
    """The value in the body that stands for `outer`, from `inner`; at its first use a new input, added to `inner`."""
    return inner.setdefault(outer, Value(f"x{len(inner)}", outer.type))


def _is_depthwise(editor: Editor, node: Node) -> bool:
    shape = _weight_shape(editor, node)
    if shape is None or int(_attribute(node, "group")) != shape[0] or shape[0] == 1:
        return False
    return shape[1] == 1 and prod(shape[2:]) > 1 and all(_is_per_channel(value) for value in _extras(node))


def _is_pointwise(editor: Editor, node: Node) -> bool:
    shape = _weight_shape(editor, node)
    if shape is None or int(_attribute(node, "group")) != 1 or shape[2:] != (1, 1):
        return False
    pads, strides = _attribute(node, "pads") or (), _attribute(node, "strides") or ()
    return not any(pads) and all(step == 1 for step in strides)


def _weight_shape(editor: Editor, node: Node) -> tuple[int, ...] | None:
    """The shape of the weight of a FusedConv, if the kernel covers the node; otherwise None.

    The weight must be constant, everything float32, and the images two-dimensional, channels last, of known size.
    """
    if node.op != "FusedConv" or node.attrs.get("layout") != "NHWC" or node.attrs.get("pad_value"):
        return None
    weight = editor.array(node.inputs[1])
    floats = all(value is None or value.dtype is DType.FLOAT32 for value in (*node.inputs, *node.outputs))
    sizes = [size for value in (node.required_input(0), node.output) for size in (shape_of(value) or ())[1:]]
    if weight is None or not floats or len(sizes) != 6 or not all(isinstance(size, int) for size in sizes):
        return None
    return weight.shape


def _extras(node: Node) -> list[Value]:
    """The inputs after the weight: the bias, and the tensors that the epilogue reads."""
    return [value for value in node.inputs[2:] if value is not None]


def _is_per_channel(value: Value) -> bool:
    shape = shape_of(value)
    return shape is not None and all(extent == 1 for extent in shape[:-1])


def _is_whole(value: Value, node: Node) -> bool:
    return shape_of(value) == shape_of(node.output)


def _bytes(value: Value | None, first: int = 0) -> int:
    """The bytes of a value without its leading `first` axes; symbolic extents count as 1."""
    assert value is not None
    return prod(size for size in value.shape[first:] if isinstance(size, int)) * value.dtype.itemsize


def _attribute(node: Node, name: str) -> Any:
    return NodeView(registry.get(node.op), node).attr(name)
