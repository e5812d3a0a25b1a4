"""Grouped-query attention: FusedAttention reads keys and values once per group, instead of repeated for each head.

The axis of the heads is split into two axes, groups and heads per group; keys and values have extent 1 along the
second. If there is a single query, the heads of a group take the place of the queries, as they attend to the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import Dim
from lathe.core.passes.rewrite.base import PassResult, can_reshape_to, is_view_node, shape_of
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import Perm, perm_attribute

_HEADS, _QUERIES = 1, 2  # axes of the scores [batch, heads, queries, keys]


@dataclass(frozen=True)
class FuseGroupedQueries:
    name: str = "grouped_queries"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op == "FusedAttention" and all(shape_of(value) is not None for value in node.inputs):
                _group(editor, node)
        return editor.finish()


@dataclass(frozen=True)
class _Groups:
    """The heads of an attention: `count` groups of `repeated` heads each. `single`: there is one query."""

    count: int
    repeated: int
    single: bool

    def split(self, dim: Dim) -> tuple[Dim, Dim]:
        """The two extents (groups, heads per group) that replace `dim`, the extent of the heads: (1, 1) for 1."""
        return (1, 1) if dim == 1 else (self.count, self.repeated)

    def wider(self, perm: Perm, moves: bool) -> Perm:
        """The permutation of an operand whose axis of heads is split in two, from `perm`, that of the original operand.

        The result has the axes batch, groups, heads per group, queries (or keys), columns. `moves`: the heads of a
        group and the queries are exchanged.
        """
        heads = perm[_HEADS]
        batch, queries, last = (axis + (axis > heads) for axis in (perm[0], *perm[_QUERIES:]))
        repeated = heads + 1
        return (batch, heads, *((queries, repeated) if moves else (repeated, queries)), last)

    def of_output(self, perm: Perm) -> Perm:
        """The permutation `perm_y` with the heads split; it applies to the result [batch, heads, queries, columns]."""
        places: tuple[Perm, ...] = ((0,), (1, 3), (2,), (4,)) if self.single else ((0,), (1, 2), (3,), (4,))
        return tuple(place for axis in perm for place in places[axis])


def _group(editor: Editor, node: Node) -> None:
    q, k, v, *extras = node.inputs
    perms = [perm_attribute(node, name) or (0, 1, 2, 3) for name in ("perm_q", "perm_k", "perm_v", "perm_y")]
    shape = shape_of(q)
    keys, values = _repeated_operand(k, perms[1]), _repeated_operand(v, perms[2])
    if q is None or shape is None or len(shape) != 4 or keys is None or values is None or keys[1:] != values[1:]:
        return
    groups = _Groups(keys[1], keys[2], shape[perms[0][_QUERIES]] == 1)
    split = _split_heads(shape, perms[0][_HEADS], groups)
    if shape[perms[0][_HEADS]] != groups.count * groups.repeated or not can_reshape_to(editor.graph, split):
        return
    wanted = [_extra_shape(value, groups) for value in extras]
    if not all(each is None or can_reshape_to(editor.graph, each) for each in wanted):
        return
    attrs: dict[str, Attr] = {name: value for name, value in node.attrs.items() if not name.startswith("perm")}
    attrs |= {"perm_q": groups.wider(perms[0], groups.single), "perm_y": groups.of_output(perms[3])}
    attrs |= {"perm_k": groups.wider(perms[1], False), "perm_v": groups.wider(perms[2], False)}
    pairs = zip(extras, wanted, strict=True)
    moved = [x if x is None or to is None else editor.reshaped(node, x, to) for x, to in pairs]
    inputs = (editor.reshaped(node, q, split), keys[0], values[0], *moved)
    new = editor.emit(node, node.op, *inputs, attrs=attrs)
    editor.replace(node.output, editor.reshaped(node, new, node.output.shape))


def _repeated_operand(value: Value | None, perm: Perm) -> tuple[Value, int, int] | None:
    """The tensor that keys or values repeat for the heads of a group, the number of groups, and the heads per group.

    `perm` permutes the operand. The tensor has extent 1 along the axis of the heads per group. None if the operand is
    not an Expand followed by a view that merges the two axes, or the two numbers are not known.
    """
    view = value.producer if value is not None else None
    source = view.inputs[0] if view is not None and is_view_node(view) else None
    expand = source.producer if source is not None else None
    shape, before = shape_of(value), shape_of(expand.inputs[0]) if expand is not None else None
    if expand is None or expand.op != "Expand" or source is None or shape is None or before is None:
        return None
    at, wide, inner = perm[_HEADS], source.shape, expand.inputs[0]
    if inner is None or len(shape) != 4 or len(wide) != 5 or before != (*wide[: at + 1], 1, *wide[at + 2 :]):
        return None
    count, repeated = wide[at], wide[at + 1]
    if not isinstance(count, int) or not isinstance(repeated, int) or repeated == 1:
        return None
    return (inner, count, repeated) if shape == (*wide[:at], count * repeated, *wide[at + 2 :]) else None


def _extra_shape(value: Value | None, groups: _Groups) -> tuple[Dim, ...] | None:
    """The shape, with split heads, to which an epilogue input is reshaped; None if it has fewer than three axes."""
    shape = shape_of(value)
    if shape is None or len(shape) < 3:
        return None
    *batch, heads, queries, keys = shape
    count, repeated = groups.split(heads)
    return (*batch, count, *((queries, repeated) if groups.single else (repeated, queries)), keys)


def _split_heads(shape: tuple[Dim, ...], axis: int, groups: _Groups) -> tuple[Dim, ...]:
    return (*shape[:axis], groups.count, groups.repeated, *shape[axis + 1 :])
