"""Inlines the branch of an If whose condition is constant, or of which only one branch passes type inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.rewrite.base import Pass, PassResult
from lathe.core.passes.rewrite.editor import Editor

_BRANCHES = ("then_branch", "else_branch")


@dataclass(frozen=True)
class InlineIf:
    """Inlines branches of If. `between`: passes that run after each round of inlining, before the next round.

    An inlined branch may compute the condition of another If.
    """

    between: Sequence[Pass] = ()
    name: str = "inline_if"

    def run(self, graph: Graph) -> PassResult:
        result = self._once(graph)
        changed = result.changed
        while result.changed and self.between:
            changed += sum(step.run(graph).changed for step in self.between)
            result = self._once(graph)
            changed += result.changed
        return PassResult(changed, result.notes)

    def _once(self, graph: Graph) -> PassResult:
        if not any(node.op == "If" for node in graph.nodes):
            return PassResult(0)
        try:
            infer_graph(_inline_all(graph.clone())[0])
        except ModelError as error:
            # The outputs of an If may have unknown extents. Those of the branch may contradict nodes that follow it.
            return PassResult(0, (f"left as they are: {error}",))
        _, result = _inline_all(graph)
        if result.changed:
            infer_graph(graph)  # the types of the branch are more precise than those of the If
        return result


def _inline_all(graph: Graph) -> tuple[Graph, PassResult]:
    editor = Editor(graph)
    while sum(_inline(editor, node) for node in editor.nodes()):
        pass  # an inlined branch may contain another If
    known = infer_graph(graph)
    for node in editor.nodes():
        _inline_only_valid_branch(editor, node, known)
    return graph, editor.finish()


def _taken_branch(graph: Graph, node: Node) -> Graph | None:
    """The branch that an If with a constant condition takes; None for any other node."""
    condition = graph.constant_of(node.inputs[0]) if node.op == "If" else None
    if condition is None or condition.size != 1:
        return None
    branch = node.attrs["then_branch" if condition.item() else "else_branch"]
    return branch if isinstance(branch, Graph) else None


def _inline(editor: Editor, node: Node) -> bool:
    branch = _taken_branch(editor.graph, node)
    if branch is None:
        return False
    for old, new in zip(node.outputs, editor.splice(node, branch), strict=True):
        editor.replace(old, new)
    return True


def _inline_only_valid_branch(editor: Editor, node: Node, known: Mapping[Value, Array]) -> None:
    """Inlines the one branch that passes type inference, if the other does not.

    A model for two audio sample rates has a branch for each, and a given window size fits only one of them. A run whose
    condition selects the other branch still fails: an added Gather checks the condition. Nothing is done if an output
    of the If is no tensor, or a branch has an unsupported operator.
    """
    if node.op != "If" or node.inputs[0] is None or not all(isinstance(v.type, TensorType) for v in node.outputs):
        return
    then, other = (node.attrs[name] for name in _BRANCHES)
    assert isinstance(then, Graph)
    assert isinstance(other, Graph)
    misfits = [_misfit(branch, known) for branch in (then, other)]
    if None in misfits or all(misfits) or not any(misfits):
        return
    then_fits = not misfits[0]
    zero = _zero_if(editor, node, then_fits, misfits[then_fits] or "")
    for old, new in zip(node.outputs, editor.splice(node, then if then_fits else other), strict=True):
        stacked = editor.emit(node, "Unsqueeze", new, attrs={"axes": (0,)})
        editor.replace(old, editor.emit(node, "Gather", stacked, zero, attrs={"axis": 0}))


def _misfit(branch: Graph, known: Mapping[Value, Array]) -> str | None:
    """The error of type inference in a branch; "" if it passes, None if the branch has an unsupported operator."""
    try:
        infer_graph(branch.clone(), dict(known))
    except UnsupportedError:
        return None
    except ModelError as error:
        return error.reason
    return ""


def _zero_if(editor: Editor, node: Node, wanted: bool, reason: str) -> Value:
    """An index that is 0 if the condition of an If equals `wanted`; otherwise the run fails at the new Gather.

    The Gather reads a tensor of one element, so that any other condition is an index out of range. `reason` is the
    error of the other branch, and part of the name of the Gather.
    """
    condition, label = node.inputs[0], node.name or node.outputs[0].name
    name = f"{label}, whose {_BRANCHES[wanted]} does not fit these shapes: {reason}"
    other = editor.emit(node, "Not", condition) if wanted else condition
    index = editor.emit(node, "Cast", other, attrs={"to": DType.INT64.onnx_code})
    index = editor.emit(node, "Reshape", index, attrs={"shape": ()})
    zero = editor.constant(np.zeros(1, np.int64), "zero")
    return editor.emit(node, "Gather", zero, index, attrs={"axis": 0}, name=name)
