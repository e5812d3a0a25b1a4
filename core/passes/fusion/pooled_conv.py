"""Fuses a pooling into the convolution before it, if that has few channels: the unpooled image never reaches memory.

The kernel for few channels holds neighbouring pixels of one channel in a register, so that pooling is cheap there: see
`lathe.core.ops.nn.conv.has_few_channels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.nn.conv import POOL_SIZE, has_few_channels
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView
from lathe.core.passes.rewrite.base import PassResult, shape_of
from lathe.core.passes.rewrite.editor import Editor

_POOLS = {"MaxPool": "max", "AveragePool": "average"}
_STEPS = 4  # the most nodes of an epilogue, which runs for every accumulator before the pooling
_CHEAP = frozenset({"Add", "Sub", "Mul", "Max", "Min", "Relu", "Clip", "LeakyRelu"})


@dataclass(frozen=True)
class PoolConvolutions:
    name: str = "pooled_conv"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            reader = editor.only_reader(node.output) if _can_pool(editor, node) else None
            if reader is not None and _is_plain_pool(reader):
                attrs = {**node.attrs, "pool": _POOLS[reader.op]}
                editor.replace(
                    reader.output, editor.emit(reader, "PooledConv", *node.inputs, name=node.name, attrs=attrs)
                )
        return editor.finish()


def _can_pool(editor: Editor, node: Node) -> bool:
    """Whether a node is a convolution that the kernel with fused pooling covers.

    That is a channels-last FusedConv of float32 with few channels, images of known size, and a cheap epilogue.
    """
    if node.op != "FusedConv" or node.attrs.get("layout") != "NHWC" or node.output.dtype is not DType.FLOAT32:
        return False
    weight = editor.array(node.inputs[1])
    if weight is None or not has_few_channels(NodeView(registry.get(node.op), node), weight.shape):
        return False
    sizes = [size for value in (node.inputs[0], node.output) for size in (shape_of(value) or ())[1:3]]
    return len(sizes) == 4 and all(isinstance(size, int) for size in sizes) and _is_cheap(node)


def _is_cheap(node: Node) -> bool:
    """Whether a convolution's epilogue has few, cheap steps, and reads only tensors that are equal for all pixels."""
    body = node.attrs.get("epilogue")
    if isinstance(body, Graph) and (len(body.nodes) > _STEPS or any(step.op not in _CHEAP for step in body.nodes)):
        return False
    return all(_is_per_channel(value) for value in node.inputs[2:] if value is not None)


def _is_per_channel(value: Value) -> bool:
    shape = shape_of(value)
    return shape is not None and value.dtype is DType.FLOAT32 and all(extent == 1 for extent in shape[:-1])


def _is_plain_pool(node: Node) -> bool:
    """Whether a node is a channels-last pooling of squares of `POOL_SIZE` without overlap, gaps or padding."""
    if node.op not in _POOLS or len(node.outputs) != 1 or node.attrs.get("layout") != "NHWC":
        return False
    square = [POOL_SIZE, POOL_SIZE]
    sized = all(list(_attribute(node, name) or ()) == square for name in ("kernel_shape", "strides"))
    pads, dilations = _attribute(node, "pads") or (), _attribute(node, "dilations") or ()
    inside = _attribute(node, "auto_pad") in (None, "NOTSET", "VALID") and not any(pads)
    return sized and inside and all(step == 1 for step in dilations) and _is_exact(node)


def _is_exact(node: Node) -> bool:
    """Whether all windows of a pooling lie within the image; with `ceil_mode` the last ones may not."""
    source, result = shape_of(node.inputs[0]), shape_of(node.output)
    if source is None or result is None:
        return False
    return all(size // POOL_SIZE == count for size, count in zip(source[1:3], result[1:3], strict=True))


def _attribute(node: Node, name: str) -> Any:
    return NodeView(registry.get(node.op), node).attr(name)
