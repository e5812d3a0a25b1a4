"""Rematerialization (activation checkpointing): drops values that wait long for their readers, and recomputes them.

In a training step the backward pass reads the activations of the forward pass, so all of them are alive between the
two. The pass finds the step where most bytes are alive and drops the value there that is large, needed late and cheap
to recompute. This is the heuristic of Kirisame et al. 2021, "Dynamic Tensor Rematerialization", with known future
reads. The inputs of a recomputation are kept, or recomputed with it, so whole chains restart from a kept value, as in
Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The pass repeats this until the peak is within the
limit. Results do not change by a bit: the same kernels run a second time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import prod

from lathe.core.ir.graph import Graph, Node, Value, captures, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult, is_elementwise, is_view_node
from lathe.core.passes.rewrite.bodies import FUSED
from lathe.core.passes.rewrite.permutation import perm_attribute

_LONGEST = 24  # the most nodes that are recomputed for one value
_MATTERS = 500  # a value smaller than 1/500 of the peak is not worth dropping
_SMALL = 16  # an input smaller than 1/16 of the dropped value is kept instead of recomputed
_ELEMENT_COST = 25  # cost model: moving one element through memory costs as much as 25 multiplications
_CONTROL = frozenset({"If", "Loop", "Scan"})
_PATIENCE = 40  # the search ends after more than 40 drops without a lower peak


@dataclass(frozen=True)
class Recompute:
    """Drops and recomputes values until at most `limit` bytes are alive at every step, in the order of the nodes.

    If the limit cannot be reached, the pass keeps the lowest peak that it found. All shapes must be numbers.
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
        added = len(graph.nodes) - before
        return PassResult(best.dropped, (f"{best.dropped} values dropped, {added} nodes run again",) if added else ())


class _Best:
    """A snapshot of the graph with the lowest peak: dropping a value for one step may raise the peak at another."""

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
    """Frees `value` after step `after`; the nodes `recomputed` compute it again before step `until`."""

    value: Value
    after: int
    until: int
    recomputed: tuple[Node, ...]  # producers before their readers

    @property
    def worth(self) -> float:
        """The benefit: bytes times the steps without them, per multiplication of the recomputation."""
        return _size(self.value) * (self.until - self.after) / sum(map(_cost, self.recomputed))


@dataclass
class _Lives:
    """The lifetimes of values, in steps. Views share the bytes of their roots, so only roots have lifetimes."""

    graph: Graph
    at: dict[Node, int] = field(init=False)
    reads: dict[Value, list[int]] = field(default_factory=dict)
    live_out: set[Value] = field(init=False)  # roots of outputs and of updates of states

    def __post_init__(self) -> None:
        self.at = {node: position for position, node in enumerate(self.graph.nodes)}
        self.live_out = {root(value) for value in self.graph.live_outs()}
        for node, position in self.at.items():
            for value in node_reads(node):
                self.reads.setdefault(root(value), []).append(position)
        self.updates = {state.value: self._made(root(state.update)) for state in self.graph.states}

    def _made(self, value: Value) -> int:
        return self.at[value.producer] if value.producer is not None else len(self.at)

    def last(self, value: Value) -> int:
        return max(self.reads.get(value, ()), default=self._made(value))

    def peak(self) -> tuple[int, int]:
        """The index of the first node at which most bytes are alive, and their number."""
        changes = [0] * (len(self.at) + 2)
        for value in self._stored():
            changes[self._made(value)] += _size(value)
            changes[self.last(value) + 1] -= _size(value)
        alive = list(accumulate(changes))
        for node, position in self.at.items():
            alive[position] -= self._bytes_in_place(node, position)
        most = max(alive)
        return alive.index(most), most

    def _stored(self) -> Iterable[Value]:
        """Yield the results of nodes that need room in the arena: no views, outputs or updates of states."""
        for node in self.graph.nodes:
            yield from (value for value in node.outputs if root(value) is value and value not in self.live_out)

    def _bytes_in_place(self, node: Node, position: int) -> int:
        """The bytes of the output if an elementwise node can overwrite an input that dies here, otherwise 0."""
        if not is_elementwise(node) or root(node.output) is not node.output:
            return 0
        size = _size(node.output)
        dying = (root(value) for value in node.inputs if value is not None)
        return size if any(v.producer and _size(v) == size and self.last(v) == position for v in dying) else 0

    def droppable(self, step: int, least: int) -> Iterable[_Drop]:
        """Yield possible drops at `step`: values of at least `least` bytes that are computed before it and read later.

        The first later read must be after the next step, and all later reads must be inputs of nodes.
        """
        for value in (value for value in self._stored() if _size(value) >= least):
            late = [position for position in self.reads.get(value, ()) if position > step]
            if late and self._made(value) < step and min(late) > step + 1 and self._are_inputs(value, late):
                recomputed = self._recomputation(value, step, min(late))
                if recomputed:
                    yield _Drop(value, step, min(late), recomputed)

    def _are_inputs(self, value: Value, positions: Iterable[int]) -> bool:
        """Whether no body of the nodes at these positions captures the value, so that they read it as an input."""
        nodes = (self.graph.nodes[position] for position in positions)
        outer = (v for node in nodes for body in node.subgraphs for v in captures(body))
        return all(root(v) is not value for v in outer)

    def _recomputation(self, value: Value, step: int, until: int) -> tuple[Node, ...]:
        """The nodes, in order, that must run before step `until` to recompute a value that is freed after `step`.

        Empty if some node must not run twice, or the chain is too long.
        """
        found: dict[Value, Node] = {}
        small = _size(value) // _SMALL

        def can_recompute(value: Value) -> bool:
            if value in found:
                return True
            node = _sole_producer(value)
            if node is None or len(found) >= _LONGEST:
                return False
            sources = [root(source) for source in node.inputs if source is not None]
            available = all(
                self._is_available(source, step, until, small) or can_recompute(source) for source in sources
            )
            found[value] = node
            return available

        return tuple(found.values()) if can_recompute(value) else ()

    def _is_available(self, value: Value, step: int, until: int, small: int) -> bool:
        """Whether a value exists at step `until`, or may be kept until then.

        It may be kept if it is alive at `step`, or has at most `small` bytes. A state exists until its update is
        computed.
        """
        if value in self.updates:
            return self.updates[value] > until
        return value.producer is None or value in self.live_out or self.last(value) >= step or _size(value) <= small


