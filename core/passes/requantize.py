"""What is quantized only to be dequantized at once, such as a product on its way into a residual sum, stays float32.

Rounding and saturating without ever making the integer gives the same numbers in half the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from core.ir.graph import Graph, Node, Value
from core.ir.types import DType
from core.passes.base import PassResult
from core.passes.edit import Editor

F32 = DType.FLOAT32
_SMALL = (DType.UINT8, DType.INT8, DType.UINT16, DType.INT16)  # every such integer is a float32
_INTEGERS = (*_SMALL, DType.INT32)
_BOUNDS: dict[str, Callable[[Sequence[float]], float]] = {
    "Cast": max, "Relu": max, "Max": max, "Min": max, "Round": lambda each: each[0] + 1, "Add": sum, "Sub": sum,
    "Mul": prod,
}  # fmt: skip
_DEPTH = 16
_FINITE = 1e38  # below, no sum or product that went into a value was infinite, so none is NaN


@dataclass(frozen=True)
class Requantize:
    name: str = "requantize"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op == "Cast":
                _stay_float(editor, node)
        return editor.finish()


def _stay_float(editor: Editor, back: Node) -> None:
    """What is rounded, saturated as an integer and converted back is bounded as a float instead."""
    there = _producer(back.inputs[0], "Cast")
    rounded = there.inputs[0] if there is not None else None
    if back.output.dtype is not F32 or there is None or rounded is None or there.output.dtype not in _SMALL:
        return
    if editor.only_reader(there.output) is back and _is_whole(editor, rounded) and _bound(editor, rounded) < _FINITE:
        low, high = (editor.constant(np.array(limit, np.float32), "limit") for limit in _limits(there.output.dtype))
        editor.replace(back.output, editor.emit(back, "Min", editor.emit(back, "Max", rounded, low), high))


def _bound(editor: Editor, value: Value | None, depth: int = _DEPTH) -> float:
    """What a value's magnitude stays below: integers by some factors and sums; infinity for anything else."""
    known, node = editor.array(value), value.producer if value is not None else None
    if known is not None:
        return float(np.abs(known.astype(np.float64)).max(initial=0)) if not np.isnan(known).any() else inf
    if value is not None and value.dtype in _INTEGERS:
        return float(np.iinfo(value.dtype.numpy.name).max) + 1
    if node is None or depth == 0 or node.op not in _BOUNDS:
        return inf
    return _BOUNDS[node.op]([_bound(editor, operand, depth - 1) for operand in node.inputs])


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
