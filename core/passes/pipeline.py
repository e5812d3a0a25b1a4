"""The pass pipeline: the order in which the passes run, and the loop that runs and verifies them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lathe.core.errors import VerifyError
from lathe.core.ir.graph import Graph
from lathe.core.ir.verify import verify
from lathe.core.passes.fusion.attention import FuseAttention
from lathe.core.passes.fusion.conv_chain import ChainConvolutions
from lathe.core.passes.fusion.elementwise import FuseElementwise
from lathe.core.passes.fusion.epilogue import FuseEpilogue
from lathe.core.passes.fusion.gemm import FuseMatMul
from lathe.core.passes.fusion.grouped_queries import FuseGroupedQueries
from lathe.core.passes.fusion.merged_products import MergeProducts
from lathe.core.passes.fusion.pooled_conv import PoolConvolutions
from lathe.core.passes.fusion.quantize_round_trips import RemoveRequantization
from lathe.core.passes.layout.batch_last import BatchLast
from lathe.core.passes.layout.channels_last import ChannelsLast
from lathe.core.passes.layout.pack_images import PackImages
from lathe.core.passes.lowering.classic_ml import ExpandClassicML
from lathe.core.passes.lowering.coded_text import EncodeText
from lathe.core.passes.lowering.control_flow import MAPS, WITH_BODIES, OptimizeBodies
from lathe.core.passes.lowering.definitions import CONVOLUTIONS, EARLY, ExpandDefinitions
from lathe.core.passes.lowering.exact_products import ExactProducts
from lathe.core.passes.lowering.gathered_weights import GatheredWeights
from lathe.core.passes.lowering.masked_rows import SelectedRows
from lathe.core.passes.lowering.recurrent import SplitRecurrent
from lathe.core.passes.lowering.same_pads import SamePads
from lathe.core.passes.lowering.transposed_conv import TransposedConvolutions
from lathe.core.passes.precision.low_precision import NARROW, ConvertToNarrow
from lathe.core.passes.precision.quantized import Quantized
from lathe.core.passes.precision.weight_only import KeepWeightsQuantized
from lathe.core.passes.precision.widen import Widen
from lathe.core.passes.rewrite.base import Pass, PassError
from lathe.core.passes.rewrite.boundaries import insert_boundaries, remove_boundaries
from lathe.core.passes.simplify.algebra import Simplify
from lathe.core.passes.simplify.batch_axes import BatchAxes
from lathe.core.passes.simplify.bind_params import BindParams
from lathe.core.passes.simplify.cse import CommonSubexpressions
from lathe.core.passes.simplify.eliminate import Eliminate
from lathe.core.passes.simplify.fold_affine import FoldAffine
from lathe.core.passes.simplify.fold_constants import FoldConstants
from lathe.core.passes.simplify.indexed_views import IndexedViews
from lathe.core.passes.simplify.inline_if import InlineIf
from lathe.core.passes.simplify.iota import WriteIota
from lathe.core.passes.simplify.loops import SimplifyLoops
from lathe.core.passes.simplify.recompose import Recompose
from lathe.core.passes.simplify.transposes import Transposes

_FEWEST_QUERIES_ON_GPU = 12  # one Triton program computes one head: few queries leave multiprocessors idle


@dataclass(frozen=True)
class Options:
    """Options of the pipeline.

    `channels_last`: lay images out as [N, D1.., C]. `fold_limit_bytes`: the largest folded constant, see
    `FoldConstants`. `precision`: the type of the operands of matrix products and convolutions, "float32", "bfloat16" or
    "float16". `integers`: the target multiplies bytes faster than floats, so quantized products get integer kernels.
    `int8_rows`: all products with constant weights of few bits may round their rows to int8.
    `host`: the target is a CPU; some fusions exist for CPU kernels alone. `inside`: the graph is the body of If, Loop
    or Scan. `in_parts`: the graph will be cut into parts; bodies of If, Loop and Scan stay as they are, because each is
    compiled later as a graph of its own.
    """

    channels_last: bool = True
    fold_limit_bytes: int = 1 << 26
    precision: str = "float32"
    integers: bool = True
    int8_rows: bool = False
    host: bool = True
    inside: bool = False
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class PassReport:
    """The effect of one pass: the number of rewrites, the number of nodes before and after, and the time in seconds."""

    name: str
    changed: int
    nodes_before: int
    nodes_after: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The report as one line of text, without the time: equal inputs must give byte-equal artifacts."""
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.name}: {self.changed} rewrites, {self.nodes_before} -> {self.nodes_after} nodes{notes}"


def required_passes(options: Options) -> list[Pass]:
    """The passes that the planner requires.

    They fold parameters and constants, inline each If of known condition, remove dead nodes and merge equal nodes.
    """
    fold: list[Pass] = [BindParams(), FoldConstants(options.fold_limit_bytes)]
    return [*fold, InlineIf(fold), Eliminate(), CommonSubexpressions()]


