"""Removes the conversion to an integer and back where a quantized number is dequantized at once, as before a residual.

The value is rounded and clamped in float32: the same numbers in half the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor

F32 = DType.FLOAT32
_SMALL = (DType.UINT8, DType.INT8, DType.UINT16, DType.INT16)  # float32 represents all of these integers exactly
_INTEGERS = (*_SMALL, DType.INT32)
_BOUNDS: dict[str, Callable[[Sequence[float]], float]] = {
    "Cast": max, "Relu": max, "Max": max, "Min": max, "Round": lambda each: each[0] + 1, "Add": sum, "Sub": sum,
    "Mul": lambda each: prod(each) if inf not in each else inf,  # infinity times zero is NaN
}  # fmt: skip
_FOLLOWED = (*_BOUNDS, "Div")
_PRODUCTS = ("ConvInteger", "MatMulInteger")
_DEPTH = 16
_EXACT = 2.0**20  # zero points below: their sum with a bound is an integer that float32 represents exactly
_FINITE = 1e38  # below this bound, no intermediate sum or product was infinite, so the value is not NaN


@dataclass(frozen=True)
class RemoveRequantization:
    name: str = "requantize"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        order = {node: number for number, node in enumerate(graph.nodes)}
        for node in editor.nodes():
            narrow = _producer(node.input(0), "Cast") if node.op == "Cast" and node.output.dtype is F32 else None
            if narrow is not None and _is_round_trip(editor, narrow, node) and _stays_in_registers(editor, node, order):
                _clamp_as_float(editor, narrow, node)
        return editor.finish()


def _is_round_trip(editor: Editor, narrow: Node, back: Node) -> bool:
    """Whether the Cast `narrow` converts rounded numbers to 8- or 16-bit integers that only the Cast `back` reads.

    The numbers must provably be finite.
    """
    rounded, dtype = narrow.inputs[0], narrow.output.dtype
    if rounded is None or dtype not in _SMALL or editor.only_reader(narrow.output) is not back:
        return False
    return _is_integral(editor, rounded) and _bound(editor, rounded) < _FINITE


def _stays_in_registers(editor: Editor, node: Node, order: Mapping[Node, int]) -> bool:
    """Whether fusion will probably keep the output of `node` in registers, instead of storing it to memory.

    False only if it is combined (Add, Sub, Mul) with the result of another integer product, and that product has the
    earlier position in `order`. Then the sum is fused into the epilogue of the earlier product
    (`lathe.core.passes.fusion.epilogue`), and the other goes through memory, where small integers take less room.
    """
    value, reader = node.output, editor.only_reader(node.output)
    while reader is not None and reader.op in ("Add", "Sub", "Mul"):
        other = next((x for x in reader.inputs if x is not value and x is not None and editor.array(x) is None), None)
        if other is not None:
            mine, theirs = _product_of(editor, node.output), _product_of(editor, other)
            return mine is None or theirs is None or order[mine] < order[theirs]
        value, reader = reader.output, editor.only_reader(reader.output)
    return True


def _product_of(editor: Editor, value: Value) -> Node | None:
    """The ConvInteger or MatMulInteger from which a value is computed by elementwise nodes with constants; or None.

    No other node may read the values between.
    """
    node: Node | None = None
    while editor.only_reader(value) is not None and (node := value.producer) is not None and node.op in _FOLLOWED:
        varying = [x for x in node.inputs if x is not None and editor.array(x) is None]
        if len(varying) != 1:
            return None
        value = varying[0]
    return node if node is not None and node.op in _PRODUCTS else None


def _clamp_as_float(editor: Editor, narrow: Node, back: Node) -> None:
    """Replaces both casts with a clamp to the range in which the integer type saturates.

    A zero point that is added before and subtracted afterwards is left out, and the range is shifted instead. That is
    exact: the numbers are integers, and those that float32 does not represent exactly lie beyond the range.
    """
    value, result, zero = narrow.required_input(0), back.output, 0.0
    added, reader = _producer(value, "Add"), editor.only_reader(back.output)
    if added is not None and reader is not None and reader.op in ("Add", "Sub"):
        first, second = _single(editor, added.input(1)), _single(editor, reader.input(1))
        if first is not None and second == (-first if reader.op == "Add" else first) and abs(first) < _EXACT:
            value, result, zero = added.required_input(0), reader.output, first
    limits = _limits(narrow.output.dtype)
    low, high = (editor.constant(np.array(limit - zero, np.float32), "limit") for limit in limits)
    above = editor.emit(back, "Max", value, low)
    editor.replace(result, editor.emit(back, "Min", above, high))


def _single(editor: Editor, value: Value | None) -> float | None:
    """The number of a constant of rank 0; None for any other value."""
    array = editor.array(value)
    return float(array.item()) if array is not None and array.shape == () else None


def _bound(editor: Editor, value: Value | None, depth: int = _DEPTH) -> float:
    """An upper bound of the magnitude of a value's elements, derived from integer types and constants; or infinity.

    At most `depth` nodes are followed.
    """
    known, node = editor.array(value), value.producer if value is not None else None
    if known is not None:
        return float(np.abs(known.astype(np.float64)).max(initial=0)) if not np.isnan(known).any() else inf
    if value is not None and value.dtype in _INTEGERS:
        return float(np.iinfo(value.dtype.numpy.name).max) + 1
    if node is None or depth == 0 or node.op not in _FOLLOWED:
        return inf
    if node.op == "Div":
        return _quotient_bound(_bound(editor, node.inputs[0], depth - 1), editor.array(node.inputs[1]))
    return _BOUNDS[node.op]([_bound(editor, operand, depth - 1) for operand in node.inputs])


def _quotient_bound(bound: float, divisor: Array | None) -> float:
    """The bound of a quotient's magnitude: `bound` of the dividend, divided by the smallest magnitude in `divisor`.

    Infinity if a divisor is zero or NaN, or they are not constant (None).
    """
    least = float(np.abs(divisor.astype(np.float64)).min(initial=inf)) if divisor is not None else 0.0
    return bound / least if least > 0 else inf


def _limits(dtype: DType) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy.name)
    return int(info.min), int(info.max)


def _is_integral(editor: Editor, value: Value) -> bool:
    """Whether a value is the result of Round, possibly plus an integral zero point."""
    if _producer(value, "Round") is not None:
        return True
    node = _producer(value, "Add")
    if node is None or _producer(node.inputs[0], "Round") is None:
        return False
    zero = editor.array(node.inputs[1])
    return zero is not None and bool(np.all(zero == np.rint(zero)))


def _producer(value: Value | None, op: str) -> Node | None:
    """The node that computes a value, if it has this operator; otherwise None."""
    node = value.producer if value is not None else None
    return node if node is not None and node.op == op else None
