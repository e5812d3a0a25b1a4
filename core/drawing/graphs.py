"""Drawings of graphs as SVG text, with nodes in layers from inputs to outputs.

By the layered method (Sugiyama, Tagawa and Toda, 1981). A node is below all nodes that it reads. An edge that spans
several layers gets a point in each layer between. Sweeps sort each layer by the mean position of neighbours, so that
few edges cross.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import TensorType

_SWEEPS = 6
_WIDTH, _HEIGHT, _COLUMN, _ROW = 168, 34, 184, 66  # the size of a box, and the distances between centres
# The attributes in the note of a node, with the text before each.
_NOTED_ATTRIBUTES = {
    "kernel_shape": "",
    "group": "groups ",
    "axis": "axis ",
    "axes": "axes ",
    "perm": "to ",
    "to": "",
}
_STYLE = (
    "<style>text {font: 11px sans-serif; fill: #1f2937; text-anchor: middle} .soft {font-size: 9px; fill: #6b7280} "
    "path {fill: none; stroke: #9ca3af} rect {fill: #eff6ff; stroke: #2563eb} .end {fill: #ecfdf5; stroke: #059669} "
    "svg {background: #fff}</style>"
)


@dataclass(eq=False)
class _Spot:
    """An entry of a layer: a box, or (without title) a point that an edge passes through."""

    layer: int
    title: str = ""
    note: str = ""
    end: bool = False  # whether it is an input or output of the graph
    above: list[_Spot] = field(default_factory=list)
    below: list[_Spot] = field(default_factory=list)
    place: float = 0.0  # in columns


def draw(graph: Graph) -> str:
    """The graph as an SVG image. A node's box has its operator, the type of its first output and its main attributes.

    Constants are not drawn.
    """
    layers = _layers(_spots(graph))
    _arrange(layers)
    left = min(spot.place for layer in layers for spot in layer)
    right = max(spot.place for layer in layers for spot in layer)
    width, height = (right - left + 1) * _COLUMN, len(layers) * _ROW
    for layer in layers:
        for spot in layer:
            spot.place -= left
    parts = [_edge(spot, other) for layer in layers for spot in layer for other in spot.below]
    parts += [_box(spot) for layer in layers for spot in layer if spot.title]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"'
    label = f'aria-label="graph of {escape(graph.name or "the model")}" style="max-width: {width:.0f}px"'
    return f"{head} {label}>\n{_STYLE}\n" + "\n".join(parts) + "\n</svg>\n"


def _spots(graph: Graph) -> list[_Spot]:
    """The boxes of inputs, nodes and outputs, and the points of edges in the layers between, linked by edges."""
    producers: dict[Value, _Spot] = {v: _Spot(0, v.name, str(v.type), end=True) for v in graph.inputs}
    boxes, edges = list(producers.values()), []
    for node in graph.nodes:
        sources = list(dict.fromkeys(producers[value] for value in _read(node) if value in producers))
        boxes.append(_Spot(1 + max((source.layer for source in sources), default=0), node.op, _note(node)))
        producers.update(dict.fromkeys(node.outputs, boxes[-1]))
        edges += [(source, boxes[-1]) for source in sources]
    last = 1 + max((box.layer for box in boxes), default=0)
    for value in graph.outputs:
        boxes.append(_Spot(last, value.name, str(value.type), end=True))
        edges += [(producers[value], boxes[-1])] if value in producers else []
    _lower(boxes, edges)
    return boxes + [point for source, target in edges for point in _link(source, target)]


def _lower(boxes: list[_Spot], edges: list[tuple[_Spot, _Spot]]) -> None:
    """Move each node that reads constants alone down to the layer above the topmost box that reads its result."""
    readers = {target for _, target in edges}
    first: dict[_Spot, int] = {}
    for source, target in edges:
        first[source] = min(first.get(source, target.layer), target.layer)
    for box in boxes:
        if box not in readers and not box.end and box in first:
            box.layer = first[box] - 1


def _read(node: Node) -> Iterable[Value]:
    """The values that a node reads: its inputs, and the values that its bodies capture."""
    yield from (value for value in node.inputs if value is not None)
    for body in node.subgraphs:
        own = {*body.inputs, *body.constants, *(value for inner in body.nodes for value in inner.outputs)}
        yield from (value for inner in body.nodes for value in _read(inner) if value not in own)


def _link(source: _Spot, target: _Spot) -> list[_Spot]:
    """Connect two boxes through new points, one in each layer between them, and return the points."""
    points = [_Spot(layer) for layer in range(source.layer + 1, target.layer)]
    for upper, lower in pairwise([source, *points, target]):
        upper.below.append(lower)
        lower.above.append(upper)
    return points


def _note(node: Node) -> str:
    """The text in a node's box: the type of its first output, if a tensor, and its main attributes."""
    found = ((prefix, node.attrs.get(name)) for name, prefix in _NOTED_ATTRIBUTES.items())
    attributes = [f"{prefix}{_attribute_text(attribute)}" for prefix, attribute in found if attribute is not None]
    types = [str(value.type) for value in node.outputs[:1] if isinstance(value.type, TensorType)]
    return ", ".join(types + attributes)


