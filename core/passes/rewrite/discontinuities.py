"""Finds discontinuous operators (Floor, comparisons), whose results can change with the last bit of an input.

IEEE 754 defines x / c to the last bit, and models rely on that where they sort numbers into buckets: Floor(x / 41) is 1
for x = 41, while x * (1 / 41) rounds to a little less than 1. So a rewrite that changes rounding is allowed only where
no discontinuous operator reads the result, directly or through others. The search stops at operators whose last bits
ONNX leaves undefined (`OpDef.rounds_freely`).
"""

from __future__ import annotations

from dataclasses import replace

from lathe.core.ir.graph import SHAPE_ONLY_OPS, Node, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.pattern import Match, Rule


def reaches_discontinuity(editor: Editor, value: Value, inside: bool = False) -> bool:
    """Whether a discontinuous operator may read `value`, directly or through others, across updates of states.

    `inside`: the graph is a body, and unknown nodes of the outer graph read its outputs. Then each output counts as
    read by a discontinuous operator.
    """
    updates = {state.update: state.value for state in editor.graph.states}
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if inside and editor.is_output(current):
            return True
        reached = [updates[current]] if current in updates else []
        for node in editor.readers(current):
            if node.op in SHAPE_ONLY_OPS or registry.get(node.op).rounds_freely:
                continue
            if _is_discontinuous(node):
                return True
            reached += node.outputs
        pending += [each for each in reached if each not in seen]
        seen.update(reached)
    return False


def unless_discontinuous(rule: Rule, inside: bool) -> Rule:
    """`rule`, restricted to places where no discontinuous operator may read its result (`reaches_discontinuity`)."""

    def rewrite(e: Editor, m: Match) -> Value | None:
        return None if reaches_discontinuity(e, m.root.output, inside) else rule.rewrite(e, m)

    return replace(rule, rewrite=rewrite)


def _is_discontinuous(node: Node) -> bool:
    """Whether a small change of an input may change an output by much.

    True for outputs that are integers or booleans, for operators without a useful derivative, and for any node with a
    body, since bodies are not analysed.
    """
    op = registry.get(node.op)
    jumps = op.jumps or op.differentiation in ("zero", "none", "")
    return jumps or bool(node.subgraphs) or not all(_is_float(value) for value in node.outputs)


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype.is_float
