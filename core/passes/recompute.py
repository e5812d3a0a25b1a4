"""Recomputation: values that wait long for their readers are dropped and computed once more, to save memory.

In a training step the forward pass leaves its activations to the backward one, and at its end all of them are alive.
The pass looks at the step where most bytes are alive, and drops there the value that saves most: many bytes, needed
late, quick to compute again (the heuristic of Kirisame et al. 2021, "Dynamic Tensor Rematerialization", with the future
known). What such a computation reads is kept, or computed again with it, so chains come back from what was left at
their beginning, as in Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". That is repeated until the
limit holds. Results are the same numbers: the same kernels run once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import prod

from core.ir.graph import Graph, Node, Value, captures, node_reads
from core.ir.types import TensorType
from core.ops import registry
from core.passes.base import PassResult, is_elementwise, is_view_node
from core.passes.bodies import FUSED
from core.passes.permutation import perm_attribute

_LONGEST = 24  # nodes that are computed again for one value
_MATTERS = 500  # a value so many times smaller than all together is not worth dropping
_SMALL = 16  # a value so many times smaller than what it helps to compute is kept instead
_ELEMENT_COST = 25  # products that take as long as moving an element of memory
_CONTROL = frozenset({"If", "Loop", "Scan"})
_PATIENCE = 40  # values dropped in vain before it is the best that can be had


@dataclass(frozen=True)
class Recompute:
    """`limit`: how many bytes the values alive at any step may take, in the order of the graph's nodes.

    Where that cannot be reached, as near as it goes. Shapes must be known.
    """

    limit: int
    name: str = "recompute"

    def run(self, graph: Graph) -> PassResult:
        names, before = {value.name for value in graph.values()}, len(graph.nodes)
        best = _Best(graph)
        for dropped in count():
            lives = _Lives(graph)
            step, most = lives.peak()
            best.note(most, dropped)
            if most <= self.limit or dropped - best.dropped > _PATIENCE:
                break
            found = max(lives.droppable(step, most // _MATTERS), key=lambda drop: drop.worth, default=None)
            if found is None:
                break
            _drop(graph, lives, found, names)
        best.restore()
        again = len(graph.nodes) - before
        return PassResult(best.dropped, (f"{best.dropped} values dropped, {again} nodes run again",) if again else ())


class _Best:
    """The graph as it was when least was alive: a value dropped for one step may be missed at another."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.most: int | None = None
        self.dropped = 0
        self._nodes: list[tuple[Node, list[Value | None]]] = []

    def note(self, most: int, dropped: int) -> None:
        if self.most is None or most < self.most:
            self.most, self.dropped = most, dropped
            self._nodes = [(node, node.inputs) for node in self.graph.nodes]

    def restore(self) -> None:
        self.graph.nodes = [node for node, _ in self._nodes]
        for node, inputs in self._nodes:
            node.inputs = inputs


@dataclass(frozen=True)
class _Drop:
    """`value` is not kept from step `after` to step `until`, before which `again` compute it once more."""

    value: Value
    after: int
    until: int
    again: tuple[Node, ...]  # producers before their readers

    @property
    def worth(self) -> float:
        return _size(self.value) * (self.until - self.after) / sum(map(_cost, self.again))


@dataclass
class _Lives:
    """From when to when values live: roots, that is; views are other names of them."""

    graph: Graph
    at: dict[Node, int] = field(init=False)
    reads: dict[Value, list[int]] = field(default_factory=dict)
    kept: set[Value] = field(init=False)  # what ends up in outputs and states

    def __post_init__(self) -> None:
        self.at = {node: position for position, node in enumerate(self.graph.nodes)}
        self.kept = {root(value) for value in self.graph.live_outs()}
        for node, position in self.at.items():
            for value in node_reads(node):
                self.reads.setdefault(root(value), []).append(position)
        self.updates = {state.value: self._made(root(state.update)) for state in self.graph.states}

    def _made(self, value: Value) -> int:
        return self.at[value.producer] if value.producer is not None else len(self.at)

    def last(self, value: Value) -> int:
        return max(self.reads.get(value, ()), default=self._made(value))

    def peak(self) -> tuple[int, int]:
        """The step where most bytes are alive, and how many."""
        changes = [0] * (len(self.at) + 2)
        for value in self._stored():
            changes[self._made(value)] += _size(value)
            changes[self.last(value) + 1] -= _size(value)
        alive = list(accumulate(changes))
        for node, position in self.at.items():
            alive[position] -= self._replaced(node, position)
        most = max(alive)
        return alive.index(most), most

    def _stored(self) -> Iterable[Value]:
        """What the arena holds."""
        for node in self.graph.nodes:
            yield from (value for value in node.outputs if root(value) is value and value not in self.kept)

    def _replaced(self, node: Node, position: int) -> int:
        """Bytes of an input that dies here and whose place the output takes."""
        if not is_elementwise(node) or root(node.output) is not node.output:
            return 0
        size = _size(node.output)
        dying = (root(value) for value in node.inputs if value is not None)
        return size if any(v.producer and _size(v) == size and self.last(v) == position for v in dying) else 0

    def droppable(self, step: int, least: int) -> Iterable[_Drop]:
        """What could be dropped at a step, of at least so many bytes."""
        for value in (value for value in self._stored() if _size(value) >= least):
            late = [position for position in self.reads.get(value, ()) if position > step]
            if late and self._made(value) < step and min(late) > step + 1 and self._are_inputs(value, late):
                again = self._again(value, step, min(late))
                if again:
                    yield _Drop(value, step, min(late), again)

    def _are_inputs(self, value: Value, positions: Iterable[int]) -> bool:
        """Whether nodes read a value themselves, and no nested graph of theirs."""
        nodes = (self.graph.nodes[position] for position in positions)
        outer = (v for node in nodes for body in node.subgraphs for v in captures(body))
        return all(root(v) is not value for v in outer)

    def _again(self, value: Value, step: int, until: int) -> tuple[Node, ...]:
        """What has to run before step `until` to have a value once more; nothing if that cannot be."""
        found: dict[Value, Node] = {}
        small = _size(value) // _SMALL

        def possible(value: Value) -> bool:
            if value in found:
                return True
            node = _only(value)
            if node is None or len(found) >= _LONGEST:
                return False
            sources = [root(source) for source in node.inputs if source is not None]
            fine = all(self._is_there(source, step, until, small) or possible(source) for source in sources)
            found[value] = node
            return fine

        return tuple(found.values()) if possible(value) else ()

    def _is_there(self, value: Value, step: int, until: int, small: int) -> bool:
        """Whether a value exists at step `until`, or may be kept until then: it is alive now, or small."""
        if value in self.updates:
            return self.updates[value] > until
        return value.producer is None or value in self.kept or self.last(value) >= step or _size(value) <= small


