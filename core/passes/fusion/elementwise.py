"""Fuses connected elementwise nodes of one shape into one FusedElementwise: each tensor is read and written once.

Groups grow in the order of the nodes. A fused group takes the position of its last node. So a node may join a group
only if no node outside the group, and before that position, reads from the group. No node is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.rewrite.base import PassResult, is_elementwise, shape_of
from lathe.core.passes.rewrite.bodies import FUSED, Body
from lathe.core.passes.rewrite.editor import Editor

_DTYPES = frozenset(
    {DType.FLOAT32, DType.FLOAT64, DType.BOOL} | {DType.INT32, DType.INT64, DType.INT8, DType.UINT8, DType.UINT32}
)


@dataclass(eq=False)
class _Group:
    nodes: list[Node] = field(default_factory=list)

    @property
    def results(self) -> list[Value]:
        return [value for node in self.nodes for value in node.outputs]


@dataclass(frozen=True)
class FuseElementwise:
    """Fuses elementwise nodes into FusedElementwise.

    `most_nodes` and `most_tensors` (read and written) limit one kernel, so that it does not spill registers.
    """

    most_nodes: int = 32
    most_tensors: int = 10
    name: str = "elementwise"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for group in self._groups(editor):
            if len(group.nodes) > 1:
                _fuse(editor, group)
        return editor.finish()

    def _groups(self, editor: Editor) -> list[_Group]:
        groups: dict[Node, _Group] = {}
        place = {node: position for position, node in enumerate(editor.graph.nodes)}
        for node in editor.nodes():
            if not _is_candidate(node):
                continue
            group = _Group([node])
            groups[node] = group
            for other in _producing_groups(node, groups):
                merged = _Group(sorted([*other.nodes, *group.nodes], key=place.__getitem__))
                if self._fits(editor, merged) and _is_convex(editor, merged, groups, place, node):
                    group = merged
                    groups.update(dict.fromkeys(merged.nodes, merged))
        return list(dict.fromkeys(groups.values()))

    def _fits(self, editor: Editor, group: _Group) -> bool:
        members = set(group.nodes)
        results = set(group.results)
        reads = {
            value
            for node in group.nodes
            for value in node.inputs
            if value is not None and value not in results and not _is_number(value)
        }
        writes = _outputs(editor, group, members)
        return len(group.nodes) <= self.most_nodes and len(reads) + len(writes) <= self.most_tensors


def _is_candidate(node: Node) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    typed = all(isinstance(value.type, TensorType) and value.dtype in _DTYPES for value in values)
    ranked = all(shape_of(value) is not None for value in values)
    return typed and ranked and (node.op == FUSED or is_elementwise(node))


def _is_number(value: Value) -> bool:
    """Whether a value has one element: the kernel keeps it in a register, or it is a literal of the code."""
    return value.tensor.size == 1


def _producing_groups(node: Node, groups: dict[Node, _Group]) -> list[_Group]:
    """The groups, each once, of the nodes that compute inputs of `node`, if these have the shape of its output."""
    shape = shape_of(node.output)
    producers = [value.producer for value in node.inputs if value is not None and value.producer in groups]
    same = [groups[p] for p in producers if p is not None and shape_of(p.output) == shape]
    return list(dict.fromkeys(same))


def _is_convex(editor: Editor, group: _Group, groups: dict[Node, _Group], place: dict[Node, int], last: Node) -> bool:
    """Whether the whole group can run at the position of `last`: all readers outside the group run later.

    `place` has the position of each node. A reader that is in another group runs where the last node of that group is.
    """
    members = set(group.nodes)
    for value in group.results:
        for reader in editor.readers(value):
            if reader not in members and max(map(place.__getitem__, _group_nodes(reader, groups))) < place[last]:
                return False
    return True


def _group_nodes(node: Node, groups: dict[Node, _Group]) -> list[Node]:
    return groups[node].nodes if node in groups else [node]


def _outputs(editor: Editor, group: _Group, members: set[Node]) -> list[Value]:
    """The group's results that are outputs of the graph, or that a node outside `members`, its nodes, reads."""
    return [v for v in group.results if editor.is_output(v) or not members.issuperset(editor.readers(v))]


def _fuse(editor: Editor, group: _Group) -> None:
    body = Body(editor.graph.constants, "body")
    for node in group.nodes:
        body.add(node)
    outer = _outputs(editor, group, set(group.nodes))
    body.graph.outputs = [body.inner[value] for value in outer]
    label = "+".join(dict.fromkeys(node.op for node in group.nodes if node.op != FUSED))
    inputs, attrs = body.arguments, {"body": body.graph}
    last = group.nodes[-1]
    results = editor.emit_many(last, FUSED, inputs, len(outer), attrs, last.name or label)
    for old, new in zip(outer, results, strict=True):
        editor.replace(old, new)
