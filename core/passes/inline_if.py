"""An If becomes the branch it takes, where its condition is known or only one branch fits what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import ModelError, UnsupportedError
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import DType, TensorType
from core.ops.inference import infer_graph
from core.passes.base import Pass, PassResult
from core.passes.edit import Editor

_BRANCHES = ("then_branch", "else_branch")


@dataclass(frozen=True)
class InlineIf:
    """`between` runs after something was inlined and before the rest is tried again: what a branch computes may tell
    which one the next If takes, however many there are."""

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
            infer_graph(_inlined(graph.clone())[0])
        except ModelError as error:
            # An If may hide extents that only running tells: nodes after it that no type contradicts so far.
            return PassResult(0, (f"left as they are: {error}",))
        _, result = _inlined(graph)
        if result.changed:
            infer_graph(graph)  # types after a branch are those of the branch now
        return result


def _inlined(graph: Graph) -> tuple[Graph, PassResult]:
    editor = Editor(graph)
    while sum(_inline(editor, node) for node in editor.nodes()):
        pass  # the branch taken may hold another If
    known = infer_graph(graph)
    for node in editor.nodes():
        _inline_the_only_one(editor, node, known)
    return graph, editor.finish()


def _branch(graph: Graph, node: Node) -> Graph | None:
    """The branch that a node takes, if it is an If with a known condition."""
    condition = graph.constant_of(node.inputs[0]) if node.op == "If" else None
    if condition is None or condition.size != 1:
        return None
    branch = node.attrs["then_branch" if condition.item() else "else_branch"]
    return branch if isinstance(branch, Graph) else None


def _inline(editor: Editor, node: Node) -> bool:
    branch = _branch(editor.graph, node)
    if branch is None:
        return False
    for old, new in zip(node.outputs, editor.splice(node, branch), strict=True):
        editor.replace(old, new)
    return True


def _inline_the_only_one(editor: Editor, node: Node, known: Mapping[Value, Array]) -> None:
    """A model that serves two rates of sound has a branch for each, and a window of one rate's size fits only one. The
    other may still be asked for: that is an error then, as it was."""
    if node.op != "If" or node.inputs[0] is None or not all(isinstance(v.type, TensorType) for v in node.outputs):
        return
    then, other = (node.attrs[name] for name in _BRANCHES)
    assert isinstance(then, Graph)
    assert isinstance(other, Graph)
    misfits = [_misfit(branch, known) for branch in (then, other)]
    if None in misfits or all(misfits) or not any(misfits):
        return
    fits = not misfits[0]
    first = _zero_if(editor, node, fits, misfits[fits] or "")
    for old, new in zip(node.outputs, editor.splice(node, then if fits else other), strict=True):
        stacked = editor.emit(node, "Unsqueeze", new, attrs={"axes": (0,)})
        editor.replace(old, editor.emit(node, "Gather", stacked, first, attrs={"axis": 0}))


def _misfit(branch: Graph, known: Mapping[Value, Array]) -> str | None:
    """Why a node of a branch does not fit what it reads; "" where all fit, None where that is not known."""
    try:
        infer_graph(branch.clone(), dict(known))
    except UnsupportedError:
        return None
    except ModelError as error:
        return error.reason
    return ""


def _zero_if(editor: Editor, node: Node, wanted: bool, reason: str) -> Value:
    """0 where the condition of an If is the one that is wanted; else the node refuses its data. `reason`: why the other
    branch does not fit."""
    condition, label = node.inputs[0], node.name or node.outputs[0].name
    name = f"{label}, whose {_BRANCHES[wanted]} does not fit these shapes: {reason}"
    other = editor.emit(node, "Not", condition) if wanted else condition
    index = editor.emit(node, "Cast", other, attrs={"to": DType.INT64.onnx_code})
    index = editor.emit(node, "Reshape", index, attrs={"shape": ()})
    zero = editor.constant(np.zeros(1, np.int64), "zero")
    return editor.emit(node, "Gather", zero, index, attrs={"axis": 0}, name=name)