def _attribute_text(attribute: object) -> str:
    return "x".join(map(str, attribute)) if isinstance(attribute, tuple) else str(attribute)


def _layers(spots: list[_Spot]) -> list[list[_Spot]]:
    layers: list[list[_Spot]] = [[] for _ in range(1 + max(spot.layer for spot in spots))]
    for spot in spots:
        layers[spot.layer].append(spot)
    return [layer for layer in layers if layer]


def _arrange(layers: list[list[_Spot]]) -> None:
    """Set the column of each spot: sweeps, down and up in turn, sort each layer by the mean of its neighbours."""
    for layer in layers:
        _assign_columns(layer, [float(i) for i in range(len(layer))])
    for sweep in range(_SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            _assign_columns(layer, [_mean_place(spot, spot.above if is_down else spot.below) for spot in layer])


def _mean_place(spot: _Spot, neighbours: list[_Spot]) -> float:
    return sum(other.place for other in neighbours) / len(neighbours) if neighbours else spot.place


def _assign_columns(layer: list[_Spot], wanted: list[float]) -> None:
    """Sort the layer in place by the wanted columns, and place each spot there.

    Spots closer than one column move apart; then all are shifted so that their mean is that of the wanted columns.
    """
    order = sorted(range(len(layer)), key=lambda i: wanted[i])
    layer[:] = [layer[i] for i in order]
    wanted = [wanted[i] for i in order]
    places: list[float] = []
    for want in wanted:
        places.append(max(want, places[-1] + 1.0) if places else want)
    shift = sum(place - want for place, want in zip(places, wanted, strict=True)) / len(layer)
    for spot, place in zip(layer, places, strict=True):
        spot.place = place - shift


def _centre(spot: _Spot) -> tuple[float, float]:
    return (spot.place + 0.5) * _COLUMN, spot.layer * _ROW + _ROW / 2


def _edge(upper: _Spot, lower: _Spot) -> str:
    (x, y), (to_x, to_y) = _centre(upper), _centre(lower)
    y += _HEIGHT / 2 if upper.title else 0
    to_y -= _HEIGHT / 2 if lower.title else 0
    bend = (y + to_y) / 2
    return f'<path d="M{x:.1f} {y:.1f} C{x:.1f} {bend:.1f} {to_x:.1f} {bend:.1f} {to_x:.1f} {to_y:.1f}"/>'


def _box(spot: _Spot) -> str:
    x, y = _centre(spot)
    kind = ' class="end"' if spot.end else ""
    note = spot.note.replace("float32", "")
    note = note if len(note) <= 36 else note[:35] + "…"
    return (
        f'<g><title>{escape(f"{spot.title}: {spot.note}")}</title><rect{kind} x="{x - _WIDTH / 2:.1f}" '
        f'y="{y - _HEIGHT / 2:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{x:.1f}" y="{y - 3:.1f}">{escape(spot.title[:26])}</text>'
        f'<text class="soft" x="{x:.1f}" y="{y + 10:.1f}">{escape(note)}</text></g>'
    )
