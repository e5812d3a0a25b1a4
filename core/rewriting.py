"""What passes make of a graph, as the options of a compilation say."""

from __future__ import annotations

from typing import TypeAlias

from core.check.switch import is_on
from core.codegen.target import has_bytes, host
from core.ir.graph import Graph
from core.options import Options
from core.passes.pipeline import Options as PassOptions
from core.passes.pipeline import PassReport, optimize, prepare
from core.passes.widen import narrow_products

Rewritten: TypeAlias = tuple[Graph, list[PassReport]]


def rewritten(graph: Graph, options: Options, inside: bool = False, in_parts: bool = False) -> Rewritten:
    """A graph whose shapes are known, as the passes leave it for what the options name. `inside` and `in_parts`: see
    the options of passes."""
    here = not options.devices
    own = narrow_products(graph)
    wanted = "float32" if options.precision == "tf32" else options.precision
    precision = str(own) if own is not None and wanted == "float32" else wanted
    integers = not here or has_bytes(host())
    passes = PassOptions(precision=precision, integers=integers, host=here, inside=inside, in_parts=in_parts)
    graph, reports = (optimize if options.optimize else prepare)(graph, passes)
    if is_on():
        from core.check.types import check_types

        check_types(graph)
    return graph, reports
