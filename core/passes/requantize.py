"""What is quantized only to be dequantized at once, such as a product on its way into a residual sum, stays float32.

Rounding and saturating without ever making the integer gives the same numbers in half the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import DType
from core.passes.base import PassResult
from core.passes.edit import Editor

F32 = DType.FLOAT32
_SMALL = (DType.UINT8, DType.INT8, DType.UINT16, DType.INT16)  # every such integer is a float32
_INTEGERS = (*_SMALL, DType.INT32)
_BOUNDS: dict[str, Callable[[Sequence[float]], float]] = {
    "Cast": max, "Relu": max, "Max": max, "Min": max, "Round": lambda each: each[0] + 1, "Add": sum, "Sub": sum,
    "Mul": lambda each: prod(each) if inf not in each else inf,  # infinity times zero is NaN
}  # fmt: skip
_FOLLOWED = (*_BOUNDS, "Div")
_PRODUCTS = ("ConvInteger", "MatMulInteger")
_DEPTH = 16
_FINITE = 1e38  # below, no sum or product that went into a value was infinite, so none is NaN


@dataclass(frozen=True)
class Requantize:
    name: str = "requantize"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        order = {node: number for number, node in enumerate(graph.nodes)}
        for node in editor.nodes():
            there = _producer(node.input(0), "Cast") if node.op == "Cast" and node.output.dtype is F32 else None
            if there is not None and _is_quantized_only_for(editor, there, node) and _adds_up(editor, node, order):
                _stay_float(editor, there, node)
        return editor.finish()


def _is_quantized_only_for(editor: Editor, there: Node, back: Node) -> bool:
    """Whether a conversion rounds and saturates finite numbers that nothing but a conversion back reads."""
    rounded, dtype = there.inputs[0], there.output.dtype
    if rounded is None or dtype not in _SMALL or editor.only_reader(there.output) is not back:
        return False
    return _is_whole(editor, rounded) and _bound(editor, rounded) < _FINITE


def _adds_up(editor: Editor, node: Node, order: Mapping[Node, int]) -> bool:
    """Whether what a number becomes part of is computed with it: of two products that are added the first one does so,
    see `core.passes.epilogue`, and the other goes through memory, best as small integers."""
    value, reader = node.output, editor.only_reader(node.output)
    while reader is not None and reader.op in ("Add", "Sub", "Mul"):
        other = next((x for x in reader.inputs if x is not value and x is not None and editor.array(x) is None), None)
        if other is not None:
            mine, theirs = _product_of(editor, node.output), _product_of(editor, other)
            return mine is None or theirs is None or order[mine] < order[theirs]
        value, reader = reader.output, editor.only_reader(reader.output)
    return True


def _product_of(editor: Editor, value: Value) -> Node | None:
    """The product of integers that a value is made of, where nothing else reads what lies between."""
    node: Node | None = None
    while editor.only_reader(value) is not None and (node := value.producer) is not None and node.op in _FOLLOWED:
        varying = [x for x in node.inputs if x is not None and editor.array(x) is None]
        if len(varying) != 1:
            return None
        value = varying[0]
    return node if node is not None and node.op in _PRODUCTS else None


def _stay_float(editor: Editor, there: Node, back: Node) -> None:
    """Bound the numbers where they would saturate as integers."""
    low, high = (editor.constant(np.array(limit, np.float32), "limit") for limit in _limits(there.output.dtype))
    above = editor.emit(back, "Max", there.inputs[0], low)
    editor.replace(back.output, editor.emit(back, "Min", above, high))


def _bound(editor: Editor, value: Value | None, depth: int = _DEPTH) -> float:
    """What a value's magnitude stays below: integers by some factors and sums; infinity for anything else."""
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
    """A quotient is largest by the smallest divisor. Zero and NaN divide as infinity does: nothing is known then."""
    least = float(np.abs(divisor.astype(np.float64)).min(initial=inf)) if divisor is not None else 0.0
    return bound / least if least > 0 else inf


def _limits(dtype: DType) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy.name)
    return int(info.min), int(info.max)


def _is_whole(editor: Editor, value: Value) -> bool:
    """Whether a value is a rounded number, or one with a whole zero point added."""
    if _producer(value, "Round") is not None:
        return True
    node = _producer(value, "Add")
    if node is None or _producer(node.inputs[0], "Round") is None:
        return False
    zero = editor.array(node.inputs[1])
    return zero is not None and bool(np.all(zero == np.rint(zero)))


def _producer(value: Value | None, op: str) -> Node | None:
    """The node that makes a value, if it is one of this operator."""
    node = value.producer if value is not None else None
    return node if node is not None and node.op == op else None
