"""Folds batch normalization, and other constant factors and offsets per channel, into the weights of linear nodes.

conv(x, W, b) * s + t = conv(x, W*s, b*s + t), with one s and one t per output channel; likewise for Gemm and MatMul. A
factor per input channel before the node is folded as well, but an offset is not: padding adds zeros after it. A
BatchNormalization with constant statistics is such a factor and offset. If no linear node precedes it, it becomes Mul
and Add, which are fused into an elementwise kernel later. Weights that float32 could not hold are not made. Nodes with
integral weights stay as they are where a discontinuous operator may read the result
(core/passes/rewrite/discontinuities.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.passes.rewrite.base import PassResult, shape_of
from lathe.core.passes.rewrite.discontinuities import reaches_discontinuity
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.pattern import Match, Rule, apply, const, op, var

Channel = NDArray[np.float64]


@dataclass(frozen=True)
class Affine:
    """y = x * scale + offset, with one number per channel; the channels lie along `axis` of x."""

    axis: int
    scale: Channel
    offset: Channel


@dataclass(frozen=True)
class FoldAffine:
    """The pass of this module.

    `inside`: the graph is the body of a node, and unknown nodes of the outer graph read its outputs.
    """

    inside: bool = False
    name: str = "fold_affine"

    def run(self, graph: Graph) -> PassResult:
        with np.errstate(all="ignore"):  # what float32 cannot hold is not folded (`_as_float32`)
            return self._run(Editor(graph))

    def _run(self, editor: Editor) -> PassResult:
        for node in editor.nodes():
            _fold(editor, node, self.inside)
        apply(editor, FACTORS)
        for node in editor.nodes():
            _fold_before(editor, node)
        for node in editor.nodes():
            if node.op == "BatchNormalization":
                _lower_normalization(editor, node)
        return editor.finish()


def _fold(editor: Editor, linear: Node, inside: bool) -> None:
    """Folds the chain of affine nodes after `linear` into its weights and bias."""
    while linear.op in _FOLDERS and (reader := editor.only_reader(linear.output)) is not None:
        if reaches_discontinuity(editor, reader.output, inside) and _has_integral_weights(editor, linear):
            return
        affine = _affine_of(editor, reader, linear.output)
        new = _FOLDERS[linear.op](editor, linear, reader, affine) if affine is not None else None
        if new is None or new.producer is None:
            return
        editor.replace(reader.output, new)
        linear = new.producer


def _has_integral_weights(editor: Editor, linear: Node) -> bool:
    """Whether all weights are integers, as in a quantized product, whose sums are exact; scaled weights round them."""
    weight = editor.array(linear.inputs[1])
    return weight is not None and bool(np.all(weight == np.rint(weight)))


def _affine_of(editor: Editor, node: Node, x: Value) -> Affine | None:
    """The factor and offset per channel that a Mul, Add or BatchNormalization applies to its input `x`, or None.

    None for tensors without elements: a constant that broadcasts to them may have no value per channel.
    """
    if 0 in (shape_of(x) or ()):
        return None
    if node.op == "BatchNormalization":
        return _normalization(editor, node) if node.inputs[0] is x else None
    if node.op not in ("Mul", "Add") or x.type != node.output.type:
        return None
    array = editor.array(node.inputs[1] if node.inputs[0] is x else node.inputs[0])
    shape = shape_of(x)
    if array is None or array.dtype != np.float32 or shape is None or len(shape) < 2:
        return None
    return _from_constant(node.op, array.astype(np.float64), shape)


def _from_constant(operator: str, array: Channel, shape: tuple[Any, ...]) -> Affine | None:
    found = _channels_of(array, len(shape))
    if found is None:
        return None
    axis, values = found
    if values.size == 1 and isinstance(shape[axis], int):
        values = np.broadcast_to(values, (shape[axis],))
    count = values.size
    if operator == "Mul":
        return Affine(axis, values, np.zeros(count))
    return Affine(axis, np.ones(count), values)


def _channels_of(array: Channel, rank: int) -> tuple[int, Channel] | None:
    """The one axis along which a constant varies when it broadcasts to a tensor of this rank, and its values.

    Axis 1 for a constant of one number. None if it varies along several axes, or has more axes than the tensor.
    """
    if array.ndim > rank:
        return None
    full = (1,) * (rank - array.ndim) + array.shape
    varying = [axis for axis, size in enumerate(full) if size != 1]
    if len(varying) > 1:
        return None
    return (varying[0] if varying else 1), array.reshape(-1)


def _normalization(editor: Editor, node: Node) -> Affine | None:
    """A BatchNormalization as factor and offset; None unless it is in inference mode with constant statistics."""
    arrays = [editor.array(value) for value in node.inputs[1:5]]
    if len(node.outputs) > 1 or node.attrs.get("training_mode", 0) or node.attrs.get("layout", "NCHW") != "NCHW":
        return None
    if any(array is None or array.dtype != np.float32 for array in arrays):
        return None
    scale, bias, mean, variance = (array.astype(np.float64) for array in arrays if array is not None)
    factor = scale / np.sqrt(variance + _epsilon(node))
    return Affine(1, factor, bias - mean * factor)


def _epsilon(node: Node) -> float:
    return float(node.attrs.get("epsilon", 1e-5))  # type: ignore[arg-type]


def _fold_conv(editor: Editor, conv: Node, anchor: Node, affine: Affine) -> Value | None:
    weight = editor.array(conv.inputs[1])
    if weight is None or affine.axis != 1 or not _is_plain(editor, conv, weight):
        return None
    scaled = weight * affine.scale.reshape(-1, *[1] * (weight.ndim - 1))
    return _rebuild(editor, conv, anchor, scaled, _offset(editor.array(conv.input(2)), affine))


def _fold_transposed(editor: Editor, conv: Node, anchor: Node, affine: Affine) -> Value | None:
    weight = editor.array(conv.inputs[1])
    if weight is None or affine.axis != 1 or conv.attrs.get("group", 1) != 1 or not _is_plain(editor, conv, weight):
        return None
    scaled = weight * affine.scale.reshape(1, -1, *[1] * (weight.ndim - 2))
    return _rebuild(editor, conv, anchor, scaled, _offset(editor.array(conv.input(2)), affine))


def _fold_gemm(editor: Editor, gemm: Node, anchor: Node, affine: Affine) -> Value | None:
    weight = editor.array(gemm.inputs[1])
    if weight is None or affine.axis != 1 or not _is_plain(editor, gemm, weight):
        return None
    if gemm.attrs.get("beta", 1.0) != 1.0 or not _is_row(editor.array(gemm.input(2))):
        return None
    if np.any(affine.offset) and gemm.attrs.get("alpha", 1.0) != 1.0:
        return None
    scale = affine.scale.reshape(-1, 1) if gemm.attrs.get("transB", 0) else affine.scale
    return _rebuild(editor, gemm, anchor, weight * scale, _offset(editor.array(gemm.input(2)), affine))


def _fold_matmul(editor: Editor, matmul: Node, anchor: Node, affine: Affine) -> Value | None:
    """A new MatMul with a factor folded into its constant matrix; None if there is an offset.

    `FuseEpilogue` fuses an offset later. None also unless the matrix is float32, and the factor one number or one for
    each column of the result.
    """
    weight = editor.array(matmul.inputs[1])
    shape = shape_of(matmul.output)
    if weight is None or weight.ndim != 2 or shape is None or affine.offset.any() or weight.dtype != np.float32:
        return None
    uniform = bool(np.all(affine.scale == affine.scale[:1]))
    if affine.axis != len(shape) - 1 and not uniform:
        return None
    scale = affine.scale[:1] if uniform else affine.scale
    scaled = _as_float32(weight * scale)
    if scaled is None:
        return None
    return editor.emit(anchor, "MatMul", matmul.inputs[0], editor.constant(scaled, "weight"), name=matmul.name)


_FOLDERS = {"Conv": _fold_conv, "ConvTranspose": _fold_transposed, "Gemm": _fold_gemm, "MatMul": _fold_matmul}


def _is_plain(editor: Editor, node: Node, weight: Array) -> bool:
    """Whether the node's weights, `weight`, are float32, and its bias (third input) is absent or constant."""
    bias = node.input(2)
    return weight.dtype == np.float32 and (bias is None or editor.array(bias) is not None)


