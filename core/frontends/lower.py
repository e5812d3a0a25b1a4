"""Any graph in terms of ONNX operators alone: what `export` writes.

Fused operators are unfolded into the operators they stand for, channels-last operators get transposes around them,
and parameters that passes moved into attributes are inputs again: constants, or computed from the shapes of other
values where they depend on symbols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.frontends.scope import Session
from core.frontends.unfold import unfolding
from core.frontends.writer import Writer
from core.ir.graph import Graph, Node, Value


def lower(graph: Graph) -> Graph:
    """The same computation without fused operators, layouts, or parameters as attributes; state stays state.

    UnsupportedError for a parameter that depends on symbols which no value shows.
    """
    graph, session = graph.clone(), Session(set())
    _name_apart(graph, session)
    return _lower_graph(graph, session, {})


def _name_apart(graph: Graph, session: Session) -> None:
    """ONNX wants names that no value of a graph around has, either."""
    for value in graph.values():
        value.name = session.fresh(value.name)
    for node in graph.nodes:
        for body in node.subgraphs:
            _name_apart(body, session)


def _lower_graph(graph: Graph, session: Session, sources: Mapping[str, tuple[Value, int]]) -> Graph:
    """`graph` with its nodes lowered, in place. `sources` tells where the graphs around it show symbols."""
    nodes, graph.nodes = graph.nodes, []
    writer = Writer(graph, session, sources)
    for value in graph.values():
        writer.learn(value)
    for node in nodes:
        _lower_node(writer, node)
        for value in node.outputs:
            writer.learn(value)
    return graph


def _lower_node(writer: Writer, node: Node) -> None:
    writer.emitter.label = node.name or node.outputs[0].name
    unfold = unfolding(node)
    if unfold is not None:
        _take_the_place(writer, node, unfold(writer, node))
        return
    node.name = writer.session.fresh_label(writer.emitter.label)
    node.inputs, node.attrs = writer.as_in_onnx(node.op, node.inputs, node.attrs)
    for body in node.subgraphs:
        _lower_graph(body, writer.session, writer.sources)
    writer.emitter.graph.nodes.append(node)


def _take_the_place(writer: Writer, node: Node, results: Sequence[Value]) -> None:
    """The outputs of `node`, under their names, are `results`."""
    nodes = writer.emitter.graph.nodes
    for old, new in zip(node.outputs, results, strict=True):
        if nodes[-1].outputs != [new] or list(results).count(new) > 1:
            writer.emit("Identity", new)
        nodes[-1].outputs, old.producer = [old], nodes[-1]
