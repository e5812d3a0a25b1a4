"""Device annotations and control edges during passes: they become nodes that no pass looks through.

Passes know neither `Node.device` nor `Node.after`. So a `Boundary` is put on each edge from a node to one for another
device, and on the inputs of each node with control edges, whose values become further inputs of the Boundary. Nothing
is fused, merged or moved across it, and dead-code elimination keeps what it reads. After the passes, the nodes behind a
Boundary get its device and its edges, and the Boundary goes. The same idea is called an optimization barrier in XLA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph, Node, Value, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.ops.opdef.registry import describe
from lathe.core.passes.rewrite.editor import Editor

BOUNDARY = "Boundary"


def insert_boundaries(graph: Graph) -> bool:
    """Replace the annotations and control edges of a graph by Boundaries; false if it has none.

    UnsupportedError for annotations and control edges in bodies, and for a control edge to a node that reads no
    computed value.
    """
    for node in graph.nodes:
        _check_bodies(node)
    if not any(node.device or node.after for node in graph.nodes):
        return False
    made: dict[tuple[Value, str, tuple[Value, ...]], Value] = {}
    for node in list(graph.nodes):
        sources = list(_sources(graph, node))
        if node.after and not sources:
            raise UnsupportedError("runs after other nodes, but reads no computed value", where=describe(node))
        for value in sources:
            if not node.after and not _needs_boundary(value, node.device):
                continue
            key = (value, node.device, node.after)
            if key not in made:
                made[key] = _boundary(graph, node, value)
            _redirect(node, value, made[key])
        node.after = ()
    return True


def remove_boundaries(graph: Graph) -> None:
    """Replace all Boundaries of a graph by the annotations and control edges of the nodes behind them."""
    editor, devices = Editor(graph), dict[Value, str]()
    for node in graph.nodes:
        if node.op == BOUNDARY:
            devices[node.output] = str(node.attrs["device"])
        else:
            node.device = _device(graph, node, devices)
            devices.update(dict.fromkeys(node.outputs, node.device))
    for node in editor.nodes():
        if node.op == BOUNDARY:
            after = [value for value in node.inputs[1:] if value is not None and value.producer is not None]
            for reader in editor.readers(node.output):
                reader.after = tuple(dict.fromkeys([*reader.after, *after]))
            editor.replace(node.output, node.required_input(0))
    editor.finish()


def _check_bodies(node: Node) -> None:
    for body in node.subgraphs:
        for inner in body.nodes:
            if inner.device or inner.after:
                what = "is annotated with a device" if inner.device else "has a control edge"
                raise UnsupportedError(f"{what} inside {describe(node)}, which runs as one node", where=describe(inner))
            _check_bodies(inner)


def _sources(graph: Graph, node: Node) -> Iterator[Value]:
    """Yield the values that a node reads and that are no constants, each once, inputs before captured values."""
    return (value for value in dict.fromkeys(node_reads(node)) if value not in graph.constants)


def _needs_boundary(value: Value, device: str) -> bool:
    """Whether a value comes from a node for another device; shapes, which passes turn into attributes, do not count."""
    return (value.producer.device if value.producer is not None else "") != device and not _is_shape(value)


def _is_shape(value: Value) -> bool:
    type_ = value.type
    is_vector = isinstance(type_, TensorType) and type_.shape is not None and len(type_.shape) <= 1
    return is_vector and value.dtype.is_integer


def _boundary(graph: Graph, node: Node, value: Value) -> Value:
    new = Node(BOUNDARY, [value, *node.after], [], {"device": node.device}, node.name, node.device)
    new.outputs = [Value(graph.fresh_name(f"{value.name}.boundary"), value.type, new)]
    infer_node(new, dict(graph.constants))
    graph.insert_before(node, new)
    return new.output


def _redirect(node: Node, old: Value, new: Value) -> None:
    node.inputs = [new if value is old else value for value in node.inputs]
    for body in node.subgraphs:
        body.outputs = [new if value is old else value for value in body.outputs]
        for inner in body.nodes:
            _redirect(inner, old, new)


def _device(graph: Graph, node: Node, devices: dict[Value, str]) -> str:
    """The device of a node after the passes: that of the values that it reads, which all Boundaries before it name.

    A node that reads none, such as random numbers, has its own annotation still.
    """
    sources = list(_sources(graph, node))
    own: Sequence[Value] = [value for value in sources if not _is_shape(value)] or sources
    return next(filter(None, (devices.get(value, "") for value in own)), "") if own else node.device
