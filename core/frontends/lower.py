"""Lowers any graph to ONNX operators only, for the exporter.

Fused operators are replaced by the operators that they fuse, and channels-last operators get transposes around them.
Parameters that passes moved into attributes become inputs again: constants, or values computed from the shapes of other
values if they depend on symbols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lathe.core.frontends.decompositions import decomposition
from lathe.core.frontends.scope import ImportSession
from lathe.core.frontends.writer import Writer
from lathe.core.ir.graph import Graph, Node, Value


def lower(graph: Graph) -> Graph:
    """A copy of `graph` without fused operators, layouts, or parameters as attributes. States remain states.

    UnsupportedError for a parameter that depends on a symbol which is no dimension of any value.
    """
    graph, session = graph.clone(), ImportSession(set())
    _make_names_unique(graph, session)
    return _lower_graph(graph, session, {})


def _make_names_unique(graph: Graph, session: ImportSession) -> None:
    """Rename values so that names are unique across a graph and all its bodies, as ONNX requires."""
    for value in graph.values():
        value.name = session.fresh(value.name)
    for node in graph.nodes:
        for body in node.subgraphs:
            _make_names_unique(body, session)


def _lower_graph(graph: Graph, session: ImportSession, sources: Mapping[str, tuple[Value, int]]) -> Graph:
    """Lower the nodes of `graph` in place; returns it.

    `sources` maps symbols to a value of the enclosing graphs and the axis that has the symbol as its extent.
    """
    nodes, graph.nodes = graph.nodes, []
    writer = Writer(graph, session, sources)
    for value in graph.values():
        writer.add_sources(value)
    for node in nodes:
        _lower_node(writer, node)
        for value in node.outputs:
            writer.add_sources(value)
    return graph


def _lower_node(writer: Writer, node: Node) -> None:
    writer.emitter.label = node.name or node.outputs[0].name
    unfold = decomposition(node)
    with writer.emitter.annotated(node.device, node.after):
        if unfold is not None:
            _replace_outputs(writer, node, unfold(writer, node))
            return
        node.name = writer.session.fresh_label(writer.emitter.label)
        node.inputs, node.attrs = writer.in_onnx_form(node.op, node.inputs, node.attrs)
    for body in node.subgraphs:
        _lower_graph(body, writer.session, writer.sources)
    writer.emitter.graph.nodes.append(node)


def _replace_outputs(writer: Writer, node: Node, results: Sequence[Value]) -> None:
    """Make the outputs of `node` outputs of the new nodes in place of `results`, so that the values and names stay.

    A result that is the only output of the last new node is replaced there; an Identity computes every other one.
    """
    nodes = writer.emitter.graph.nodes
    for old, new in zip(node.outputs, results, strict=True):
        if nodes[-1].outputs != [new] or list(results).count(new) > 1:
            writer.emit("Identity", new)
        nodes[-1].outputs, old.producer = [old], nodes[-1]
