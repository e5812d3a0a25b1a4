"""Replaces outputs that are maps from class labels to scores, which the server cannot send, by tensors."""

from __future__ import annotations

from lathe.core.ir.graph import Graph, Node, Value


def maps_as_tensors(graph: Graph) -> None:
    """Replace each output that a ZipMap computes (a map per row) by its scores, [rows, labels] in the order of labels.

    By default, scikit-learn's converter ends every classifier with a ZipMap. Changes `graph`.
    """
    for index, output in enumerate(graph.outputs):
        zipped = output.producer
        if zipped is None or zipped.op != "ZipMap" or zipped.inputs[0] is None:
            continue
        scores = Value(output.name, zipped.inputs[0].type)
        scores.producer = Node("Identity", [zipped.inputs[0]], [scores], name=zipped.name)
        graph.outputs[index] = scores
        graph.nodes[graph.nodes.index(zipped)] = scores.producer
