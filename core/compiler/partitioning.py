"""Dynamic-shape code of a model some of whose nodes have no dynamic kernel: its graph is cut into parts.

The rest of the graph is a script: a graph in which one node, `PART`, stands for all nodes of a part. The references run
the script (`lathe.core.reference`), including subgraphs of control flow, and the parts are native code. Each subgraph
is cut like a graph of its own. If the value of a symbol is only known after a node has run, such as the number of
elements that are not zero, the symbol is a size of the parts after that node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from lathe.core.codegen.target import host
from lathe.core.compiler.dynamic_shapes import dynamic_kernels
from lathe.core.compiler.options import Options
from lathe.core.compiler.run_passes import run_passes
from lathe.core.compiler.symbol_binding import bind, code_assumptions, equal_sizes, input_symbols, least_extents
from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.ir.closure import close_body, restore_captures
from lathe.core.ir.dim import Dim, symbol
from lathe.core.ir.dims import size
from lathe.core.ir.graph import Attr, Graph, Node, Value, attr_symbols, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.kernels.cpu import object_for
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.plan.control import CONTROL
from lathe.core.plan.kernel_choice import is_view
from lathe.core.plan.placement import HOST, device_groups, part_graph
from lathe.core.plan.plan import PlannedGraph, weight_chunks
from lathe.core.plan.planner import make_plan
from lathe.core.reference import determined_symbols
from lathe.core.runtime.artifact.compiled import Compiled, Partitioned
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.session.run_inputs import CodeBinding
from lathe.core.runtime.session.script import PART

Rewrite: TypeAlias = Callable[[Graph, bool], Graph]  # a graph, and whether it is a subgraph

_REFERENCE = "reference"
_FALLBACK_SIZE = str(size(0))  # the size of a part that depends on none: every model has it


def partition_model(graph: Graph, options: Options, batching: BatchInfo, binding: CodeBinding) -> Partitioned:
    """Dynamic-shape code in parts, for a model some of whose nodes have no dynamic kernel.

    Every symbol of `binding` becomes a size of its own. UnsupportedError if no node has a dynamic kernel.
    """

    def rewrite(graph: Graph, inside: bool) -> Graph:
        return run_passes(graph, options, inside, in_parts=True)[0]

    names = tuple(name for name, _ in binding)
    apart = tuple((name, size(place)) for place, name in enumerate(names))
    return partition(bind(graph, batching, apart), names, options, rewrite)


def partition(graph: Graph, sizes: tuple[str, ...], options: Options, rewrite: Rewrite) -> Partitioned:
    """The script (outer graph) of a graph whose symbols are sizes, and the compiled code of its parts.

    `sizes`: the model's names for the symbols size0, size1, ... `rewrite(graph, inside)` runs the passes on a graph or
    (`inside`) a subgraph, without changing the subgraphs in it. UnsupportedError if no node has a dynamic kernel.
    """
    cutter = _Cutter(options, rewrite)
    script, supposed = cutter.script(graph, frozenset(), inside=False)
    if not cutter.parts:
        raise UnsupportedError(f"no node of {graph.name} has a dynamic-shape kernel")
    _make_names_unique(script, set())
    return Partitioned(script, tuple(cutter.parts), supposed, tuple(cutter.notes), sizes)


@dataclass
class _Level:
    """A graph of the model, or a subgraph, after the passes.

    `supposed`: dimensions over the symbols of its inputs that its parts assume to be 0 or more.
    """

    graph: Graph
    supposed: tuple[Dim, ...]


@dataclass(frozen=True)
class _Part:
    """The graph of a part, its plan, and the symbols that are its sizes, in the order of its size table."""

    graph: Graph
    planned: PlannedGraph
    names: tuple[str, ...]


@dataclass
class _Placement:
    """For each node: where it runs (the host's native code or the reference), and the symbols known before it runs."""

    where: dict[Node, str] = field(default_factory=dict)
    known: dict[Node, frozenset[str]] = field(default_factory=dict)


@dataclass
class _Cutter:
    """Makes scripts (outer graphs). `parts` collects the code of all parts, `notes` why nodes run on references."""

    options: Options
    rewrite: Rewrite
    parts: list[Compiled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def script(self, graph: Graph, known: frozenset[str], inside: bool) -> tuple[Graph, tuple[Dim, ...]]:
        """The script of a graph that captures nothing, and the dimensions that its parts assume to be 0 or more.

        `known`: the symbols whose values are known when it begins, besides those that follow from its inputs' shapes.
        `inside`: it is a subgraph.
        """
        level = _rewrite_level(graph, self.rewrite, inside)
        placed = self._place(level.graph, known)
        groups, planned = self._plan_groups(level.graph, placed.where)
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
            alone, outer = close_body(body, script.constants)
            before = len(self.parts)
            try:
                inner, _ = self.script(alone, known[node], inside=True)
            except (ModelError, FeedError) as error:  # a branch that never runs need not fit the values it reads
                del self.parts[before:]
                self.notes.append(f"{registry.describe(node)} keeps its {name} as it is: {error}")
            else:
                node.attrs[name] = restore_captures(inner, outer)

    def _plan_groups(
        self, graph: Graph, where: dict[Node, str]
    ) -> tuple[list[tuple[str, list[Node]]], list[_Part | None]]:
        """The nodes in groups (device, nodes) that run one after the other; and for each group its part, or None.

        A group on the references has no part. `where` maps each node to its device, and is changed: nodes that a plan
        would run on their references, or whose results it would copy, move to the references.
        """
        while True:
            groups = list(device_groups(graph, where))
            home = {value: index for index, (_, nodes) in enumerate(groups) for node in nodes for value in node.outputs}
            planned = [
                self._part(part_graph(graph, index, nodes, home, [])) if device == HOST else None
                for index, (device, nodes) in enumerate(groups)
            ]
            left = {name for part in planned if part is not None for name in _values_not_native(part.planned)}
            if not left:
                return groups, planned
            where |= {value.producer: _REFERENCE for value in home if value.name in left and value.producer}

    def _place(self, graph: Graph, shown: frozenset[str]) -> _Placement:
        """Which nodes become native code, and what is known before each. `shown`: known symbols besides the inputs'.

        A node runs on its reference if it has no dynamic kernel, or if it has a symbol whose value is not known before
        it runs, such as an extent of its own result. A view is placed with its source.
        """
        twin, _ = _with_sizes(graph)
        reasons = dynamic_kernels(twin, twin.nodes, self.options).reasons
        known = shown.union(*(determined_symbols(value.type) for value in graph.inputs))
        placed = _Placement()
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
                known |= frozenset().union(*(determined_symbols(value.type) for value in node.outputs))
        return placed

    def _part(self, graph: Graph) -> _Part:
        sized, names = _with_sizes(graph)
        plan = make_plan(sized, host(), self.options.threads, winograd=self.options.winograd)
        return _Part(graph, plan, names or (_FALLBACK_SIZE,))

    def _node(self, part: _Part, nodes: Sequence[Node], supposed: tuple[Dim, ...]) -> Node:
        """Compile a part, and return the node that stands for it in the script.

        Its inputs and outputs are the values that enter and leave `nodes`, the nodes of the part, and it has their
        control edges from other nodes. The code is added to
        `parts`. `supposed`: dimensions that the code assumes to be 0 or more, besides those that its extents imply.
        """
        store = open_store(self.options.cache_dir)
        code = partial(object_for, target=host(), cache=store.objects if store else None)
        objects = {symbol: code(spec) for symbol, spec in part.planned.specs.items()}
        plan = replace(part.planned.plan, sizes=part.names)
        self.parts.append(Compiled(plan, objects, lambda: weight_chunks(part.planned)))
        values = {value.name: value for node in nodes for value in (*node_reads(node), *node.outputs)}
        inputs, outputs = ([values[v.name] for v in ports] for ports in (part.graph.inputs, part.graph.outputs))
        attrs: dict[str, Attr] = {
            "part": len(self.parts) - 1,
            "supposed": tuple(dict.fromkeys((*supposed, *least_extents(part.graph)))),
        }
        own = {value for node in nodes for value in node.outputs}
        after = tuple(dict.fromkeys(value for node in nodes for value in node.after if value not in own))
        node = Node(PART, list(inputs), outputs, attrs, f"part {len(self.parts) - 1}", after=after)
        for value in outputs:
            value.producer = node
        return node


def _rewrite_level(graph: Graph, rewrite: Rewrite, inside: bool) -> _Level:
    """A copy of a graph after the passes, in which sizes that must be equal are one (`equal_sizes`).

    `inside`: it is a subgraph. These equalities are among the assumptions of the result.
    """
    supposed: list[Dim] = []
    graph = graph.clone()
    for _ in input_symbols(graph):
        found = equal_sizes(graph, infer_graph(graph))
        if not found:
            break
        supposed += [side for name, dim in found.items() for side in (symbol(name) - dim, dim - symbol(name))]
        graph = graph.clone(found)
    names = input_symbols(graph)
    supposed += code_assumptions(graph, *names, known=infer_graph(graph))
    graph = rewrite(graph, inside)
    supposed += code_assumptions(graph.clone(), *names)
    return _Level(graph, tuple(dict.fromkeys(supposed)))


def _values_not_native(planned: PlannedGraph) -> Iterator[str]:
    """Yield the names of values that a plan computes on references, or copies to an output at the end of the run."""
    for node in planned.plan.fallbacks.nodes:
        yield from (value.name for value in node.outputs)
    for name, _ in planned.plan.copies:
        yield name


def _with_sizes(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """A copy with every symbol replaced by a size (`size0`, ...), and these symbols in the order of the sizes."""
    names = sorted(frozenset().union(*map(_symbols_of, graph.nodes), _type_symbols(graph.inputs)))
    return graph.clone({name: size(place) for place, name in enumerate(names)}), tuple(names)


def _symbols_of(node: Node) -> frozenset[str]:
    """The symbols of the inputs, outputs and attributes of a node."""
    return attr_symbols(node) | _type_symbols([*node_reads(node), *node.outputs])


def _type_symbols(values: Sequence[Value]) -> frozenset[str]:
    return frozenset().union(*(value.type.symbols for value in values if isinstance(value.type, TensorType)))


def _make_names_unique(graph: Graph, taken: set[str]) -> None:
    """Give every value of a graph and its subgraphs a unique name, because in text a subgraph sees only names."""
    for value in graph.values():
        name, count = value.name, 1
        while value.name in taken:
            count += 1
            value.name = f"{name}_{count}"
        taken.add(value.name)
    for body in [body for node in graph.nodes for body in node.subgraphs]:
        _make_names_unique(body, taken)
