"""The compiler pipeline, one line per stage: from a graph to native code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from lathe.core.codegen.target import host
from lathe.core.compiler.dynamic_shapes import assumptions_of_sizes, has_dynamic_kernels
from lathe.core.compiler.options import Options
from lathe.core.compiler.options import make_options as make_options
from lathe.core.compiler.partitioning import partition_model
from lathe.core.compiler.placement import split
from lathe.core.compiler.run_passes import OptimizedGraph, run_passes
from lathe.core.compiler.symbol_binding import bind, code_assumptions, varying_symbols
from lathe.core.compiler.tuner import Record, choices
from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Graph
from lathe.core.kernels.call import Selector
from lathe.core.kernels.cpu import object_for
from lathe.core.kernels.target import Target
from lathe.core.passes.lowering.recompute import Recompute
from lathe.core.passes.pipeline import PassReport
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.plan.batch_validity import find_batch_specific_node
from lathe.core.plan.memory_limit import plan_within
from lathe.core.plan.plan import Plan, PlannedGraph, weight_chunks
from lathe.core.plan.planner import make_plan, placeholder_plan
from lathe.core.runtime.artifact.compiled import (
    Compiled,
    Partitioned,
    Split,
    make_partitioned_runner,
    make_placed_runner,
    make_runner,
)
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.device.devices import HOST
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.host.memory import machine_bytes
from lathe.core.runtime.host.plan_memory import DeviceBlock
from lathe.core.runtime.host.trial import host_bench
from lathe.core.runtime.session.run_inputs import CodeBinding, batching_for, is_dynamic
from lathe.core.runtime.session.runner import Runner

_BY_DEFINITION = "winograd=False: every product is computed by its definition"


def compile_executable(
    graph: Graph,
    options: Options,
    batching: BatchInfo,
    binding: CodeBinding,
    adopted: Mapping[str, DeviceBlock] | None = None,
) -> Runner:
    """Compile code for one binding of the symbols (numbers, or sizes for dynamic-shape code), and load it to run.

    `adopted`: by name, states whose device memory another runner owns, as for `load_code`; they keep their values.
    Errors are those of `build` and `load_code`. The caller closes the result.
    """
    batching = batching_for(batching, binding)
    return load_code(build(graph, options, batching, binding), options, batching, adopted)


def compile_host_executable(graph: Graph, options: Options, batching: BatchInfo, binding: CodeBinding) -> Executable:
    """As `compile_executable`, for callers that need an `Executable`.

    UnsupportedError if the options name devices, or if the code is dynamic-shape code in parts.
    """
    return require_host(compile_executable(graph, options, batching, binding))


def require_host(made: Runner) -> Executable:
    """`made` itself. UnsupportedError, after `made` is closed, if it is for devices, or dynamic-shape code in parts."""
    if not isinstance(made, Executable):
        made.close()
        devices = ", ".join(dict.fromkeys(share.device for share in made.shares if share.device != HOST))
        got = f"code for {devices}" if devices else "dynamic-shape code in parts"
        raise UnsupportedError(f"expected one piece of code for the CPU, got {got}")
    return made


def load_code(
    compiled: Compiled | Split | Partitioned,
    options: Options,
    batching: BatchInfo,
    adopted: Mapping[str, DeviceBlock] | None = None,
) -> Runner:
    """Load compiled code and its weights into memory, ready to run.

    For a `Split`, which `build` returns if the options name devices, `adopted` maps names of states to blocks of
    device memory that another runner owns: the result uses them in place, and does not free them. Otherwise `adopted`
    is ignored. DeviceMemoryError if a device has too little memory. The caller closes the result, before the owner of
    adopted blocks.
    """
    if isinstance(compiled, Partitioned):
        return make_partitioned_runner(compiled, options.threads, options.max_batch)
    if isinstance(compiled, Split):
        return make_placed_runner(
            compiled,
            lambda part: make_runner(part, options.threads, options.max_batch, independent=False, adopted=adopted),
        )
    return make_runner(compiled, options.threads, options.max_batch, batching.is_divisible)


def build(
    graph: Graph, options: Options, batching: BatchInfo, binding: CodeBinding, ahead: OptimizedGraph | None = None
) -> Compiled | Split | Partitioned:
    """The whole pipeline: compile `graph`, with symbols replaced by `binding`, to native code.

    If the graph has no states, rows are not independent and some node is valid for some batch sizes only, the result is
    a `Compiled` without kernels whose plan serves no batch size (`placeholder_plan`). Otherwise it is `Split` if the
    options name devices, and for dynamic-shape code `Partitioned` if some nodes have no dynamic kernel, or outputs must
    be copied. `ahead`: the graph after the passes, if they ran before. Object code and findings of the tuner are added
    to the store, if there is one.

    ModelError if the graph does not accept the values of `binding`, if its weights and the results of one row exceed
    the memory of this machine, or if the arena cannot keep to `options.memory`. UnsupportedError for dynamic-shape code
    if no node has a dynamic kernel, and for a pinned node that its device cannot run.
    """
    if not options.optimize:  # the graph as it is written, so products by their definition, too
        options = replace(options, winograd=False)
    # 1. the batch size becomes `n`, every other symbol a number; in dynamic-shape code all become sizes of a table
    # 2. rewrite: fold, fuse, lay out
    optimized = ahead or _optimize(graph, options, batching, binding)
    whole, graph, reports = graph, optimized.graph, optimized.reports
    if ahead is None and is_dynamic(binding) and not has_dynamic_kernels(graph, options):
        return partition_model(whole, options, batching, binding)
    after = (*code_assumptions(graph, *varying_symbols(binding)), *assumptions_of_sizes(graph, binding))
    supposed = tuple(dict.fromkeys((*optimized.supposed, *after)))
    if not batching.batchable and not graph.states and (node := find_batch_specific_node(graph)) is not None:
        return Compiled(placeholder_plan(graph, target_of(options), node), {}, list)
    if options.devices:
        return split(graph, options, [report.line for report in reports if report.changed], supposed)
    # 3. measure alternatives, as far as the options allow
    store = open_store(options.cache_dir)
    compiled = partial(object_for, target=host(), cache=store.objects if store else None)
    record = Record(store.tuning_folder, host()) if store else None
    choose = choices(graph, target_of(options), options, record, host_bench(compiled))
    # 4. choose kernels, share memory, give addresses
    planned, reports = plan_graph(graph, options, choose, reports, supposed)
    check_fits(planned.plan, machine_bytes())
    if is_dynamic(binding) and (planned.plan.fallbacks.nodes or planned.plan.copies):
        return partition_model(whole, options, batching, binding)
    # 5. native code for every distinct kernel, from the cache if it was made before
    objects = {name: compiled(spec) for name, spec in planned.specs.items()}
    # 6. constants in the layouts the kernels want
    log = [*([] if options.winograd else [_BY_DEFINITION]), *(report.line for report in reports if report.changed)]
    sizes = tuple(name for name, _ in binding) if is_dynamic(binding) else ()
    plan = replace(planned.plan, log=tuple(log), sizes=sizes)
    states = {state.value.name: state.initial for state in graph.states}
    return Compiled(plan, objects, lambda: weight_chunks(planned), states, choose.used)


def _optimize(graph: Graph, options: Options, batching: BatchInfo, binding: CodeBinding) -> OptimizedGraph:
    """The graph with symbols replaced by `binding`, after the passes."""
    bound = bind(graph, batching, binding)
    # Without a binding, the assumptions are those that `describe` looked for.
    supposed = code_assumptions(bound, *varying_symbols(binding)) if binding or batching.supposed else ()
    return OptimizedGraph(*run_passes(bound, options), supposed)


def plan_without_code(graph: Graph, options: Options, batching: BatchInfo) -> Plan:
    """The plan of `graph` on the host, with the kernels that are chosen without measuring; no code is compiled.

    `batching` is that of the model's description. ModelError as in `build`.
    """
    options = replace(options, tune=0.0, devices=())
    optimized = _optimize(graph, options, batching, ())
    choose = choices(optimized.graph, target_of(options), options, None, None)
    return plan_graph(optimized.graph, options, choose, optimized.reports, optimized.supposed)[0].plan


def target_of(options: Options) -> Target:
    """The host's CPU as target, with TensorFloat-32 products if the options' precision is "tf32"."""
    return replace(host(), tf32=options.precision == "tf32")


def plan_graph(
    graph: Graph, options: Options, choose: Selector, reports: list[PassReport], supposed: tuple[Dim, ...]
) -> tuple[PlannedGraph, list[PassReport]]:
    """The plan of an optimized graph, and `reports`.

    If `options.memory` is set, the recompute pass keeps the arena within that many bytes (ModelError if it cannot), and
    its report is appended. `choose` selects the kernel of a node. `supposed`: dimensions that the plan assumes to be 0
    or more.
    """
    plan = partial(
        make_plan,
        target=target_of(options),
        threads=options.threads,
        choose=choose,
        winograd=options.winograd,
        supposed=supposed,
    )
    if options.memory is None:
        return plan(graph), reports
    start = time.perf_counter()
    planned, changed, result = plan_within(graph, options.memory, plan)
    nodes, seconds = (len(graph.nodes), len(changed.nodes)), time.perf_counter() - start
    report = PassReport(Recompute.name, result.changed, *nodes, seconds, result.notes)
    return planned, [*reports, report]


def check_fits(plan: Plan, machine: int) -> None:
    """Raise ModelError if weights and arena for one row exceed `machine`, the bytes of the machine's memory."""
    needed = plan.arena.at(1) + plan.weights
    if needed > machine:
        message = f"needs {needed} bytes for weights and the results of one row, this machine has {machine}"
        raise ModelError(message, where="model")