def _is_row(bias: Array | None) -> bool:
    return bias is None or bias.ndim == 0 or bias.size == bias.shape[-1]


def _offset(bias: Array | None, affine: Affine) -> Channel:
    return affine.offset if bias is None else bias.reshape(-1) * affine.scale + affine.offset


def _as_float32(numbers: Channel) -> Array | None:
    """The numbers as float32. None if the largest magnitude overflows, or is subnormal, where few bits are left."""
    most, limits = np.abs(numbers).max(initial=0), np.finfo(np.float32)
    return numbers.astype(np.float32) if most == 0 or limits.tiny <= most <= limits.max else None


def _rebuild(editor: Editor, node: Node, anchor: Node, weight: Channel, offset: Channel) -> Value | None:
    """Emits the node with new weights; with the bias `offset` if the node had a bias, or `offset` is not zero.

    None if float32 cannot hold the weights or the bias.
    """
    new_weight, new_bias = _as_float32(weight), _as_float32(offset)
    if new_weight is None or new_bias is None:
        return None
    has_bias = node.input(2) is not None or bool(np.any(offset))
    bias = editor.constant(new_bias, "bias") if has_bias else None
    constant = editor.constant(new_weight, "weight")
    return editor.emit(anchor, node.op, node.inputs[0], constant, bias, name=node.name, attrs=node.attrs)


