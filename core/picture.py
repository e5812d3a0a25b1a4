"""A graph as a drawing: nodes in layers from inputs to outputs, as SVG text.

The layered method (Sugiyama, Tagawa, Toda, 1981): a node stands below everything it reads; an edge that passes layers
gets a point in each; sweeps put each entry of a layer near the middle of its neighbours, so that few edges cross.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from core.ir.graph import Graph, Node, Value
from core.ir.types import TensorType

_SWEEPS = 6
_WIDTH, _HEIGHT, _COLUMN, _ROW = 168, 34, 184, 66  # of a box, and the distances between middles
# Attributes that say most of a node, and how the note begins to speak of them.
_SHOWN = {
    "kernel_shape": "",
    "group": "groups ",
    "axis": "axis ",
    "axes": "axes ",
    "perm": "to ",
    "to": "",
}  # they say most
_STYLE = (
    "<style>text {font: 11px sans-serif; fill: #1f2937; text-anchor: middle} .soft {font-size: 9px; fill: #6b7280} "
    "path {fill: none; stroke: #9ca3af} rect {fill: #eff6ff; stroke: #2563eb} .end {fill: #ecfdf5; stroke: #059669} "
    "svg {background: #fff}</style>"
)


@dataclass(eq=False)
class _Spot:
    """Something that takes a place in a layer: a box, or (without title) a point that an edge passes through."""

    layer: int
    title: str = ""
    note: str = ""
    end: bool = False  # an input or output of the graph
    above: list[_Spot] = field(default_factory=list)
    below: list[_Spot] = field(default_factory=list)
    place: float = 0.0  # in columns


def draw(graph: Graph) -> str:
    """The graph as an SVG image. Constants are not drawn; a node's note is its output's type and main attributes."""
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
    """Boxes of inputs, nodes and outputs, linked by the edges between them."""
    made: dict[Value, _Spot] = {value: _Spot(0, value.name, str(value.type), end=True) for value in graph.inputs}
    boxes, edges = list(made.values()), []
    for node in graph.nodes:
        sources = list(dict.fromkeys(made[value] for value in _read(node) if value in made))
        boxes.append(_Spot(1 + max((source.layer for source in sources), default=0), node.op, _note(node)))
        made.update(dict.fromkeys(node.outputs, boxes[-1]))
        edges += [(source, boxes[-1]) for source in sources]
    last = 1 + max((box.layer for box in boxes), default=0)
    for value in graph.outputs:
        boxes.append(_Spot(last, value.name, str(value.type), end=True))
        edges += [(made[value], boxes[-1])] if value in made else []
    _lower(boxes, edges)
    return boxes + [point for source, target in edges for point in _link(source, target)]


def _lower(boxes: list[_Spot], edges: list[tuple[_Spot, _Spot]]) -> None:
    """Put what reads only constants right above the first box that reads it, instead of at the top."""
    reading = {target for _, target in edges}
    first: dict[_Spot, int] = {}
    for source, target in edges:
        first[source] = min(first.get(source, target.layer), target.layer)
    for box in boxes:
        if box not in reading and not box.end and box in first:
            box.layer = first[box] - 1


def _read(node: Node) -> Iterable[Value]:
    """What a node reads: its operands, and what its subgraphs capture."""
    yield from (value for value in node.inputs if value is not None)
    for body in node.subgraphs:
        own = {*body.inputs, *body.constants, *(value for inner in body.nodes for value in inner.outputs)}
        yield from (value for inner in body.nodes for value in _read(inner) if value not in own)


def _link(source: _Spot, target: _Spot) -> list[_Spot]:
    """Connect two boxes; the points made for the layers between them."""
    points = [_Spot(layer) for layer in range(source.layer + 1, target.layer)]
    way = [source, *points, target]
    for upper, lower in pairwise(way):
        upper.below.append(lower)
        lower.above.append(upper)
    return points


def _note(node: Node) -> str:
    told = ((said, node.attrs.get(name)) for name, said in _SHOWN.items())
    shown = [f"{said}{_short(attribute)}" for said, attribute in told if attribute is not None]
    types = [str(value.type) for value in node.outputs[:1] if isinstance(value.type, TensorType)]
    return ", ".join(types + shown)


def _short(attribute: object) -> str:
    return "x".join(map(str, attribute)) if isinstance(attribute, tuple) else str(attribute)


def _layers(spots: list[_Spot]) -> list[list[_Spot]]:
    layers: list[list[_Spot]] = [[] for _ in range(1 + max(spot.layer for spot in spots))]
    for spot in spots:
        layers[spot.layer].append(spot)
    return [layer for layer in layers if layer]


def _arrange(layers: list[list[_Spot]]) -> None:
    """Give each spot its column: down and up in turn, each layer is sorted by the middle of its neighbours."""
    for layer in layers:
        _settle(layer, [float(i) for i in range(len(layer))])
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            _settle(layer, [_middle(spot, spot.above if down else spot.below) for spot in layer])


def _middle(spot: _Spot, neighbours: list[_Spot]) -> float:
    return sum(other.place for other in neighbours) / len(neighbours) if neighbours else spot.place


def _settle(layer: list[_Spot], wanted: list[float]) -> None:
    """Sort by the wanted places; what would overlap moves apart, evenly to both sides."""
    order = sorted(range(len(layer)), key=lambda i: wanted[i])
    layer[:] = [layer[i] for i in order]
    wanted = [wanted[i] for i in order]
    places: list[float] = []
    for want in wanted:
        places.append(max(want, places[-1] + 1.0) if places else want)
    shift = sum(place - want for place, want in zip(places, wanted, strict=True)) / len(layer)
    for spot, place in zip(layer, places, strict=True):
        spot.place = place - shift


def _at(spot: _Spot) -> tuple[float, float]:
    return (spot.place + 0.5) * _COLUMN, spot.layer * _ROW + _ROW / 2


def _edge(upper: _Spot, lower: _Spot) -> str:
    (x, y), (to_x, to_y) = _at(upper), _at(lower)
    y += _HEIGHT / 2 if upper.title else 0
    to_y -= _HEIGHT / 2 if lower.title else 0
    bend = (y + to_y) / 2
    return f'<path d="M{x:.1f} {y:.1f} C{x:.1f} {bend:.1f} {to_x:.1f} {bend:.1f} {to_x:.1f} {to_y:.1f}"/>'


def _box(spot: _Spot) -> str:
    x, y = _at(spot)
    kind = ' class="end"' if spot.end else ""
    note = spot.note.replace("float32", "")
    note = note if len(note) <= 36 else note[:35] + "…"
    return (
        f'<g><title>{escape(f"{spot.title}: {spot.note}")}</title><rect{kind} x="{x - _WIDTH / 2:.1f}" '
        f'y="{y - _HEIGHT / 2:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{x:.1f}" y="{y - 3:.1f}">{escape(spot.title[:26])}</text>'
        f'<text class="soft" x="{x:.1f}" y="{y + 10:.1f}">{escape(note)}</text></g>'
    )
