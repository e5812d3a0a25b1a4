"""The code of a model for any sizes of its inputs: which models have it, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from core.codegen.target import host
from core.errors import LatheError
from core.ir.dim import Dim, is_never_negative
from core.ir.dims import place_of, size
from core.ir.graph import Graph, node_reads
from core.kernels.catalog import select
from core.ops.registry import are_everywhere
from core.options import Options
from core.passes.base import shape_of
from core.passes.pipeline import Options as PassOptions
from core.passes.pipeline import optimize, prepare
from core.plan.choice import Asked, choose_kernels, plannable
from core.plan.control import NotNative
from core.plan.order import order
from core.plan.plan import Planned
from core.runtime.any_size import AnySize
from core.runtime.background import Background
from core.runtime.executable import Executable
from core.runtime.general import General
from core.runtime.lines import Sizes
from core.runtime.session import BatchInfo, Description
from core.sizes import bind, input_symbols
from core.specialise import Source


class MakePart(Protocol):
    """Compiles a graph, or finds what was compiled of it."""

    def __call__(
        self, graph: Callable[[], Graph], description: Description, binding: Sizes, options: Options
    ) -> Executable: ...


def any_sizes(graph: Graph) -> Sizes:
    """The binding of code for any sizes: a size of the table for each symbol of the inputs."""
    return tuple((name, size(place)) for place, name in enumerate(input_symbols(graph)))


def is_any_size(binding: Sizes) -> bool:
    """Whether a binding is that of code for any sizes."""
    return any(place_of(str(dim)) is not None for _, dim in binding)


def of_any_size(graph: Graph, batching: BatchInfo, options: Options) -> bool:
    """Whether every node of the model has a kernel that takes any sizes. Models whose only symbol is the batch size
    need no such code."""
    others = set(input_symbols(graph)) - {batching.symbol}
    if graph.states or options.packing or options.devices or not others:
        return False
    try:
        bound = bind(graph, batching, any_sizes(graph))
        passes = optimize if options.optimize else prepare
        rewritten, _ = passes(bound, PassOptions(precision=options.precision))
        asked = Asked(host(), options.threads, select, options.winograd, _no_body)
        choice = choose_kernels(rewritten, order(rewritten), asked)
    except (LatheError, ValueError):
        return False
    return not choice.reasons and all(map(plannable, rewritten.outputs))


def extents(graph: Graph) -> tuple[Dim, ...]:
    """What the code for any sizes supposes besides the types: kernels are written for extents of at least one. A part
    of a Concat may be empty, as a past is before the first token."""
    read = [value for node in graph.nodes if node.op != "Concat" for value in node_reads(node)]
    made = [value for node in graph.nodes for value in node.outputs]
    dims = dict.fromkeys(dim for value in (*read, *made) for dim in shape_of(value) or ())
    return tuple(dim - 1 for dim in dims if not isinstance(dim, int) and not is_never_negative(dim - 1))


def _no_body(graph: Graph) -> Planned:
    raise NotNative("control flow has code for one batch size")


def for_any_size(options: Options) -> Options:
    """The options of such code: it is there at once, so nothing is measured. Strassen's products are left out: their
    number of rows is chosen for one size."""
    return replace(options, tune=0.0, tune_later=0.0, winograd=False)


def any_size(
    graph: Graph, description: Description, options: Options, make: MakePart, source: Source | None
) -> AnySize:
    """The stand-in of a model of any size. `source`: where a child process finds the graph."""
    chosen, binding = for_any_size(options), any_sizes(graph)

    def at_hand() -> bool:
        return source is not None and source.place(binding, chosen).exists()

    def compile_beside(background: Background) -> None:
        if source is not None and are_everywhere():
            background.run_child(source.command(binding, chosen))

    return AnySize(
        lambda: make(lambda: graph, description, binding, chosen),
        description.batching.symbol,
        General(graph),
        at_hand,
        compile_beside,
    )
