"""An If whose condition is known becomes the branch it takes."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ModelError
from core.ir.graph import Graph, Node
from core.ops.inference import infer_graph
from core.passes.base import PassResult
from core.passes.edit import Editor


@dataclass(frozen=True)
class InlineIf:
    name: str = "inline_if"

    def run(self, graph: Graph) -> PassResult:
        if not any(_branch(graph, node) for node in graph.nodes):
            return PassResult(0)
        try:
            infer_graph(_inlined(graph.clone())[0])
        except ModelError as error:
            # An If may hide extents that only running tells: nodes after it that no type contradicts so far.
            return PassResult(0, (f"left as they are: {error}",))
        _, result = _inlined(graph)
        infer_graph(graph)  # types after a branch are those of the branch now
        return result


def _inlined(graph: Graph) -> tuple[Graph, PassResult]:
    editor = Editor(graph)
    while sum(_inline(editor, node) for node in editor.nodes()):
        pass  # the branch taken may hold another If
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