def canonical_passes() -> list[Pass]:
    """The passes that bring a graph into canonical form before a proof analyses it.

    They preserve what the graph computes, so a proof about the result holds for the original graph, too.
    """
    clean = required_passes(Options())
    views: list[Pass] = [Simplify(), IndexedViews(), SelectedRows()]
    return [*clean, ExpandDefinitions(for_kernels=False), *views, *clean, Simplify(), Transposes()]


def optimizing_passes(options: Options) -> list[Pass]:
    """The whole optimizing pipeline, in order."""
    clean = required_passes(options)
    weights: list[Pass] = [GatheredWeights()] if options.host else []
    canonical: list[Pass] = [Simplify(options.inside), IndexedViews(), SelectedRows(options.host), *weights, *clean]
    algebra: list[Pass] = [Recompose(options.inside), FoldAffine(options.inside), Simplify(options.inside)]
    products: list[Pass] = [BatchAxes(), Transposes(), SplitRecurrent(), FuseMatMul()]
    gradients: list[Pass] = [BatchLast()] if options.host else []
    pools: list[Pass] = [PoolConvolutions()] if options.host else []
    chains: list[Pass] = [ChainConvolutions()] if options.host and options.precision == "float32" else []
    layout: list[Pass] = [*gradients, TransposedConvolutions(), ChannelsLast(), Transposes(), FuseMatMul()]
    images = layout if options.channels_last else []
    convolutions: list[Pass] = [ExpandDefinitions(only=CONVOLUTIONS), FuseMatMul()] if options.host else []
    sizes: list[Pass] = [WriteIota()] if options.host and (options.in_parts or not options.inside) else []
    fusion: list[Pass] = [
        ExactProducts(),
        FuseEpilogue(),
        FuseElementwise(),
        FuseEpilogue(),
        FuseAttention() if options.host else FuseAttention(_FEWEST_QUERIES_ON_GPU),
        FuseGroupedQueries(),
        *pools,
        *chains,
    ]
    precision: list[Pass] = [] if options.host else [PackImages()]
    precision += [ConvertToNarrow(dtype, not options.host) for dtype in NARROW if str(dtype) == options.precision]
    precision += [] if options.host else [MergeProducts()]
    bodies: list[Pass] = [
        OptimizeBodies(
            lambda body: _with_count(optimize(body, replace(options, inside=True))),
            MAPS if options.in_parts else WITH_BODIES,
        )
    ]
    weights_of_few_bits: list[Pass] = (
        [KeepWeightsQuantized(options.int8_rows)] if options.host and options.precision == "float32" else []
    )
    patterns: list[Pass] = [
        *weights_of_few_bits,
        Quantized(options.integers, options.host),
        EncodeText(),
        ExpandClassicML(),
    ]
    return [
        ExpandDefinitions(only=EARLY),
        *patterns,
        *clean,
        SimplifyLoops(),
        RemoveRequantization(),
        Widen(),
        ExpandDefinitions(),
        SamePads(),
        *canonical,
        *algebra,
        *products,
        *images,
        *convolutions,
        *clean,
        *sizes,
        *fusion,
        *precision,
        *bodies,
    ]


def optimize(graph: Graph, options: Options = Options()) -> tuple[Graph, list[PassReport]]:
    """An optimized copy of `graph`, and one report per pass. `graph` stays unchanged. Errors as in `run_passes`."""
    return run_passes(graph, optimizing_passes(options))


def prepare(graph: Graph, options: Options = Options()) -> tuple[Graph, list[PassReport]]:
    """A copy of `graph` after the required passes alone, also in bodies, and one report per pass.

    Every remaining node is one that the model's author wrote. Errors as in `run_passes`.
    """
    bodies: list[Pass] = [OptimizeBodies(lambda body: _with_count(prepare(body, options)))]
    return run_passes(graph, [*required_passes(options), *([] if options.in_parts else bodies)])


def _with_count(result: tuple[Graph, list[PassReport]]) -> tuple[Graph, int]:
    """The graph, and the sum of the rewrites in all reports."""
    graph, reports = result
    return graph, sum(report.changed for report in reports)


def run_passes(graph: Graph, sequence: Sequence[Pass]) -> tuple[Graph, list[PassReport]]:
    """Runs the given passes on a copy of `graph`, and returns the copy with one report per pass.

    The copy is verified after each pass that changed it. Passes fold the values of constants, so the copy has no
    `defaults` that a run could replace. Device annotations and control edges are afterwards on the nodes that compute
    what the annotated nodes did (`boundaries.py`). PassError, naming the passes already run, when a pass fails or
    leaves a graph that does not verify. ModelError from type inference inside a pass reaches the caller unchanged, but
    for an unknown rank it becomes a PassError.
    """
    graph = graph.clone()
    graph.defaults.clear()
    has_boundaries = insert_boundaries(graph)
    reports: list[PassReport] = []
    for step in sequence:
        reports.append(_run(step, graph, reports))
    if has_boundaries:
        remove_boundaries(graph)
        verify(graph, after="the removal of boundaries")
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