def root(value: Value) -> Value:
    """The value whose bytes `value` shares through views and Identity: the start of the chain, or `value` itself."""
    while (node := value.producer) is not None and (is_view_node(node) or node.op == "Identity"):
        source = node.inputs[0]
        if source is None:
            break
        value = source
    return value


def _sole_producer(value: Value) -> Node | None:
    """A node that computes this value and no other; None if there is none that may run twice.

    Random and control-flow nodes must not run twice. For a FusedElementwise with several outputs, the result is a new
    node with one of them; None for other nodes with several outputs.
    """
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
    """A copy of a fused node (with scalar body `body`) with output `index` alone, and only the inputs it needs."""
    own = body.clone()
    own.outputs = [own.outputs[index]]
    own.remove_dead()
    needed = {value for inner in own.nodes for value in node_reads(inner)}
    pairs = [(x, source) for x, source in zip(own.inputs, node.inputs, strict=True) if x in needed]
    own.inputs = [x for x, _ in pairs]
    template = Node(node.op, [source for _, source in pairs], [], {**node.attrs, "body": own}, node.name)
    template.outputs = [node.outputs[index]]  # a second producer of this value: only ever copied, never inserted
    return template


def _drop(graph: Graph, lives: _Lives, drop: _Drop, names: set[str]) -> list[Node]:
    """Recomputes a value before step `until`, and makes all later readers read the copy; returns the new nodes."""
    new: list[Node] = []
    copies: dict[Value, Value] = {}

    def copy_node(node: Node, inputs: list[Value | None]) -> Value:
        twin = Node(node.op, inputs, [], dict(node.attrs), node.name)
        twin.outputs = [Value(_fresh(names, node.output.name), node.output.type, twin)]
        new.append(twin)
        return twin.output

    def copy_of(value: Value | None) -> Value | None:
        """The copy that replaces a value, or a view of one; the value itself if it is not recomputed."""
        if value is None or root(value) not in copies or value in copies:
            return copies.get(value, value) if value is not None else None
        view = value.producer
        if view is None or (view in lives.at and lives.at[view] > drop.after):
            return value
        copies[value] = copy_node(view, [copy_of(source) for source in view.inputs])
        return copies[value]

    for node in drop.recomputed:
        copies[node.output] = copy_node(node, [copy_of(source) for source in node.inputs])
    for node in graph.nodes[drop.after + 1 :]:
        if any(source is not None and root(source) is drop.value for source in node.inputs):
            node.inputs = [
                copy_of(source) if source and root(source) is drop.value else source for source in node.inputs
            ]
    graph.nodes[drop.until : drop.until] = new
    return new


def _fresh(names: set[str], base: str) -> str:
    """The first of `base_2`, `base_3`, ... that is not in `names`; adds it to `names`."""
    number = next(n for n in range(2, len(names) + 3) if f"{base}_{n}" not in names)
    names.add(f"{base}_{number}")
    return f"{base}_{number}"


def _size(value: Value) -> int:
    nbytes = value.type.nbytes if isinstance(value.type, TensorType) and value.type.is_static else 0
    return nbytes if isinstance(nbytes, int) else 0


def _cost(node: Node) -> int:
    """The estimated cost of a node, in multiplications."""
    elements = [_elements(value) for value in (*node.inputs, *node.outputs) if value is not None]
    return sum(elements) * _ELEMENT_COST + _elements(node.output) * _depth(node)


def _depth(node: Node) -> int:
    """The number of multiplications that are summed for one element of a product's output; 0 for other nodes."""
    factor = node.input(1)
    if node.op == "FusedConv" and factor is not None:
        return prod(factor.tensor.evaluate({})[1:])
    if node.op != "FusedMatMul" or node.inputs[0] is None:
        return 0
    perm, extents = perm_attribute(node, "perm_a"), node.inputs[0].tensor.evaluate({})
    return extents[-1 if perm is None else perm[-1]]


def _elements(value: Value) -> int:
    return prod(value.tensor.evaluate({}))
