"""Dynamic-shape code: whether a model can have it, and the stand-in that runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lathe.core.codegen.target import host
from lathe.core.compiler.options import Options
from lathe.core.compiler.run_passes import OptimizedGraph, run_passes
from lathe.core.compiler.specialise import CompileSource
from lathe.core.compiler.symbol_binding import (
    code_assumptions,
    equal_sizes,
    inferred_copy,
    input_symbols,
    least_extents,
    varying_symbols,
)
from lathe.core.errors import LatheError
from lathe.core.ir.dim import FILLED, Dim, maxima, substitute, symbol, symbols
from lathe.core.ir.dims import filled, size, size_index
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.verify import verify
from lathe.core.kernels.choose import select
from lathe.core.ops.opdef.registry import are_known_to_children
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.rewrite.base import shape_of
from lathe.core.plan.control import CONTROL, NotNativeError
from lathe.core.plan.kernel_choice import ChoiceOptions, KernelChoice, choose_kernels, is_plannable
from lathe.core.plan.order import node_order
from lathe.core.plan.plan import PlannedGraph
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.dynamic_shapes import DynamicRunner, DynamicShapeCode
from lathe.core.runtime.session.executables import StandIn
from lathe.core.runtime.session.reference_runner import ReferenceRunner
from lathe.core.runtime.session.run_inputs import CodeBinding, is_dynamic
from lathe.core.runtime.session.session import Description


class MakePart(Protocol):
    """A function that compiles a graph for a binding of its symbols, or loads the code from the store."""

    def __call__(
        self, graph: Callable[[], Graph], description: Description, binding: CodeBinding, options: Options
    ) -> Executable: ...


class MakeDynamic(Protocol):
    """A function that compiles dynamic-shape code, or loads it from the store; the code may be in parts."""

    def __call__(
        self, graph: Callable[[], Graph], description: Description, binding: CodeBinding, options: Options
    ) -> DynamicRunner: ...


@dataclass(frozen=True)
class DynamicShapes:
    """Facts about a model's dynamic-shape code, found before it is compiled.

    `binding` gives each symbol of the inputs in terms of the sizes of the code's table. It is empty if the model gets
    no such code: no node has a dynamic kernel; or the graph is not valid for these sizes; or the model has states, is
    packed, or runs on devices; or its only dynamic dimension is the batch size, because there is no other symbol, or
    weights fix the others.

    `whole`: each node has a dynamic kernel; otherwise the code is in parts. `optimized`: the graph of whole code after
    the passes, so that compiling need not run them again; otherwise None.
    """

    binding: CodeBinding = ()
    whole: bool = False
    optimized: OptimizedGraph | None = None


def find_dynamic_shapes(graph: Graph, batching: BatchInfo, options: Options, packed: bool = False) -> DynamicShapes:
    """Facts about the dynamic-shape code that a model gets; an empty `binding` if it gets none.

    `packed`: its sequences run packed, in code that serves all lengths already.
    """
    if graph.states or packed or options.devices or set(input_symbols(graph)) <= {batching.symbol}:
        return DynamicShapes()
    try:
        bound = _bind_sizes(graph)
        if _are_numbers(bound.binding, batching):
            return DynamicShapes()  # code for all batch sizes and these numbers serves all runs
        done, choice = _choose_kernels(bound, options)
        if _is_whole(done.graph, choice):
            return DynamicShapes(bound.binding, True, done)
        if in_use := _in_use(done.graph, bound.binding):
            other = _bind_sizes(graph, in_use)
            if _are_numbers(other.binding, batching):
                return DynamicShapes()
            again, chosen = _choose_kernels(other, options)
            if _is_whole(again.graph, chosen):
                return DynamicShapes(other.binding, True, again)
    except (LatheError, ValueError):
        return DynamicShapes()
    return DynamicShapes(bound.binding if _has_some(done.graph, choice) else ())


def _are_numbers(binding: CodeBinding, batching: BatchInfo) -> bool:
    """Whether the binding gives every symbol except the batch symbol a number.

    Then code for any batch size with these numbers serves all runs.
    """
    return {name for name, dim in binding if not isinstance(dim, int)} <= {batching.symbol}


def _in_use(graph: Graph, binding: CodeBinding) -> frozenset[str]:
    """Those symbols of the binding that are sizes which the kernels of `graph` need to be at least 1.

    Empty if no dimension of the graph contains a maximum, `max(..)`. With the assumption that a size is positive, a
    maximum may be one of its sides: min(n, 1), which is n + 1 - max(n, 1), is 1 and broadcasts.
    """
    if not any(maxima(dim) for value in graph.values() for dim in shape_of(value) or ()):
        return frozenset()
    supposed = set(least_extents(graph))
    return frozenset(name for name, dim in binding if dim - 1 in supposed and size_index(str(dim)) is not None)


def reasons_without_kernel(graph: Graph, options: Options) -> Mapping[Node, str]:
    """The nodes without a dynamic kernel, each with the reason. They are nodes of a copy of `graph` after the passes.

    LatheError if the graph is not valid with the symbols of its inputs replaced as in `dynamic_binding`.
    """
    return _choose_kernels(_bind_sizes(graph), options)[1].reasons


def _choose_kernels(bound: BoundGraph, options: Options) -> tuple[OptimizedGraph, KernelChoice]:
    """The graph after the passes, and its dynamic kernels with the reasons why nodes have none."""
    verify(bound.graph, "binding shapes")
    supposed = code_assumptions(bound.graph, *varying_symbols(bound.binding), known=bound.known)
    graph, reports = run_passes(bound.graph, options)
    return OptimizedGraph(graph, reports, supposed), dynamic_kernels(graph, node_order(graph), options)


def has_dynamic_kernels(graph: Graph, options: Options) -> bool:
    """Whether each node of `graph`, on which the passes ran, has a dynamic kernel, and nodes compute all outputs.

    False if an output of the graph is an input, a constant, a view of these or of another output, or the same value as
    another output.
    """
    return _is_whole(graph, dynamic_kernels(graph, node_order(graph), options))


def dynamic_kernels(graph: Graph, nodes: Sequence[Node], options: Options) -> KernelChoice:
    """The kernels for dynamic-shape code of these nodes of a graph, and for nodes without one the reasons."""
    asked = ChoiceOptions(host(), options.threads, select, options.winograd, _plan_rows)
    return choose_kernels(graph, nodes, asked)


def _is_whole(graph: Graph, choice: KernelChoice) -> bool:
    return not choice.reasons and _all_computed(graph.outputs, choice)


def _has_some(graph: Graph, choice: KernelChoice) -> bool:
    """Whether some node has a kernel, or there are subgraphs whose nodes may have one."""
    return bool(choice.calls) or any(node.op in CONTROL for node in graph.nodes)


def _all_computed(outputs: Sequence[Value], choice: KernelChoice) -> bool:
    """Whether nodes compute all outputs, in memory of their own.

    That is: none is an input, a constant, a view of these or of another output, or the same value as another.
    """
    roots = [choice.root(value) for value in outputs]
    return len(set(roots)) == len(roots) and all(root.producer is not None and is_plannable(root) for root in roots)


def dynamic_binding(graph: Graph) -> CodeBinding:
    """The binding of dynamic-shape code: each input symbol with its value, a function of sizes (`size0`, `size1`, ...).

    A symbol is one of the sizes, unless it follows from others. If nodes need two extents to be equal, one is replaced
    by the other, such as the past of one layer by that of the others. The same holds if extents broadcast: the length
    of a mask is that of the tokens, or of the past and the tokens together. This code does not serve runs that violate
    such an equality (see `assumptions_of_sizes`).
    """
    return _bind_sizes(graph).binding


@dataclass(frozen=True)
class BoundGraph:
    """A copy of a graph whose symbols have the values of `binding`, and what inference knows of its values."""

    binding: CodeBinding
    graph: Graph
    known: dict[Value, Array]


def _bind_sizes(graph: Graph, in_use: Collection[str] = ()) -> BoundGraph:
    """The graph with its `dynamic_binding`. The sizes of the symbols in `in_use` are assumed to be 1 or more."""
    names = input_symbols(graph)
    binding: CodeBinding = tuple(
        (name, (filled if name in in_use else size)(place)) for place, name in enumerate(names)
    )
    bound, known = inferred_copy(graph, dict(binding))
    for _ in names:
        found = equal_sizes(bound, known)
        if not found:
            break
        binding = tuple((name, substitute(dim, found)) for name, dim in binding)
        bound, known = inferred_copy(graph, dict(binding))
    return BoundGraph(binding, bound, known)


def assumptions_of_sizes(graph: Graph, binding: CodeBinding) -> tuple[Dim, ...]:
    """Dimensions that dynamic-shape code assumes to be 0 or more, besides those that inference finds in `graph`.

    Empty if the binding is not that of dynamic-shape code.
    """
    return (*_equalities(binding), *_fillings(binding), *least_extents(graph)) if is_dynamic(binding) else ()


def _equalities(binding: CodeBinding) -> tuple[Dim, ...]:
    """Dimensions that are all 0 or more if and only if each size of the table equals its value in the binding."""
    pairs = [(size(place), dim) for place, (_, dim) in enumerate(binding) if dim not in (size(place), filled(place))]
    return tuple(difference for one, other in pairs for difference in (one - other, other - one))


def _fillings(binding: CodeBinding) -> tuple[Dim, ...]:
    """The dimensions `size - 1`, for each size that the binding assumes to be at least 1 (`filled0`, ...)."""
    names = sorted(frozenset().union(*(symbols(dim) for _, dim in binding)))
    return tuple(symbol(name) - 1 for name in names if name.startswith(FILLED))


def _plan_rows(graph: Graph) -> PlannedGraph:
    """The plan of a body whose inputs all have the one symbol `n`, as in MapSelected; NotNativeError for others."""
    if graph.inputs and all(value.tensor.symbols == {"n"} for value in graph.inputs):
        return make_plan(graph, host(), winograd=False)
    raise NotNativeError("subgraphs of control flow have code for one batch size, or parts of their own")


def dynamic_options(options: Options) -> Options:
    """The options of dynamic-shape code.

    Nothing is measured, so that the code is ready soon. `winograd` is false, because Strassen's products, which it
    would allow, choose a number of rows for one size.
    """
    return replace(options, tune=0.0, tune_later=0.0, winograd=False)


def stand_in(
    graph: Graph,
    description: Description,
    options: Options,
    make: MakeDynamic,
    source: CompileSource | None,
    waits: bool,
) -> StandIn:
    """The runner for shapes without code of their own: dynamic-shape code, or the reference runner.

    It is the reference runner if `description.any_size` is empty. `make` loads or compiles dynamic-shape code, when the
    runner is prepared. `source`: the file in which a child process finds the graph; None: no child process compiles.
    `waits`: runs whose sizes the dynamic-shape code excludes wait for code of their own; otherwise the reference runner
    answers them.
    """
    general, chosen, binding = ReferenceRunner(graph), dynamic_options(options), description.any_size
    if not binding:
        return general

    def at_hand() -> bool:
        return source is not None and source.place(binding, chosen).exists()

    def compile_beside(background: Background) -> None:
        if source is not None and are_known_to_children():
            background.run_child(source.command(binding, chosen))

    return DynamicShapeCode(
        lambda: make(lambda: graph, description, binding, chosen),
        description.batching.symbol,
        general,
        at_hand,
        compile_beside,
        waits,
    )
