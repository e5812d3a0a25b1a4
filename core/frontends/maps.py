"""What a server cannot carry: maps from class label to score become tensors."""

from __future__ import annotations

from core.ir.graph import Graph, Node, Value


def maps_as_tensors(graph: Graph) -> None:
    """Let outputs that ZipMap makes, a map for each row, be the scores themselves, [rows, labels] in the labels' order.

    scikit-learn's converter ends every classifier so unless it is told not to. Changes `graph`.
    """
    for index, output in enumerate(graph.outputs):
        zipped = output.producer
        if zipped is None or zipped.op != "ZipMap" or zipped.inputs[0] is None:
            continue
        scores = Value(output.name, zipped.inputs[0].type)
        scores.producer = Node("Identity", [zipped.inputs[0]], [scores], name=zipped.name)
        graph.outputs[index] = scores
        graph.nodes[graph.nodes.index(zipped)] = scores.producer
