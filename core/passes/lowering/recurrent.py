"""Splits recurrent layers: one matrix product computes the inputs' part of all steps, a loop the states' part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.nn.recurrent import Recurrent
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult, has_ranks
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import Perm

_TIME_FIRST: Perm = (1, 0, 2)  # of X and of states; its own inverse
_BATCH_FIRST: Perm = (2, 0, 1, 3)  # of Y


@dataclass(frozen=True)
class SplitRecurrent:
    """Rewrites RNN, GRU and LSTM with constant float32 weights as a MatMul and RecurrentSteps."""

    name: str = "recurrent"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            op = registry.find(node.op)
            if isinstance(op, Recurrent) and has_ranks(node):
                _split(editor, node, op)
        return editor.finish()


def _split(editor: Editor, node: Node, op: Recurrent) -> None:
    x, w, r = node.inputs[0], editor.array(node.inputs[1]), editor.array(node.inputs[2])
    bias = editor.array(node.input(3))
    unknown_bias = bias is None and node.input(3) is not None
    if x is None or w is None or r is None or unknown_bias or x.dtype is not DType.FLOAT32:
        return
    batch_first = bool(node.attrs.get("layout", 0))
    if bias is None:
        bias = np.zeros((len(r), 2 * r.shape[1]), r.dtype)
    input_bias, state_bias = _biases(node, bias)
    x = editor.emit(node, "Transpose", x, attrs={"perm": _TIME_FIRST}) if batch_first else x
    weight = editor.constant(np.ascontiguousarray(w.reshape(-1, w.shape[2]).T), "w")
    product = editor.emit(node, "MatMul", x, weight)
    gates = editor.emit(node, "Add", product, editor.constant(input_bias.reshape(-1), "b"))
    states = [_initial_state(editor, node, index, batch_first) for index in range(5, 5 + op.states)]
    states += [None] * (2 - op.states)
    remaining = editor.constant(state_bias, "b") if state_bias is not None else None
    attrs: dict[str, Attr] = {name: value for name, value in node.attrs.items() if name != "layout"}
    results = editor.emit_many(
        node,
        "RecurrentSteps",
        [gates, node.inputs[2], remaining, node.input(4), *states, node.input(7)],
        1 + op.states,
        {**attrs, "cell": node.op},
    )
    perms = (_BATCH_FIRST, _TIME_FIRST, _TIME_FIRST)
    for old, new, perm in zip(node.outputs, results, perms, strict=False):
        last = editor.emit(node, "Transpose", new, attrs={"perm": perm}) if batch_first else new
        editor.replace(old, last)


def _biases(node: Node, bias: Array) -> tuple[Array, Array | None]:
    """From the bias [D, 2*G*H] of a layer: the bias [D, G*H] of the inputs' product, and that of the states' product.

    The second is None unless it must stay apart. D directions, G gates, H hidden units. A GRU with
    `linear_before_reset` applies the reset gate to the states' product and its bias; all other cells add both biases,
    so that one sum serves.
    """
    of_inputs, of_states = np.split(bias, 2, axis=1)
    if node.op == "GRU" and node.attrs.get("linear_before_reset", 0):
        return of_inputs, of_states
    return of_inputs + of_states, None


def _initial_state(editor: Editor, node: Node, index: int, batch_first: bool) -> Value | None:
    state = node.input(index)
    if state is None or not batch_first:
        return state
    return editor.emit(node, "Transpose", state, attrs={"perm": _TIME_FIRST})
