"""The order of the passes, readable at a glance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.errors import VerifyError
from core.ir.graph import Graph
from core.ir.verify import verify
from core.passes.attention import FuseAttention
from core.passes.base import Pass, PassError
from core.passes.batch_axes import BatchAxes
from core.passes.batch_last import BatchLast
from core.passes.bind_params import BindParams
from core.passes.control import OptimizeBodies
from core.passes.conv_chain import ChainConvolutions
from core.passes.cse import CommonSubexpressions
from core.passes.definitions import CONVOLUTIONS, Define
from core.passes.elementwise import FuseElementwise
from core.passes.eliminate import Eliminate
from core.passes.epilogue import FuseEpilogue
from core.passes.exact_products import ExactProducts
from core.passes.fitted import ExpandFitted
from core.passes.fold_affine import FoldAffine
from core.passes.fold_constants import FoldConstants
from core.passes.gemm import FuseMatMul
from core.passes.grouped_queries import GroupedQueries
from core.passes.indexed_views import IndexedViews
from core.passes.inline_if import InlineIf
from core.passes.iota import WriteIota
from core.passes.layout import ChannelsLast
from core.passes.loops import SimplifyLoops
from core.passes.pooled_conv import PoolConvolutions
from core.passes.precision import NARROW, Narrow
from core.passes.quantized import Quantized
from core.passes.recompose import Recompose
from core.passes.recurrent import SplitRecurrent
from core.passes.requantize import Requantize
from core.passes.same_pads import SamePads
from core.passes.selected_rows import SelectedRows
from core.passes.simplify import Simplify
from core.passes.transposed_conv import TransposedConvolutions
from core.passes.transposes import Transposes
from core.passes.widen import Widen

_FEWEST_QUERIES_ON_GPU = 12  # a program has one head: few of them leave multiprocessors idle


@dataclass(frozen=True)
class Options:
    """`channels_last`: whether images are laid out N, D1.., C. `fold_limit_bytes`: see `FoldConstants`. `precision`:
    the type of what products multiply, "float32", "bfloat16" or "float16". `integers`: whether the target multiplies
    bytes faster than floats, so that products of quantized numbers are worth integer kernels. `host`: whether a CPU
    runs what comes out, for whose kernels some forms are made. `inside`: whether the graph is the body of a node.
    `in_parts`: whether the graph is cut into parts, so that a body is a graph of its own, for any sizes as well."""

    channels_last: bool = True
    fold_limit_bytes: int = 1 << 26
    precision: str = "float32"
    integers: bool = True
    host: bool = True
    inside: bool = False
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did: rewrites, nodes before and after, and how long it took."""

    name: str
    changed: int
    nodes_before: int
    nodes_after: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """What it did, without its time: equal inputs give equal artifacts."""
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.name}: {self.changed} rewrites, {self.nodes_before} -> {self.nodes_after} nodes{notes}"


def preparation(options: Options) -> list[Pass]:
    """What the planner cannot do without: parameters and constants known, nothing dead."""
    known: list[Pass] = [BindParams(), FoldConstants(options.fold_limit_bytes)]
    return [*known, InlineIf(known), Eliminate(), CommonSubexpressions()]


def for_proofs() -> list[Pass]:
    """What brings equal things into one form, before a proof looks at them: what it proves of the result is as true of
    the graph as it was written."""
    clean = preparation(Options())
    views: list[Pass] = [Simplify(), IndexedViews(), SelectedRows()]
    return [*clean, Define(for_kernels=False), *views, *clean, Simplify(), Transposes()]


def passes(options: Options) -> list[Pass]:
    """The whole pipeline, in order."""
    clean = preparation(options)
    canonical: list[Pass] = [Simplify(options.inside), IndexedViews(), SelectedRows(), *clean]
    algebra: list[Pass] = [Recompose(options.inside), FoldAffine(), Simplify(options.inside)]
    products: list[Pass] = [BatchAxes(), Transposes(), SplitRecurrent(), FuseMatMul()]
    learning: list[Pass] = [BatchLast()] if options.host else []
    pools: list[Pass] = [PoolConvolutions()] if options.host else []
    chains: list[Pass] = [ChainConvolutions()] if options.host and options.precision == "float32" else []
    last: list[Pass] = [*learning, TransposedConvolutions(), ChannelsLast(), Transposes(), FuseMatMul()]
    images = last if options.channels_last else []
    computed: list[Pass] = [Define(only=CONVOLUTIONS), FuseMatMul()] if options.host else []
    sizes: list[Pass] = [WriteIota()] if options.host and (options.in_parts or not options.inside) else []
    fusion: list[Pass] = [
        ExactProducts(),
        FuseEpilogue(),
        FuseElementwise(),
        FuseEpilogue(),
        FuseAttention() if options.host else FuseAttention(_FEWEST_QUERIES_ON_GPU),
        GroupedQueries(),
        *pools,
        *chains,
    ]
    narrow: list[Pass] = [Narrow(dtype) for dtype in NARROW if str(dtype) == options.precision]
    bodies: list[Pass] = [OptimizeBodies(lambda body: _counted(optimize(body, replace(options, inside=True))))]
    whole: list[Pass] = [Quantized(options.integers, options.host), ExpandFitted()]
    return [
        *whole,
        *clean,
        SimplifyLoops(),
        Requantize(),
        Widen(),
        Define(),
        SamePads(),
        *canonical,
        *algebra,
        *products,
        *images,
        *computed,
        *clean,
        *sizes,
        *fusion,
        *narrow,
        *([] if options.in_parts else bodies),
    ]


def optimize(graph: Graph, options: Options = Options()) -> tuple[Graph, list[PassReport]]:
    """An optimized copy of `graph`, and what each pass did to it. The graph given stays as it is.

    PassError, naming the passes already run, when a pass fails or leaves a graph that does not verify.
    """
    return run_passes(graph, passes(options))


def prepare(graph: Graph, options: Options = Options()) -> tuple[Graph, list[PassReport]]:
    """`optimize` without the optimizations: every node stays what the model's author wrote."""
    bodies: list[Pass] = [OptimizeBodies(lambda body: _counted(prepare(body, options)))]
    return run_passes(graph, [*preparation(options), *([] if options.in_parts else bodies)])


def _counted(result: tuple[Graph, list[PassReport]]) -> tuple[Graph, int]:
    graph, reports = result
    return graph, sum(report.changed for report in reports)


def run_passes(graph: Graph, sequence: Sequence[Pass]) -> tuple[Graph, list[PassReport]]:
    """`optimize` with a pipeline of one's own. Passes compute with the values of constants, so the copy has no defaults
    that a run could replace."""
    graph = graph.clone()
    graph.defaults.clear()
    reports: list[PassReport] = []
    for step in sequence:
        reports.append(_run(step, graph, reports))
    return graph, reports


def _run(step: Pass, graph: Graph, before: Sequence[PassReport]) -> PassReport:
    nodes, start = len(graph.nodes), time.perf_counter()
    try:
        result = step.run(graph)
        if result.changed:
            verify(graph, after=step.name)
    except (VerifyError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError) as error:
        done = ", ".join(report.name for report in before) or "none"
        raise PassError(f"pass {step.name} failed ({error}); passes run before it: {done}") from error
    return PassReport(step.name, result.changed, nodes, len(graph.nodes), time.perf_counter() - start, result.notes)
