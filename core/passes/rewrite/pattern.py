"""A declarative pattern matcher: a rewrite rule is a pattern and a function.

    Rule("silu", op("Mul", x, op("Sigmoid", x)), lambda e, m: e.emit(m.root, "Swish", m["x"]))

A pattern is a variable, a constant or an operator over patterns. A variable that occurs twice must match the same value
twice. Inputs of commutative operators match in either order. Values inside the pattern must have no readers outside it,
so that a rewrite never computes a value twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, Union

import numpy as np

from lathe.core.ir.graph import Array, Node, Value
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.editor import Editor

Pattern: TypeAlias = Union["Var", "Const", "Op"]


@dataclass(frozen=True, slots=True)
class Var:
    """A pattern that matches any value and binds it to the variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """A pattern that matches a constant whose array passes `test`, and binds the constant to `name` unless it is ""."""

    name: str
    test: Callable[[Array], bool]


@dataclass(frozen=True, slots=True)
class Op:
    """A pattern that matches the first output of a node with an operator in `ops`.

    The node must have as many inputs as `inputs`, each of which matches, and pass `test`. `name`: the name by which
    `Match.node` returns the node.
    """

    ops: tuple[str, ...]
    inputs: tuple[Pattern, ...]
    name: str = ""
    test: Callable[[Node], bool] = lambda node: True


@dataclass(frozen=True)
class Match:
    """One match of a pattern: its root, the values of variables by name, and the matched nodes, some of them by name.

    `root` is the node whose output the whole pattern matches.
    """

    root: Node
    values: Mapping[str, Value] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    named: Mapping[str, Node] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def node(self, name: str) -> Node:
        """The node that the operator pattern of this name matched. KeyError if there is none."""
        return self.named[name]

    def bind(self, name: str, value: Value) -> Match | None:
        """This match with `name` bound to `value`; None if `name` is already bound to another value."""
        if self.values.get(name, value) is not value:
            return None
        return replace(self, values={**self.values, name: value})

    def with_node(self, node: Node, name: str) -> Match:
        named = {**self.named, name: node} if name else self.named
        return replace(self, nodes=(*self.nodes, node), named=named)


Rewrite: TypeAlias = Callable[[Editor, Match], Value | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite rule: where `pattern` matches, the value that `rewrite` returns replaces the output of the root node.

    If `rewrite` returns None, nothing is replaced.
    """

    name: str
    pattern: Op
    rewrite: Rewrite


def var(name: str) -> Var:
    return Var(name)


def const(name: str, test: Callable[[Array], bool] = lambda array: True) -> Const:
    return Const(name, test)


def scalar(value: float, tolerance: float = 1e-5) -> Const:
    """A pattern for a numeric constant of one element, of any rank, within a relative `tolerance` of `value`."""
    return Const("", lambda a: a.size == 1 and a.dtype.kind in "fiu" and is_close(a.item(), value, tolerance))


def op(names: str, *inputs: Pattern, name: str = "", test: Callable[[Node], bool] = lambda node: True) -> Op:
    """An operator pattern; `names` may list alternatives: "Div|Mul"."""
    return Op(tuple(names.split("|")), inputs, name, test)


def any_order(operator: str, a: Pattern, b: Pattern, c: Pattern) -> list[Op]:
    """Patterns for the three groupings of `a * b * c` under an associative, commutative operator of two inputs."""
    return [op(operator, op(operator, x, y), z) for x, y, z in ((a, b, c), (a, c, b), (b, c, a))]


def is_close(value: float, expected: float, tolerance: float = 1e-5) -> bool:
    return bool(abs(value - expected) <= tolerance * max(abs(expected), 1e-30))


def match(pattern: Op, root: Node, editor: Editor) -> Match | None:
    """The first match of `pattern` in which `root` is the node whose output the whole pattern matches, or None.

    No node outside the match may read a value inside it, except the output of `root`.
    """
    for found in _match_node(pattern, root, Match(root), editor):
        if _is_private(found, editor):
            return found
    return None


def apply(editor: Editor, rules: Sequence[Rule]) -> None:
    """Applies to each node the first of `rules` that changes something, in sweeps until one changes nothing.

    The number of uses of each rule is added to the editor's notes.
    """
    counts: dict[str, int] = {}
    table = _by_operator(rules)
    while _sweep(editor, table, counts):
        pass
    editor.notes += [f"{name}: {count}" for name, count in sorted(counts.items())]


def _by_operator(rules: Sequence[Rule]) -> dict[str, list[Rule]]:
    table: dict[str, list[Rule]] = {}
    for rule in rules:
        for operator in rule.pattern.ops:
            table.setdefault(operator, []).append(rule)
    return table


def _sweep(editor: Editor, table: Mapping[str, Sequence[Rule]], counts: dict[str, int]) -> bool:
    before = editor.changed
    for node in editor.nodes():
        for rule in table.get(node.op, ()):
            if _try(editor, rule, node):
                counts[rule.name] = counts.get(rule.name, 0) + 1
                break
    return editor.changed > before


def _try(editor: Editor, rule: Rule, node: Node) -> bool:
    found = match(rule.pattern, node, editor)
    if found is None:
        return False
    before = editor.changed
    new = rule.rewrite(editor, found)
    if new is not None:
        editor.replace(node.output, new)
    return editor.changed > before


def _match_value(pattern: Pattern, value: Value, so_far: Match, editor: Editor) -> Iterator[Match]:
    match pattern:
        case Var(name):
            bound = so_far.bind(name, value)
        case Const(name, test):
            array = editor.array(value)
            bound = None
            if array is not None and test(array):
                bound = so_far.bind(name, value) if name else so_far
        case Op():
            if value.producer is not None and value is value.producer.output:
                yield from _match_node(pattern, value.producer, so_far, editor)
            return
    if bound is not None:
        yield bound


def _match_node(pattern: Op, node: Node, so_far: Match, editor: Editor) -> Iterator[Match]:
    if node.op not in pattern.ops or len(node.inputs) != len(pattern.inputs) or not pattern.test(node):
        return
    here = so_far.with_node(node, pattern.name)
    for inputs in _orders(node):
        yield from _match_inputs(pattern.inputs, inputs, here, editor)


def _match_inputs(
    patterns: Sequence[Pattern], values: Sequence[Value | None], so_far: Match, editor: Editor
) -> Iterator[Match]:
    if not patterns:
        yield so_far
        return
    if values[0] is None:
        return
    for found in _match_value(patterns[0], values[0], so_far, editor):
        yield from _match_inputs(patterns[1:], values[1:], found, editor)


def _orders(node: Node) -> Iterator[Sequence[Value | None]]:
    yield node.inputs
    if registry.get(node.op).commutative and len(node.inputs) == 2:
        yield node.inputs[::-1]


def _is_private(found: Match, editor: Editor) -> bool:
    """Whether no value inside the pattern, except the root's output, has a reader outside it."""
    nodes = set(found.nodes)
    inside = [value for node in nodes - {found.root} for value in node.outputs]
    return all(not editor.is_output(v) and nodes.issuperset(editor.readers(v)) for v in inside)


def is_constant(value: float) -> Callable[[Array], bool]:
    """A test for arrays of at least one element in which every element is exactly `value`."""
    return lambda array: array.size > 0 and bool(np.all(array == value))