def root(value: Value) -> Value:
    """The value whose bytes a chain of views shows."""
    while (node := value.producer) is not None and (is_view_node(node) or node.op == "Identity"):
        source = node.inputs[0]
        if source is None:
            break
        value = source
    return value


def _only(value: Value) -> Node | None:
    """The node that computes a value, without other results; None where it must not, or need not, run twice."""
    node = value.producer
    if node is None or not registry.get(node.op).pure or node.op in _CONTROL:
        return None
    if len(node.outputs) == 1:
        return node
    body = node.attrs.get("body")
    if node.op != FUSED or not isinstance(body, Graph):
        return None
    return _one_result(node, body, node.outputs.index(value))


def _one_result(node: Node, body: Graph, index: int) -> Node:
    """A fused node with one of its outputs, and what that needs."""
    own = body.clone()
    own.outputs = [own.outputs[index]]
    own.remove_dead()
    needed = {value for inner in own.nodes for value in node_reads(inner)}
    pairs = [(x, source) for x, source in zip(own.inputs, node.inputs, strict=True) if x in needed]
    own.inputs = [x for x, _ in pairs]
    again = Node(node.op, [source for _, source in pairs], [], {**node.attrs, "body": own}, node.name)
    again.outputs = [node.outputs[index]]  # of which this is another producer: a pattern for copies only
    return again


def _drop(graph: Graph, lives: _Lives, drop: _Drop, names: set[str]) -> list[Node]:
    """Compute a value again for all that read it late; returns the new nodes."""
    new: list[Node] = []
    copies: dict[Value, Value] = {}

    def copied(node: Node, inputs: list[Value | None]) -> Value:
        twin = Node(node.op, inputs, [], dict(node.attrs), node.name)
        twin.outputs = [Value(_fresh(names, node.output.name), node.output.type, twin)]
        new.append(twin)
        return twin.output

    def now(value: Value | None) -> Value | None:
        """What stands for a value, or a view of one, from here on."""
        if value is None or root(value) not in copies or value in copies:
            return copies.get(value, value) if value is not None else None
        view = value.producer
        if view is None or (view in lives.at and lives.at[view] > drop.after):
            return value
        copies[value] = copied(view, [now(source) for source in view.inputs])
        return copies[value]

    for node in drop.again:
        copies[node.output] = copied(node, [now(source) for source in node.inputs])
    for node in graph.nodes[drop.after + 1 :]:
        if any(source is not None and root(source) is drop.value for source in node.inputs):
            node.inputs = [now(source) if source and root(source) is drop.value else source for source in node.inputs]
    graph.nodes[drop.until : drop.until] = new
    return new


def _fresh(names: set[str], base: str) -> str:
    """`base` with a number that nothing has yet."""
    number = next(n for n in range(2, len(names) + 3) if f"{base}_{n}" not in names)
    names.add(f"{base}_{number}")
    return f"{base}_{number}"


def _size(value: Value) -> int:
    nbytes = value.type.nbytes if isinstance(value.type, TensorType) and value.type.is_static else 0
    return nbytes if isinstance(nbytes, int) else 0


def _cost(node: Node) -> int:
    """About how many products a node is worth in time."""
    elements = [_elements(value) for value in (*node.inputs, *node.outputs) if value is not None]
    return sum(elements) * _ELEMENT_COST + _elements(node.output) * _depth(node)


def _depth(node: Node) -> int:
    """How many products a result of a node is the sum of."""
    factor = node.input(1)
    if node.op == "FusedConv" and factor is not None:
        return prod(factor.tensor.evaluate({})[1:])
    if node.op != "FusedMatMul" or node.inputs[0] is None:
        return 0
    perm, extents = perm_attribute(node, "perm_a"), node.inputs[0].tensor.evaluate({})
    return extents[-1 if perm is None else perm[-1]]


def _elements(value: Value) -> int:
    return prod(value.tensor.evaluate({}))
