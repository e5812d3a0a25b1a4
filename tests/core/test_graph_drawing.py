"""Drawings of graphs: everything is there, nothing lies on top of anything else, edges lead downwards."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import lathe
from lathe.core.drawing.graphs import draw
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType

SVG = "{http://www.w3.org/2000/svg}"
MODEL = Path(__file__).resolve().parents[2] / "model_repo" / "digits" / "2" / "model.onnx"


def branches() -> Graph:
    """relu, exp and neg in a row; the last joins the input again."""
    graph = Graph("branches")
    build = Builder(graph)
    x = build.input("x", TensorType(DType.FLOAT32, (3, 4)))
    row = build("Neg", build("Exp", build("Relu", x)))
    graph.outputs.append(build("Add", row, x))
    return graph


def boxes(svg: str) -> list[tuple[float, float, str]]:
    root = ElementTree.fromstring(svg)
    found = []
    for group in root.iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None and text is not None and text.text
        found.append((float(rect.attrib["x"]), float(rect.attrib["y"]), text.text))
    return found


def test_every_node_input_and_output_has_a_box() -> None:
    graph = lathe.load(MODEL)
    names = sorted(name for _, _, name in boxes(draw(graph)))
    ends = [value.name for value in (*graph.inputs, *graph.outputs)]
    assert names == sorted([*(node.op for node in graph.nodes), *ends])


def test_boxes_do_not_overlap_and_stay_in_the_image() -> None:
    svg = draw(branches())
    places = [(x, y) for x, y, _ in boxes(svg)]
    for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
        assert abs(x - other_x) >= 168 or abs(y - other_y) >= 34
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0])
    assert all(0 <= x <= width - 168 and 0 <= y <= height - 34 for x, y in places)


def test_edges_lead_down_past_the_layers_between() -> None:
    svg = draw(branches())
    ways = [tuple(map(float, re.findall(r"[\d.]+", way))) for way in re.findall(r'<path d="([^"]+)"', svg)]
    assert all(way[1] < way[-1] for way in ways)
    assert len(ways) == 5 + 1 + 3  # x, a, b, c, sum once; x to Add in three further pieces


def test_nodes_of_constants_stand_above_their_reader() -> None:
    graph = branches()
    build = Builder(graph)
    noise = build("RandomNormal", shape=(3, 4))
    graph.outputs = [build("Mul", graph.outputs[0], noise)]
    rows = {name: y for _, y, name in boxes(draw(graph))}
    assert rows["RandomNormal"] == rows["Add"]


def test_names_are_escaped() -> None:
    graph = branches()
    graph.inputs[0].name = "<b>&"
    assert "<b>&" not in draw(graph)
    assert "<b>&" in [name for _, _, name in boxes(draw(graph))]
