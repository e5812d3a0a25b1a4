"""Code for any sizes of a model of which some nodes have no kernel for any sizes: its graph is cut into parts.

The rest of the graph is a script: a graph in which one node, `PART`, stands for all nodes of a part. The references
run it (`core.reference`), bodies of control flow too, and parts are native code. Each body is cut like a graph of its
own. A symbol that only a run shows, such as how many elements are not zero, is a size of the parts behind the node that
shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from core.any_size import kernels_for
from core.codegen.target import host
from core.errors import FeedError, ModelError, UnsupportedError
from core.ir.closure import closed, opened
from core.ir.dim import Dim, symbol
from core.ir.dims import size
from core.ir.graph import Attr, Graph, Node, Value, attr_symbols, node_reads
from core.ir.types import TensorType
from core.kernels.cpu import object_for
from core.ops import registry
from core.ops.inference import infer_graph
from core.options import Options
from core.plan.choice import is_view
from core.plan.control import CONTROL
from core.plan.placement import HOST, graph_of, groups_of
from core.plan.plan import Planned, weight_chunks
from core.plan.planner import make_plan
from core.reference import shown_by
from core.rewriting import rewritten
from core.runtime.compiled import Compiled, InParts
from core.runtime.given import Sizes
from core.runtime.script import PART
from core.runtime.session import BatchInfo
from core.runtime.store import open_store
from core.sizes import bind, equal_sizes, extents_of, input_symbols, supposed_of

Rewrite: TypeAlias = Callable[[Graph, bool], Graph]  # a graph, and whether it is a body

_REFERENCE = "reference"
_ANY = str(size(0))  # a size that every model has: of a part that depends on none


def in_parts_for(graph: Graph, options: Options, batching: BatchInfo, binding: Sizes) -> InParts:
    """Code for any sizes of a model of which some nodes have no kernel for any."""

    def rewrite(graph: Graph, inside: bool) -> Graph:
        return rewritten(graph, options, inside, in_parts=True)[0]

    names = tuple(name for name, _ in binding)
    apart = tuple((name, size(place)) for place, name in enumerate(names))
    return in_parts(bind(graph, batching, apart), names, options, rewrite)


def in_parts(graph: Graph, sizes: tuple[str, ...], options: Options, rewrite: Rewrite) -> InParts:
    """The script of a graph whose symbols are sizes, and the code of its parts. `sizes`: see `Plan.sizes`. `rewrite`:
    what passes make of a graph whose bodies stay as they are. UnsupportedError where no node has a kernel for any
    sizes."""
    cutter = _Cutter(options, rewrite)
    script, supposed = cutter.script(graph, frozenset(), inside=False)
    if not cutter.parts:
        raise UnsupportedError(f"no node of {graph.name} has a kernel for any sizes")
    _name_apart(script, set())
    return InParts(script, tuple(cutter.parts), supposed, tuple(cutter.notes), sizes)


@dataclass
class _Level:
    """A graph of the model, or a body, after the passes. `supposed`: what its parts suppose of the symbols of its
    inputs."""

    graph: Graph
    supposed: tuple[Dim, ...]


@dataclass(frozen=True)
class _Part:
    """The graph of a part, its plan, and the symbols that are its sizes, in the order of its table."""

    graph: Graph
    planned: Planned
    names: tuple[str, ...]


@dataclass
class _Placed:
    """The device of each node, and the symbols that have values before the node runs."""

    where: dict[Node, str] = field(default_factory=dict)
    known: dict[Node, frozenset[str]] = field(default_factory=dict)


@dataclass
class _Cutter:
    """Makes scripts, and collects the parts of all of them."""

    options: Options
    rewrite: Rewrite
    parts: list[Compiled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def script(self, graph: Graph, known: frozenset[str], inside: bool) -> tuple[Graph, tuple[Dim, ...]]:
        """The script of a graph that captures nothing, and what it supposes. `known`: the symbols that have values when
        it begins, besides those that its inputs show. `inside`: it is a body."""
        level = _rewritten(graph, self.rewrite, inside)
        placed = self._placed(level.graph, known)
        groups, planned = self._planned(level.graph, placed.where)
        script = replace(level.graph, nodes=[], defaults={}, states=[])
        for (_, nodes), part in zip(groups, planned, strict=True):
            if part is not None:
                script.nodes.append(self._node(part, nodes, level.supposed))
            else:
                script.nodes += nodes
        for node in script.nodes:
            self._cut_bodies(node, script, placed.known)
        script.remove_dead()
        return script, level.supposed

    def _cut_bodies(self, node: Node, script: Graph, known: Mapping[Node, frozenset[str]]) -> None:
        for name, body in node.attrs.items():
            if not isinstance(body, Graph) or node.op not in CONTROL:
                continue
            alone, outer = closed(body, script.constants)
            before = len(self.parts)
            try:
                inner, _ = self.script(alone, known[node], inside=True)
            except (ModelError, FeedError) as error:  # a branch that is never taken need not fit what it reads
                del self.parts[before:]
                self.notes.append(f"{registry.describe(node)} keeps its {name} as it is: {error}")
            else:
                node.attrs[name] = opened(inner, outer)

    def _planned(self, graph: Graph, where: dict[Node, str]) -> tuple[list[tuple[str, list[Node]]], list[_Part | None]]:
        """The nodes of a graph in groups that run one after the other, and the parts that some of these are. A node
        that a plan would run on its reference, or whose result it would copy, is cut out."""
        while True:
            groups = list(groups_of(graph, where))
            home = {value: index for index, (_, nodes) in enumerate(groups) for node in nodes for value in node.outputs}
            planned = [
                self._part(graph_of(graph, index, nodes, home, [])) if device == HOST else None
                for index, (device, nodes) in enumerate(groups)
            ]
            left = {name for part in planned if part is not None for name in _left(part.planned)}
            if not left:
                return groups, planned
            where |= {value.producer: _REFERENCE for value in home if value.name in left and value.producer}

    def _placed(self, graph: Graph, shown: frozenset[str]) -> _Placed:
        """Which nodes are code. A node that shows a symbol is not, since its kernel would have to know it before; no
        more is what reads sizes that nothing shows. Views are where what they look at is."""
        twin, _ = _sized(graph)
        reasons = kernels_for(twin, twin.nodes, self.options).reasons
        known = shown.union(*(shown_by(value.type) for value in graph.inputs))
        placed = _Placed()
        where = placed.where
        for node, other in zip(graph.nodes, twin.nodes, strict=True):
            placed.known[node] = known
            reason = reasons.get(other) or ("" if _symbols_of(node) <= known else "only a run shows its sizes")
            source = node.input(0)
            if not reason and is_view(other) and source is not None and source.producer is not None:
                where[node] = where[source.producer]
            else:
                where[node] = _REFERENCE if reason else HOST
            if reason:
                self.notes.append(f"{registry.describe(node)} runs on the reference: {reason}")
            if where[node] == _REFERENCE:
                known |= frozenset().union(*(shown_by(value.type) for value in node.outputs))
        return placed

    def _part(self, graph: Graph) -> _Part:
        sized, names = _sized(graph)
        plan = make_plan(sized, host(), self.options.threads, winograd=self.options.winograd)
        return _Part(graph, plan, names or (_ANY,))

    def _node(self, part: _Part, nodes: Sequence[Node], supposed: tuple[Dim, ...]) -> Node:
        """The node that stands for a part in the script."""
        store = open_store(self.options.cache_dir)
        code = partial(object_for, target=host(), cache=store.objects if store else None)
        objects = {symbol: code(spec) for symbol, spec in part.planned.specs.items()}
        plan = replace(part.planned.plan, sizes=part.names)
        self.parts.append(Compiled(plan, objects, lambda: weight_chunks(part.planned)))
        values = {value.name: value for node in nodes for value in (*node_reads(node), *node.outputs)}
        inputs, outputs = ([values[v.name] for v in ports] for ports in (part.graph.inputs, part.graph.outputs))
        attrs: dict[str, Attr] = {
            "part": len(self.parts) - 1,
            "supposed": tuple(dict.fromkeys((*supposed, *extents_of(part.graph)))),
        }
        node = Node(PART, list(inputs), outputs, attrs, f"part {len(self.parts) - 1}")
        for value in outputs:
            value.producer = node
        return node


def _rewritten(graph: Graph, rewrite: Rewrite, inside: bool) -> _Level:
    """A graph as passes leave it, where sizes that meet in it are taken to be equal. `inside`: it is a body."""
    supposed: list[Dim] = []
    graph = graph.clone()
    for _ in input_symbols(graph):
        found = equal_sizes(graph)
        if not found:
            break
        supposed += [side for name, dim in found.items() for side in (symbol(name) - dim, dim - symbol(name))]
        graph = graph.clone(found)
    infer_graph(graph)
    names = input_symbols(graph)
    supposed += supposed_of(graph, *names)
    graph = rewrite(graph, inside)
    supposed += supposed_of(graph.clone(), *names)
    return _Level(graph, tuple(dict.fromkeys(supposed)))


def _left(planned: Planned) -> Iterator[str]:
    """The values of a plan that native code does not make where they belong."""
    for node in planned.plan.fallbacks.nodes:
        yield from (value.name for value in node.outputs)
    for name, _ in planned.plan.copies:
        yield name


def _sized(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """A copy whose symbols are the sizes of a table, and the symbols in the order of that table."""
    names = sorted(frozenset().union(*map(_symbols_of, graph.nodes), _type_symbols(graph.inputs)))
    return graph.clone({name: size(place) for place, name in enumerate(names)}), tuple(names)


def _symbols_of(node: Node) -> frozenset[str]:
    """The symbols of what a node reads, of what it gives, and of its attributes."""
    return attr_symbols(node) | _type_symbols([*node_reads(node), *node.outputs])


def _type_symbols(values: Sequence[Value]) -> frozenset[str]:
    return frozenset().union(*(value.type.symbols for value in values if isinstance(value.type, TensorType)))


def _name_apart(graph: Graph, taken: set[str]) -> None:
    """Give every value of a graph and its bodies a name of its own: as text a body sees only names."""
    for value in graph.values():
        name, count = value.name, 1
        while value.name in taken:
            count += 1
            value.name = f"{name}_{count}"
        taken.add(value.name)
    for body in [body for node in graph.nodes for body in node.subgraphs]:
        _name_apart(body, taken)
