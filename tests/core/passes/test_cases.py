"""Every pass against its before-and-after file; and every rewrite against the reference executor."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import UnsupportedError
from core.ir.graph import Graph
from core.ir.types import TensorType
from core.ir.verify import verify
from core.ops.inference import infer_graph
from core.passes.attention import FuseAttention
from core.passes.base import Pass
from core.passes.batch_axes import BatchAxes
from core.passes.bind_params import BindParams
from core.passes.conv_chain import ChainConvolutions
from core.passes.cse import CommonSubexpressions
from core.passes.definitions import Define
from core.passes.elementwise import FuseElementwise
from core.passes.eliminate import Eliminate
from core.passes.epilogue import FuseEpilogue
from core.passes.exact_products import ExactProducts
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
from core.passes.recompose import Recompose
from core.passes.recurrent import SplitRecurrent
from core.passes.requantize import Requantize
from core.passes.same_pads import SamePads
from core.passes.selected_rows import SelectedRows
from core.passes.simplify import Simplify
from core.passes.transposed_conv import TransposedConvolutions
from core.passes.transposes import Transposes
from core.reference import interpret
from tests.core.passes.case_files import CASES, SIZES, Case, canonical, feeds, read_cases

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
        Define(),
        SamePads(),
        SelectedRows(),
        BatchAxes(),
        GroupedQueries(),
        Requantize(),
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
    )
}
ALL = [case for path in sorted(CASES.glob("*.lir")) for case in read_cases(path)]
each_case = pytest.mark.parametrize("case", ALL, ids=[f"{case.name}: {case.title}" for case in ALL])


def test_every_pass_has_cases() -> None:
    assert {case.name for case in ALL} == set(PASSES)


@each_case
def test_rewrites_as_shown(case: Case) -> None:
    graph = case.before.clone()
    infer_graph(graph)
    result = PASSES[case.name].run(graph)
    verify(graph, after=case.name)
    assert canonical(graph) == canonical(case.after)
    assert bool(result.changed) == (canonical(case.before) != canonical(case.after))


@each_case
def test_keeps_types(case: Case) -> None:
    graph = case.before.clone()
    infer_graph(graph)
    declared = {value.name: value.type for value in graph.outputs}
    PASSES[case.name].run(graph)
    infer_graph(graph)
    assert {value.name: value.type for value in graph.outputs} == declared


@each_case
def test_keeps_results(case: Case) -> None:
    given = feeds(case.before)
    expected, got = interpret(case.before, given), interpret(case.after, given)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


@each_case
def test_leaves_alone_what_needs_a_rank_that_is_not_known(case: Case) -> None:
    """With the shape of one input after the other hidden, passes neither fail nor give other results."""
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
    """Forget the shape of an input and what follows from it. False where a node, made by passes, cannot go without."""
    for value in (graph.inputs[index], *(output for node in graph.nodes for output in node.outputs)):
        value.type = TensorType(value.dtype, None) if isinstance(value.type, TensorType) else value.type
    try:
        infer_graph(graph)
    except UnsupportedError:
        return False
    return True


@each_case
def test_is_idempotent(case: Case) -> None:
    graph = case.after.clone()
    infer_graph(graph)
    assert PASSES[case.name].run(graph).changed == 0
