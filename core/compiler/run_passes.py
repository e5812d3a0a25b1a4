"""Runs the passes on a graph, with the options of a compilation."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.check.switch import is_checking
from lathe.core.codegen.target import has_int8_dot, host
from lathe.core.compiler.options import Options
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Graph
from lathe.core.passes.pipeline import Options as PassOptions
from lathe.core.passes.pipeline import PassReport, optimize, prepare
from lathe.core.passes.precision.widen import product_dtype
from lathe.core.precisions import INT8_ROWS


@dataclass(frozen=True)
class OptimizedGraph:
    """A graph after the passes, and their reports.

    `supposed`: the dimensions that inference assumed to be 0 or more in the graph before the passes.
    """

    graph: Graph
    reports: list[PassReport]
    supposed: tuple[Dim, ...]


def run_passes(
    graph: Graph, options: Options, inside: bool = False, in_parts: bool = False
) -> tuple[Graph, list[PassReport]]:
    """A copy of a graph, whose symbols are bound already, after the passes; and the reports of the passes.

    `graph` itself stays unchanged. `inside`: the graph is the body of an If, Loop or Scan. `in_parts`: the graph will
    be cut into parts. Bodies of If, Loop and Scan then stay as they are, because each is compiled later as a graph of
    its own. Without devices besides the CPU, device annotations have no effect, and a report says so.
    """
    here = not options.devices
    graph, note = _without_devices(graph) if here else (graph, [])
    own = product_dtype(graph)
    wanted = "float32" if options.precision in ("tf32", INT8_ROWS) else options.precision
    precision = str(own) if own is not None and wanted == "float32" else wanted
    integers = not here or has_int8_dot(host())
    rows = options.precision == INT8_ROWS
    passes = PassOptions(
        precision=precision, integers=integers, int8_rows=rows, host=here, inside=inside, in_parts=in_parts
    )
    graph, reports = (optimize if options.optimize else prepare)(graph, passes)
    if is_checking():
        from lathe.core.check.types import check_types

        check_types(graph)
    return graph, [*note, *reports]


def _without_devices(graph: Graph) -> tuple[Graph, list[PassReport]]:
    """A graph without device annotations, and a report that says so; the graph itself if it has none."""
    count = sum(bool(node.device) for node in graph.nodes)
    if not count:
        return graph, []
    graph = graph.clone()
    for node in graph.nodes:
        node.device = ""
    nodes = len(graph.nodes)
    note = "without effect, as the model is compiled for the CPU alone"
    return graph, [PassReport("device annotations", count, nodes, nodes, 0.0, (note,))]
