"""The code of a model for any sizes of its inputs: which models have it, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from core.codegen.target import host
from core.errors import LatheError
from core.ir.dim import FILLED, Dim, maxima, substitute, symbol, symbols
from core.ir.dims import filled, place_of, size
from core.ir.graph import Graph, Node, Value
from core.kernels.catalog import select
from core.ops.registry import are_everywhere
from core.options import Options
from core.passes.base import shape_of
from core.plan.choice import Asked, Choice, choose_kernels, plannable
from core.plan.control import CONTROL, NotNative
from core.plan.order import order
from core.plan.plan import Planned
from core.rewriting import Rewritten, rewritten
from core.runtime.any_size import AnyCode, AnySize
from core.runtime.background import Background
from core.runtime.executable import Executable
from core.runtime.general import General
from core.runtime.given import Sizes, is_any_size
from core.runtime.session import BatchInfo, Description
from core.runtime.shapes import StandIn
from core.sizes import bind, equal_sizes, extents_of, input_symbols
from core.specialise import Source


class MakePart(Protocol):
    """Compiles a graph, or finds what was compiled of it."""

    def __call__(
        self, graph: Callable[[], Graph], description: Description, binding: Sizes, options: Options
    ) -> Executable: ...


class MakeAnySize(Protocol):
    """The same for code for any sizes, which may be in parts."""

    def __call__(
        self, graph: Callable[[], Graph], description: Description, binding: Sizes, options: Options
    ) -> AnyCode: ...


@dataclass(frozen=True)
class Sized:
    """Facts about a model's code for any sizes, found before it is compiled. `binding` gives each symbol of the inputs
    in terms of the sizes of the code's table. It is empty where no node has a kernel that takes any sizes, and for
    models where only the batch size is free: they have no other symbol, or weights fix what those are.

    `whole`: each node has one; else that code is in parts. `rewritten`: the graph of whole code as passes leave it,
    with their reports, so that compiling need not run them again.
    """

    binding: Sizes = ()
    whole: bool = False
    rewritten: Rewritten | None = None


def sizes_of(graph: Graph, batching: BatchInfo, options: Options) -> Sized:
    """Find out which code for any sizes a model can have."""
    if graph.states or options.packing or options.devices or set(input_symbols(graph)) <= {batching.symbol}:
        return Sized()
    try:
        binding = with_equal_sizes(graph)
        if _are_numbers(binding, batching):
            return Sized()
        (compiled, reports), choice = _chosen(graph, batching, binding, options)
        if _is_whole(compiled, choice):
            return Sized(binding, True, (compiled, reports))
        if in_use := _in_use(compiled, binding):
            other = with_equal_sizes(graph, in_use)
            if _are_numbers(other, batching):
                return Sized()
            done, chosen = _chosen(graph, batching, other, options)
            if _is_whole(done[0], chosen):
                return Sized(other, True, done)
    except (LatheError, ValueError):
        return Sized()
    return Sized(binding if _has_some(compiled, choice) else ())


def _are_numbers(binding: Sizes, batching: BatchInfo) -> bool:
    """Whether all but the batch size are numbers: code for any batch size and these numbers serves all runs."""
    return {name for name, dim in binding if not isinstance(dim, int)} <= {batching.symbol}


def _in_use(graph: Graph, binding: Sizes) -> frozenset[str]:
    """The symbols whose sizes code for a graph supposes to be 1 or more, if there is a maximum that this may decide:
    min(n, 1) is 1 then, and broadcasts."""
    if not any(maxima(dim) for value in graph.values() for dim in shape_of(value) or ()):
        return frozenset()
    supposed = set(extents_of(graph))
    return frozenset(name for name, dim in binding if dim - 1 in supposed and place_of(str(dim)) is not None)


def reasons_for_any_size(graph: Graph, batching: BatchInfo, options: Options) -> Mapping[Node, str]:
    """Why nodes of a graph have no kernel for any sizes of its inputs. LatheError where no binding fits the graph."""
    return _chosen(graph, batching, with_equal_sizes(graph), options)[1].reasons


def _chosen(graph: Graph, batching: BatchInfo, binding: Sizes, options: Options) -> tuple[Rewritten, Choice]:
    """The graph as passes leave it once it is bound, and its kernels."""
    done = rewritten(bind(graph, batching, binding), options)
    return done, kernels_for(done[0], order(done[0]), options)


def has_kernels(graph: Graph, options: Options) -> bool:
    """Whether each node of a graph, which passes have rewritten, has a kernel for any sizes."""
    return _is_whole(graph, kernels_for(graph, order(graph), options))


def kernels_for(graph: Graph, nodes: Sequence[Node], options: Options) -> Choice:
    """The kernels for any sizes of these nodes of a graph, and why others have none."""
    asked = Asked(host(), options.threads, select, options.winograd, _no_body)
    return choose_kernels(graph, nodes, asked)


def _is_whole(graph: Graph, choice: Choice) -> bool:
    return not choice.reasons and _are_computed(graph.outputs, choice)


def _has_some(graph: Graph, choice: Choice) -> bool:
    """Whether some node has a kernel, or there are bodies whose nodes may have one."""
    return bool(choice.calls) or any(node.op in CONTROL for node in graph.nodes)


def _are_computed(outputs: Sequence[Value], choice: Choice) -> bool:
    """Whether kernels write each output where it belongs: none is an input, a constant, or what another one is."""
    roots = [choice.root(value) for value in outputs]
    return len(set(roots)) == len(roots) and all(root.producer is not None and plannable(root) for root in roots)


def with_equal_sizes(graph: Graph, in_use: Collection[str] = ()) -> Sizes:
    """A size of the table for each symbol of the inputs, or what it has to be where others are given. Where nodes need
    two extents to be equal, one is taken to be the other: the past of one layer is as long as that of the others. So it
    is where extents broadcast: the length of a mask is that of the tokens, or of the past and the tokens together. Runs
    where that does not hold get code of their own. Those in `in_use` are supposed to be 1 or more."""
    names = input_symbols(graph)
    binding: Sizes = tuple((name, (filled if name in in_use else size)(place)) for place, name in enumerate(names))
    for _ in names:
        bound = graph.clone(dict(binding))
        bound.defaults.clear()  # as `bind` does
        found = equal_sizes(bound)
        if not found:
            break
        binding = tuple((name, substitute(dim, found)) for name, dim in binding)
    return binding


def supposed_of_sizes(graph: Graph, binding: Sizes) -> tuple[Dim, ...]:
    """What code for any sizes supposes besides the types of its graph; nothing for other bindings."""
    return (*_equalities(binding), *_fillings(binding), *extents_of(graph)) if is_any_size(binding) else ()


def _equalities(binding: Sizes) -> tuple[Dim, ...]:
    """What must not be negative where each size of the table is what the binding takes it for."""
    pairs = [(size(place), dim) for place, (_, dim) in enumerate(binding) if dim not in (size(place), filled(place))]
    return tuple(difference for one, other in pairs for difference in (one - other, other - one))


def _fillings(binding: Sizes) -> tuple[Dim, ...]:
    """What must not be negative where the sizes that the binding takes to be 1 or more are so."""
    names = sorted(frozenset().union(*(symbols(dim) for _, dim in binding)))
    return tuple(symbol(name) - 1 for name in names if name.startswith(FILLED))


def _no_body(graph: Graph) -> Planned:
    raise NotNative("bodies of control flow have code for one batch size, or parts of their own")


def for_any_size(options: Options) -> Options:
    """The options of such code: it is there at once, so nothing is measured. Strassen's products are left out: their
    number of rows is chosen for one size."""
    return replace(options, tune=0.0, tune_later=0.0, winograd=False)


def stand_in(
    graph: Graph, description: Description, options: Options, make: MakeAnySize, source: Source | None, waits: bool
) -> StandIn:
    """What answers for shapes that have no code of their own: code for any sizes, or else the references. `source`:
    where a child process finds the graph. `waits`: see `AnySize`."""
    general, chosen, binding = General(graph), for_any_size(options), description.any_size
    if not binding:
        return general

    def at_hand() -> bool:
        return source is not None and source.place(binding, chosen).exists()

    def compile_beside(background: Background) -> None:
        if source is not None and are_everywhere():
            background.run_child(source.command(binding, chosen))

    return AnySize(
        lambda: make(lambda: graph, description, binding, chosen),
        description.batching.symbol,
        general,
        at_hand,
        compile_beside,
        waits,
    )
