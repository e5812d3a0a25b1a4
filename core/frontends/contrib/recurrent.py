"""Recurrent layers whose weights are bytes."""

from __future__ import annotations

from collections.abc import Sequence

from core.frontends.contrib.table import int64s, kept, lowers
from core.frontends.opsets import OnnxNode
from core.frontends.scope import Emitter
from core.ir.graph import Value
from core.ir.types import DType

_W, _R, _SCALES = 1, 2, 8  # inputs: the weights; then, of each, scale and zero point
_ATTRIBUTES = ("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size", "input_forget")


@lowers("DynamicQuantizeLSTM")
def _lstm(e: Emitter, node: OnnxNode) -> Sequence[Value]:
    """LSTM with the numbers that the bytes of W [directions, features, 4 * hidden] and R stand for.

    ONNX Runtime also rounds the input, and the state of every step, to 8 bits; here they stay as precise as they are.
    """
    w, r = (_weights(e, node, index, _SCALES + 2 * place) for place, index in enumerate((_W, _R)))
    inputs = [node.required(0), w, r, *(node.input(index) for index in range(3, 8))]
    names = [name or e.session.fresh(f"{node.label}.unused") for name in node.outputs]
    return e.emit("LSTM", inputs, kept(node, *_ATTRIBUTES), names, node.label)


def _weights(e: Emitter, node: OnnxNode, index: int, scale_at: int) -> Value:
    """The weight at `index` as LSTM has it, [directions, 4 * hidden, ..]. Its scale and zero point are those of a
    direction, or of each of its columns."""
    whole = e("Cast", node.required(index), to=DType.FLOAT32.onnx_code)
    if node.input(scale_at + 1) is not None:
        zero = e("Cast", _spread(e, node, scale_at + 1), to=DType.FLOAT32.onnx_code)
        whole = e("Sub", whole, zero)
    return e("Transpose", e("Mul", whole, _spread(e, node, scale_at)), perm=(0, 2, 1))


def _spread(e: Emitter, node: OnnxNode, index: int) -> Value:
    """[directions] or [directions, columns] as it broadcasts to a weight."""
    axes = (1, 2) if node.rank(index) == 1 else (1,)
    return e("Unsqueeze", node.required(index), int64s(e, *axes))
