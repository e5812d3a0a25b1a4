"""Products with dequantized weights: large weights stay quantized in memory.

`DequantizeLinear` of a constant before a MatMul or Gemm of float32 rows (weight-only quantization) would be folded into
a weight of float32. A product of few rows takes as long as its weights take from memory, so this pass rewrites it as
`DequantizedMatMul`, whose kernels read the codes. It runs before constants are folded, and before `quantized`.

Kernels may round the rows to int8 where the model permits it (`RoundableRows`), or everywhere with `int8_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef import registry
from lathe.core.passes.precision.quantized import MOVING
from lathe.core.passes.rewrite.base import PassResult, shape_of
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import perm_of

_FEWEST_ELEMENTS = 1 << 16  # 256 KB of float32: smaller weights stay in a cache close to the processor
_BLOCK_STEP = 16  # rows of a block are a multiple of it: a kernel reads up to 16 codes as one word
_BYTE_ZERO = 128  # of codes of 8 bits, which are int8


@dataclass(frozen=True)
class _Weight:
    """A weight [K, N]: number(codes) * scales + offsets, as in `DequantizedMatMul`."""

    codes: Array
    numbers: tuple[float, ...]
    scales: Array
    offsets: Array | None
    block: int


@dataclass(frozen=True)
class KeepWeightsQuantized:
    """Rewrites MatMul and Gemm of float32 with a large constant weight of 2, 4 or 8 bits in DequantizeLinear.

    With `int8_rows` all of them may round their rows to int8.
    """

    int8_rows: bool = False
    name: str = "weight_only"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op in ("MatMul", "Gemm"):
                _rewrite(editor, node, self.int8_rows)
        return editor.finish()


def _rewrite(editor: Editor, node: Node, int8_rows: bool) -> None:
    a, b, bias = node.inputs[0], node.inputs[1], node.input(2)
    if a is not None and a.producer is not None and a.producer.op == "RoundableRows":
        a, int8_rows = a.producer.inputs[0], True
    if a is None or b is None or a.dtype is not DType.FLOAT32 or not _is_plain(node) or _is_dequantized(a):
        return
    rows, is_transposed = shape_of(a), bool(node.attrs.get("transB"))
    weight = _weight(editor, b, is_transposed)
    if weight is None or rows is None or len(rows) < 2 or rows[-1] != len(weight.codes):
        return
    if bias is not None and not _fits_bias(node, bias):
        return
    arrays = [weight.codes, weight.scales, *([] if weight.offsets is None else [weight.offsets])]
    names = ("codes", "scales", "offsets")
    constants = [editor.constant(array, name) for array, name in zip(arrays, names, strict=False)]
    attrs: dict[str, Attr] = {"block": weight.block, "numbers": weight.numbers, "row_bits": 8 * int8_rows}
    y = editor.emit(node, "DequantizedMatMul", a, *constants, attrs=attrs)
    editor.replace(node.output, y if bias is None else editor.emit(node, "Add", y, bias))


def _is_dequantized(value: Value | None) -> bool:
    """Whether a value is dequantized, and possibly moved since: the pass `quantized` covers such products."""
    while value is not None and (node := value.producer) is not None and node.op in MOVING:
        value = node.inputs[0]
    return value is not None and value.producer is not None and value.producer.op == "DequantizeLinear"


def _is_plain(node: Node) -> bool:
    """Whether a Gemm has no factor and does not transpose its left operand; true for a MatMul."""
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    return all(node.attrs.get(name, default) == default for name, default in plain.items())


def _fits_bias(node: Node, bias: Value) -> bool:
    """Whether the third input of a Gemm broadcasts to its output without changing that shape."""
    shape, result = shape_of(bias), shape_of(node.output)
    if shape is None or result is None or len(shape) > len(result):
        return False
    return all(dim in (1, extent) for dim, extent in zip(reversed(shape), reversed(result), strict=False))


def _weight(editor: Editor, value: Value, is_transposed: bool) -> _Weight | None:
    """The weight [K, N] that `value`, or its transpose, is; None unless it is a large DequantizeLinear of constants."""
    node = value.producer
    if node is not None and (perm := perm_of(node)) is not None and node.inputs[0] is not None:
        if perm != (1, 0):
            return None
        is_transposed, node = not is_transposed, node.inputs[0].producer
    if node is None or node.op != "DequantizeLinear" or node.output.dtype is not DType.FLOAT32:
        return None
    scale, zero = (editor.array(node.input(index)) for index in (1, 2))
    whole = editor.array(node.inputs[0])
    if whole is None or scale is None or (node.input(2) is not None and zero is None):
        return None
    dtype, is_real = DType.from_numpy(whole.dtype), scale.dtype == np.float32 and bool(np.isfinite(scale).all())
    if whole.ndim != 2 or whole.size < _FEWEST_ELEMENTS or not dtype.is_integer or dtype.bits > 8 or not is_real:
        return None
    view = registry.NodeView(registry.get(node.op), node)
    axis, block = view.attr("axis") % 2, view.attr("block_size")
    points = np.zeros_like(scale, np.int32) if zero is None else np.broadcast_to(zero.astype(np.int32), scale.shape)
    if is_transposed:
        whole, axis = whole.T, 1 - axis
        scale, points = (scale.T, points.T) if block else (scale, points)
    found = _by_blocks(scale, points, whole.shape, axis, block)
    return _with_codes(whole.astype(np.int32), *found) if found is not None else None


def _by_blocks(
    scale: Array, zero: Array, shape: Sequence[int], axis: int, block: int
) -> tuple[Array, Array, int] | None:
    """The scales and the zero points of a weight [K, N], one row for each block along K, and the rows of a block.

    None if each row has a scale of its own, and for blocks that kernels do not cover.
    """
    depth, columns = shape
    if block:
        is_covered = axis == 0 and (block % _BLOCK_STEP == 0 or block >= depth)
        return (scale, zero, block) if is_covered else None
    if scale.size > 1 and axis == 0:
        return None
    whole = (1, columns)
    return np.broadcast_to(scale.reshape(-1), whole), np.broadcast_to(zero.reshape(-1), whole), depth


def _with_codes(whole: Array, scales: Array, zeros: Array, block: int) -> _Weight:
    """The weight (whole - zeros) * scales with codes of as few bits as its integers need: 2, 4 or 8."""
    least, most = int(whole.min()), int(whole.max())
    bits = next((bits for bits in (2, 4) if most - least < 1 << bits), 8)
    # A range of 4 bits around 0, as of int4, keeps its numbers whatever the weights are: kernels then are the same.
    first = -(1 << (bits - 1)) if -(1 << (bits - 1)) <= least and most < 1 << (bits - 1) else least
    codes = (whole - first).astype(np.uint8) if bits < 8 else (whole - (first + _BYTE_ZERO)).astype(np.int8)
    shift = zeros - (first if bits < 8 else first + _BYTE_ZERO)  # the code whose number is 0
    numbers: tuple[float, ...] = ()
    point = int(shift.flat[0])
    is_same = bool((shift == point).all())
    if bits < 8:
        zero = point if is_same else 0
        numbers, shift = tuple(float(code - zero) for code in range(1 << bits)), shift - zero
    offsets = None if not shift.any() else np.ascontiguousarray(-shift * scales, np.float32)
    return _Weight(codes, numbers, np.ascontiguousarray(scales, np.float32), offsets, block)