def _factor_after(e: Editor, m: Match) -> Value | None:
    """The product of a match without the scalar factor of an operand, times that factor.

    The product's epilogue can then include the factor. None unless both operands are computed and of rank 2 or more.
    """
    factor = e.graph.constants[m["c"]]
    shapes = shape_of(m["a"]), shape_of(m["b"])
    if any(shape is None or len(shape) < 2 for shape in shapes):
        return None
    if e.array(m["a"]) is not None or e.array(m["b"]) is not None:
        return None
    product = e.emit(m.root, "MatMul", m["a"], m["b"])
    return e.emit(m.root, "Mul", product, e.constant(factor.reshape(())))


def _is_moderate_number(array: Array) -> bool:
    """Whether a constant is one float32 with a magnitude in [1e-4, 1e4], so that reordering causes no overflow."""
    return array.size == 1 and array.dtype == np.float32 and 1e-4 <= abs(array.item()) <= 1e4


_NUMBER = const("c", _is_moderate_number)
FACTORS = [
    Rule("(a*c)@b -> (a@b)*c", op("MatMul", op("Mul", var("a"), _NUMBER), var("b")), _factor_after),
    Rule("a@(b*c) -> (a@b)*c", op("MatMul", var("a"), op("Mul", var("b"), _NUMBER)), _factor_after),
]


def _fold_before(editor: Editor, linear: Node) -> None:
    """Folds a constant factor of the input of a Conv, Gemm or MatMul into its constant weights."""
    x = linear.inputs[0] if linear.op in ("Conv", "Gemm", "MatMul") else None
    weight = editor.array(linear.inputs[1]) if x is not None else None
    if x is None or weight is None or x.producer is None or x.producer.op != "Mul" or editor.only_reader(x) is None:
        return
    source, factor = _split_factor(editor, x.producer)
    if source is None or factor is None or source.type != x.type or weight.dtype != np.float32:
        return
    scaled = _scale_inputs(linear, weight, factor)
    new = _as_float32(scaled) if scaled is not None else None
    if new is not None:
        editor.set_inputs(linear, [source, editor.constant(new, "weight"), *linear.inputs[2:]])


def _split_factor(editor: Editor, node: Node) -> tuple[Value | None, Array | None]:
    """The operands of a Mul as (value, array of the constant one); the array is None if neither is constant."""
    a, b = node.inputs
    if editor.array(a) is not None:
        a, b = b, a
    return a, editor.array(b)


def _scale_inputs(linear: Node, weight: Array, factor: Array) -> Array | None:
    """The weights of a linear node, multiplied by `factor`, by which a Mul multiplies the node's input.

    None unless the factor is one float32, or one for each channel over which the node sums.
    """
    x = linear.inputs[0]
    shape = shape_of(x)
    found = _channels_of(factor.astype(np.float64), len(shape)) if shape is not None else None
    if shape is None or 0 in shape or found is None or factor.dtype != np.float32:
        return None
    axis, values = found
    if linear.op == "Conv":
        return _scale_groups(linear, weight, values) if values.size == 1 or axis == 1 else None
    if weight.ndim != 2 or linear.attrs.get("transA", 0) or (values.size > 1 and axis != len(shape) - 1):
        return None
    return weight * (values if linear.attrs.get("transB", 0) else values.reshape(-1, 1))


def _scale_groups(conv: Node, weight: Array, values: Channel) -> Array:
    """The weights of a convolution, each multiplied by the factor of its input channel, group by group."""
    groups = int(conv.attrs.get("group", 1))  # type: ignore[arg-type]
    channels = np.broadcast_to(values, (groups * weight.shape[1],)).reshape(groups, 1, weight.shape[1], 1)
    return (weight.reshape(groups, -1, weight.shape[1], int(np.prod(weight.shape[2:]))) * channels).reshape(
        weight.shape
    )


def _lower_normalization(editor: Editor, node: Node) -> None:
    affine, shape = _normalization(editor, node), shape_of(node.output)
    if affine is None or shape is None:
        return
    per_channel = (-1, *[1] * (len(shape) - 2))
    scale, offset = _as_float32(affine.scale), _as_float32(affine.offset)
    if scale is None or offset is None:
        return
    scaled = editor.emit(node, "Mul", node.inputs[0], editor.constant(scale.reshape(per_channel), "factor"))
    shifted = editor.emit(node, "Add", scaled, editor.constant(offset.reshape(per_channel), "offset"))
    editor.replace(node.output, shifted)
