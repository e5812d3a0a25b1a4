"""Bias correction: takes the mean error of rounded weights out of the results of a product.

Nagel et al. 2019 (https://arxiv.org/abs/1906.04721), section 4.2. The mean of the error is (W - rounded W) @ E[x],
which the bias can absorb. E[x] comes from the calibration data. For convolutions the zeros of the padding are left out
of account.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.products import between_layouts
from lathe.core.ir.graph import Node
from lathe.core.passes.rewrite.editor import Editor


def mean_error(node: Node, difference: NDArray[np.float32], mean: NDArray[np.float64]) -> NDArray[np.float32]:
    """The mean of the product of `difference` (weights in the layout of `node`) and an input of this mean, [channels].

    `mean` has a number for each channel of the input of a Conv, or for each column of that of a MatMul or Gemm.
    """
    if node.op != "Conv":
        return np.asarray(mean @ between_layouts(node, difference), np.float32)
    sums = difference.reshape(*difference.shape[:2], -1).sum(axis=-1, dtype=np.float64)  # [outputs, inputs of a group]
    groups = len(mean) // sums.shape[1]
    by_group = sums.reshape(groups, -1, sums.shape[1])
    return np.asarray((by_group * mean.reshape(groups, 1, -1)).sum(axis=-1).reshape(-1), np.float32)


def add_to_bias(editor: Editor, node: Node, shift: NDArray[np.float32]) -> bool:
    """Add `shift` [channels] to the results of a product, in its bias or in the constant that is added to it alone.

    A Conv or Gemm without a bias gets one. False, without a change, if there is no such place.
    """
    bias, array = node.input(2), editor.array(node.input(2))
    if node.op != "MatMul":
        if bias is not None and (array is None or array.shape != shift.shape):
            return False
        total = shift if array is None else array + shift
        name = bias.name if bias is not None else f"{node.name}_bias"
        editor.set_inputs(node, [*node.inputs[:2], editor.constant(total.astype(np.float32), f"{name}_corrected")])
        return True
    reader = editor.only_reader(node.output)
    if reader is None or reader.op != "Add":
        return False
    for place, value in enumerate(reader.inputs):
        array = editor.array(value)
        if value is not None and array is not None and array.shape == shift.shape:
            inputs = list(reader.inputs)
            inputs[place] = editor.constant((array + shift).astype(np.float32), f"{value.name}_corrected")
            editor.set_inputs(reader, inputs)
            return True
    return False
