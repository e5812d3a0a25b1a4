"""Normalizations: over trailing axes (layer, RMS), over groups of channels (group, instance), with given statistics."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request
from lathe.core.kernels.elementwise.spec import ElementwiseSpec
from lathe.core.kernels.shared.attributes import attribute, axis_of
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, row_major, traffic
from lathe.core.kernels.shared.words import NARROW

_FLOPS_PER_ELEMENT = 8


@dataclass(frozen=True)
class LayerNormSpec(KernelSpec):
    """Rows [rows, length] become (x - mean) / sqrt(variance + epsilon) * scale + bias; the mean is 0 if not `centered`.

    The operands are x, scale, bias if any, y, mean [rows] if any, inverse deviation [rows] if any.
    """

    family: ClassVar[str] = "layernorm"
    generator: ClassVar[str] = "norm.layer_cpu"
    rows: Dim
    length: int
    epsilon: float
    centered: bool = True
    bias: bool = True
    mean: bool = False
    deviation: bool = False
    dtype: DType = DType.FLOAT32  # of x and y

    @property
    def summary(self) -> str:
        return f"{'layer' if self.centered else 'rms'}norm({self.length})"


@dataclass(frozen=True)
class GroupNormSpec(KernelSpec):
    """Each of `groups` groups of `channels` adjacent channels of an image is normalised.

    The operands are x, scale [groups*channels], bias [groups*channels], y. Images are [batch, C, pixels], or
    [batch, pixels, C] if `last`.
    """

    family: ClassVar[str] = "groupnorm"
    generator: ClassVar[str] = "norm.group_cpu"
    batch: Dim
    groups: int
    channels: int
    pixels: Dim
    epsilon: float
    last: bool

    @property
    def summary(self) -> str:
        return f"groupnorm({self.groups} x {self.channels}, {'last' if self.last else 'first'})"


def layer_norm(request: Request) -> KernelCall | None:
    """Selector of LayerNormalization and RMSNormalization of float32; x and y may be float16 or bfloat16.

    None for other nodes, if generated code cannot compute a dimension or the length of a row is not a number, if x and
    y differ in type, and if scale or bias does not have as many elements as a row.
    """
    return layer_call_of(request, lambda node: _is_float32(node, also=NARROW))


def layer_call_of(request: Request, is_covered: Callable[[Node], bool]) -> KernelCall | None:
    """The call of a layer or RMS normalisation with a CPU spec, from which the selectors of all devices start.

    None if scale or bias does not have as many elements as a row, if that length is not a number, if x and y differ in
    type, or if `is_covered` is false for the node.
    """
    node = request.node
    x = node.required_input(0)
    if not is_covered(node) or x.dtype is not node.output.dtype:
        return None
    axis = axis_of(attribute(node, "axis"), len(x.shape))
    length = product(x.shape[axis:])
    centered = node.op == "LayerNormalization"
    vectors = [value for value in node.inputs[1:] if value is not None]
    if not isinstance(length, int) or node.input(1) is None or any(v.tensor.size != length for v in vectors):
        return None
    extra = [False, False, False]
    extra[: len(node.outputs)] = [True] * len(node.outputs)
    _, mean, deviation = extra
    bias = node.input(2) is not None
    spec = LayerNormSpec(
        product(x.shape[:axis]), length, float(attribute(node, "epsilon")), centered, bias, mean, deviation, x.dtype
    )
    operands: list[Operand] = [In(0), In(1), *([In(2)] if bias else []), *(Out(i) for i in range(len(node.outputs)))]
    return _normalization(node, spec, operands)


def group_norm(request: Request) -> KernelCall | None:
    """Selector of GroupNormalization and InstanceNormalization of float32, of rank 2 or more.

    None for other nodes, if generated code cannot compute a dimension or the number of channels is not a number, and if
    scale or bias does not have one element per channel.
    """
    return group_call_of(request, _is_float32)


def group_call_of(request: Request, is_covered: Callable[[Node], bool]) -> KernelCall | None:
    """The call of a group or instance normalisation with a CPU spec, from which the selectors of all devices start.

    None if scale and bias do not have one element per channel, if the number of channels is symbolic, if the rank is
    below 2, or if `is_covered` is false for the node.
    """
    node = request.node
    x = node.required_input(0)
    if not is_covered(node) or len(x.shape) < 2:
        return None
    last = attribute(node, "layout") == "NHWC"
    channels = x.shape[-1] if last else x.shape[1]
    if not isinstance(channels, int) or any(v is None or v.tensor.size != channels for v in node.inputs[1:3]):
        return None
    groups = attribute(node, "num_groups") if node.op == "GroupNormalization" else channels
    pixels = product(x.shape[1:-1]) if last else product(x.shape[2:])
    spec = GroupNormSpec(x.shape[0], groups, channels // groups, pixels, float(attribute(node, "epsilon")), last)
    return _normalization(node, spec, [In(0), In(1), In(2), Out()])


def batch_norm(request: Request) -> KernelCall | None:
    """Selector of float32 BatchNormalization with given mean and variance, as an elementwise kernel.

    It computes (x - mean) / sqrt(variance + epsilon) * scale + bias per channel. None for other types, in
    `training_mode`, for several outputs, and if generated code cannot compute a dimension.
    """
    node = request.node
    if not _is_float32(node) or len(node.outputs) > 1 or attribute(node, "training_mode"):
        return None
    shape = node.output.shape
    channel = len(shape) - 1 if attribute(node, "layout") == "NHWC" else min(1, len(shape) - 1)
    vector = tuple(int(axis == channel) for axis in range(len(shape)))
    dense = row_major(shape)
    nest = Nest(shape, (dense, vector, vector, vector, vector, dense)).collapsed()
    spec = ElementwiseSpec(_batch_norm_body(float(attribute(node, "epsilon"))), nest)
    flops = node.output.tensor.size * 4
    return KernelCall(spec, (*(In(i) for i in range(5)), Out()), inplace=(0,), flops=flops, bytes=traffic(node))


def _batch_norm_body(epsilon: float) -> Graph:
    scalar = TensorType(DType.FLOAT32, ())
    x, scale, bias, mean, variance = (Value(f"x{i}", scalar) for i in range(5))
    body = Graph("body", [x, scale, bias, mean, variance])
    small = body.add_constant(np.asarray(epsilon, np.float32), "c0")

    def emit(op: str, *inputs: Value) -> Value:
        node = Node(op, list(inputs), [])
        node.outputs = [Value(f"t{len(body.nodes)}", scalar, node)]
        body.nodes.append(node)
        return node.output

    deviation = emit("Sqrt", emit("Add", variance, small))
    factor = emit("Div", scale, deviation)
    body.outputs = [emit("Add", emit("Mul", emit("Sub", x, mean), factor), bias)]
    return body


def _normalization(node: Node, spec: KernelSpec, operands: list[Operand]) -> KernelCall:
    flops = node.output.tensor.size * _FLOPS_PER_ELEMENT
    return KernelCall(spec, tuple(operands), inplace=(0,), flops=flops, bytes=traffic(node))


def _is_float32(node: Node, also: Set[DType] = frozenset()) -> bool:
    """Whether all tensors of the node are float32 and can be planned.

    The first input and output may also have a type in `also`.
    """
    data = [node.required_input(0), node.outputs[0]]
    rest = [value for value in (*node.inputs[1:], *node.outputs[1:]) if value is not None]
    allowed = all(value.dtype is DType.FLOAT32 or value.dtype in also for value in data)
    return allowed and has_plannable_types(node) and all(value.dtype is DType.FLOAT32 for value in rest)
