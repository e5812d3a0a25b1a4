"""Whether the last bit of a value can decide something: whether a step, such as Floor or a comparison, sees it.

IEEE 754 says what x / c is to the last bit, and models rely on that where they cut a number into buckets: Floor(x / 41)
is 1 for x = 41, while x * (1 / 41) is a little less than 1. So a rewrite that rounds otherwise must not be seen by a
step. It is not seen behind operators whose last bits ONNX leaves open (`OpDef.rounds_freely`).
"""

from __future__ import annotations

from dataclasses import replace

from core.ir.graph import OF_TYPES, Node, Value
from core.ir.types import TensorType
from core.ops import registry
from core.passes.edit import Editor
from core.passes.pattern import Match, Rule


def decides(editor: Editor, value: Value, inside: bool = False) -> bool:
    """Whether a step may see the bits of `value`. `inside`: other graphs, which are not known, read the outputs."""
    updates = {state.update: state.value for state in editor.graph.states}
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if inside and editor.is_output(current):
            return True
        reached = [updates[current]] if current in updates else []
        for node in editor.readers(current):
            if node.op in OF_TYPES or registry.get(node.op).rounds_freely:
                continue
            if _is_step(node):
                return True
            reached += node.outputs
        pending += [each for each in reached if each not in seen]
        seen.update(reached)
    return False


def unseen(rule: Rule, inside: bool) -> Rule:
    """The rule where no step sees its result."""

    def rewrite(e: Editor, m: Match) -> Value | None:
        return None if decides(e, m.root.output, inside) else rule.rewrite(e, m)

    return replace(rule, rewrite=rewrite)


def _is_step(node: Node) -> bool:
    """Whether a small change of an input may change an output by much. So it is wherever numbers become integers or
    truth values, and wherever it is not known that they do not: bodies are not looked into."""
    op = registry.get(node.op)
    flat = op.jumps or op.differentiation in ("zero", "none", "")
    return flat or bool(node.subgraphs) or not all(_is_real(value) for value in node.outputs)


def _is_real(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype.is_float
