"""Moves factors of channels from an activation into the weights that read it, without changing the products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.graph import Node, Value
from lathe.core.passes.rewrite.editor import Editor

_NORMS = ("LayerNormalization", "RMSNormalization")


def divide_input(editor: Editor, value: Value, readers: Sequence[Node], factors: NDArray[np.float32]) -> Value:
    """`value` [..., K] divided by `factors` [K] along its last axis, as input 0 of the products `readers`.

    If a LayerNormalization or RMSNormalization computes `value`, only `readers` read it, and its scale and bias are
    constants [K], these are divided, and the result is `value`. Otherwise a Mul is added before the first reader, and
    becomes input 0 of all. The caller multiplies the weights.
    """
    divided = _divided_at_producer(editor, value, readers, factors)
    if divided is not None:
        return divided
    inverse = editor.constant((1 / factors).astype(np.float32), f"{value.name}_inverse")
    divided = editor.emit(readers[0], "Mul", value, inverse, name=f"{value.name}_divided")
    for node in readers:
        editor.set_inputs(node, [divided, *node.inputs[1:]])
    return divided


def _divided_at_producer(
    editor: Editor, value: Value, readers: Sequence[Node], factors: NDArray[np.float32]
) -> Value | None:
    """`value` itself, after the constants of the normalization that computes it were divided.

    None, and no change, unless a normalization computes it whose scale and bias are constants of the shape of
    `factors`, only `readers` read it, and it is no output.
    """
    node = value.producer
    if node is None or node.op not in _NORMS or editor.is_output(value) or set(editor.readers(value)) - set(readers):
        return None
    places = [index for index in (1, 2) if node.input(index) is not None]
    arrays = [editor.array(node.input(index)) for index in places]
    if any(array is None or array.shape != factors.shape for array in arrays):
        return None
    inputs = list(node.inputs)
    for index, array in zip(places, arrays, strict=True):
        assert array is not None
        inputs[index] = editor.constant((array / factors).astype(np.float32), f"{value.name}_divided")
    editor.set_inputs(node, inputs)
    return value
