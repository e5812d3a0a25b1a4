"""Every pass against its before-and-after file, and every rewrite against the reference executor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.fusion.attention import FuseAttention
from lathe.core.passes.fusion.conv_chain import ChainConvolutions
from lathe.core.passes.fusion.elementwise import FuseElementwise
from lathe.core.passes.fusion.epilogue import FuseEpilogue
from lathe.core.passes.fusion.gemm import FuseMatMul
from lathe.core.passes.fusion.grouped_queries import FuseGroupedQueries
from lathe.core.passes.fusion.merged_products import MergeProducts
from lathe.core.passes.fusion.pooled_conv import PoolConvolutions
from lathe.core.passes.fusion.quantize_round_trips import RemoveRequantization
from lathe.core.passes.layout.channels_last import ChannelsLast
from lathe.core.passes.layout.pack_images import PackImages
from lathe.core.passes.lowering.definitions import ExpandDefinitions
from lathe.core.passes.lowering.exact_products import ExactProducts
from lathe.core.passes.lowering.gathered_weights import GatheredWeights
from lathe.core.passes.lowering.masked_rows import SelectedRows
from lathe.core.passes.lowering.recurrent import SplitRecurrent
from lathe.core.passes.lowering.same_pads import SamePads
from lathe.core.passes.lowering.transposed_conv import TransposedConvolutions
from lathe.core.passes.rewrite.base import Pass
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
from lathe.core.reference import interpret
from tests.core.passes.case_files import CASES, SIZES, Case, canonical, feeds, read_cases
from tests.each_case import each_case

PASSES: dict[str, Pass] = {
    p.name: p
    for p in (
        BindParams(),
        FoldConstants(),
        InlineIf(),
        CommonSubexpressions(),
        Eliminate(),
        Simplify(),
        IndexedViews(),
        WriteIota(),
        ExpandDefinitions(),
        SamePads(),
        SelectedRows(),
        GatheredWeights(least_per_expert=0),
        BatchAxes(),
        FuseGroupedQueries(),
        RemoveRequantization(),
        ExactProducts(),
        FoldAffine(),
        Recompose(),
        Transposes(),
        FuseMatMul(),
        PoolConvolutions(),
        ChainConvolutions(least_bytes=0, worthwhile=0),
        ChannelsLast(),
        FuseEpilogue(),
        FuseElementwise(),
        FuseAttention(fewest_queries=5),
        SplitRecurrent(),
        SimplifyLoops(),
        TransposedConvolutions(),
        PackImages(),
        MergeProducts(),
    )
}
ALL = [case for path in sorted(CASES.glob("*.lir")) for case in read_cases(path)]


def test_every_pass_has_cases() -> None:
    assert {case.name for case in ALL} == set(PASSES)


def rewrites_its_cases(case: Case) -> None:
    graph = case.before.clone()
    infer_graph(graph)
    result = PASSES[case.name].run(graph)
    verify(graph, after=case.name)
    assert canonical(graph) == canonical(case.after)
    assert bool(result.changed) == (canonical(case.before) != canonical(case.after))


def keeps_types(case: Case) -> None:
    graph = case.before.clone()
    infer_graph(graph)
    declared = {value.name: value.type for value in graph.outputs}
    PASSES[case.name].run(graph)
    infer_graph(graph)
    assert {value.name: value.type for value in graph.outputs} == declared


def keeps_results(case: Case) -> None:
    given = feeds(case.before)
    expected, got = interpret(case.before, given), interpret(case.after, given)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


def is_correct_with_unknown_ranks(case: Case) -> None:
    """With the shape of each input removed in turn, passes neither fail nor change results."""
    given = feeds(case.before)
    for index, hidden in enumerate(case.before.inputs):
        graph = case.before.clone(SIZES)
        if not isinstance(hidden.type, TensorType) or not _hides(graph, index):
            continue
        PASSES[case.name].run(graph)
        verify(graph, after=case.name)
        expected, got = interpret(case.before, given), interpret(graph, given)
        for name, array in expected.items():
            assert got[name].shape == array.shape
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


def _hides(graph: Graph, index: int) -> bool:
    """Forget the shape of an input and all shapes inferred from it; False if a node of a pass needs them."""
    for value in (graph.inputs[index], *(output for node in graph.nodes for output in node.outputs)):
        value.type = TensorType(value.dtype, None) if isinstance(value.type, TensorType) else value.type
    try:
        infer_graph(graph)
    except UnsupportedError:
        return False
    return True


def is_idempotent(case: Case) -> None:
    graph = case.after.clone()
    infer_graph(graph)
    assert PASSES[case.name].run(graph).changed == 0


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(
    "check", [rewrites_its_cases, keeps_types, keeps_results, is_correct_with_unknown_ranks, is_idempotent]
)
def test_a_pass(check: Callable[[Case], None], name: str) -> None:
    with each_case() as named:
        for case in (case for case in ALL if case.name == name):
            with named(case.title):
                check(case)
