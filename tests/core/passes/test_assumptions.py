"""Assumed equal dimensions: found where rows can then share a run, and assumed only if that makes rows independent."""

from __future__ import annotations

import pytest

from lathe.core.ir.graph import Graph
from lathe.core.ir.text import parse_graph
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.assumptions import assume_one_batch


def graph(text: str) -> Graph:
    made = parse_graph("graph @g {" + text + "\n}")
    infer_graph(made)
    return made


# Reads mask[row, place] for places below past + new: the mask has this length, or is longer.
DECODER = """
    input %ids : int64[batch,new]
    input %past : float32[batch,past,4]
    input %mask : bool[batch,total]
    const %zero : int64[] = [0]
    const %one : int64[] = [1]
    const %table : float32[9,4] = [{numbers}]
    %is : int64[2] = Shape(%ids)
    %ps : int64[3] = Shape(%past)
    %ms : int64[2] = Shape(%mask)
    %batch : int64[] = Gather(%is, %zero) {{axis = 0}}
    %new : int64[] = Gather(%is, %one) {{axis = 0}}
    %old : int64[] = Gather(%ps, %one) {{axis = 0}}
    %count : int64[] = Add(%new, %old)
    %rows : int64[batch] = Range(%zero, %batch, %one)
    %places : int64[*] = Range(%zero, %count, %one)
    {gather}
    %x : float32[*] = Gather(%table, %ids) {{axis = 0}}
    %both : float32[*] = Concat(%past, %x) {{axis = 1}}
    %kept : float32[*] = Cast(%seen) {{to = 1}}
    %wide : float32[*] = Unsqueeze(%kept) {{axes = [2]}}
    %y : float32[*] = Mul(%both, %wide)
    output %y"""
NUMBERS = ", ".join(f"{i}.0" for i in range(36))
GATHERS = {
    "dynamo": """%r : int64[*] = Unsqueeze(%rows) {axes = [1, 2]}
    %p : int64[*] = Unsqueeze(%places) {axes = [0, 2]}
    %largest : int64[*] = Max(%r, %p)
    %shape : int64[*] = Shape(%largest)
    %wr : int64[*] = Expand(%r, %shape)
    %wp : int64[*] = Expand(%p, %shape)
    %at : int64[*] = Concat(%wr, %wp) {axis = 2}
    %seen : bool[*] = GatherND(%mask, %at)""",
    "torchscript": """%r : int64[*] = Unsqueeze(%rows) {axes = [1]}
    %length : int64[] = Gather(%ms, %one) {axis = 0}
    %begin : int64[*] = Mul(%r, %length)
    %at : int64[*] = Add(%places, %begin)
    %flat : bool[*] = Reshape(%mask) {shape = [-1]}
    %seen : bool[*] = Gather(%flat, %at) {axis = 0}""",
}


@pytest.mark.parametrize("exporter", GATHERS)
def test_a_mask_as_long_as_past_and_new_tokens(exporter: str) -> None:
    declared = graph(DECODER.format(numbers=NUMBERS, gather=GATHERS[exporter]))
    together, proof = assume_one_batch(declared)
    assert proof.batchable, proof.reason
    assert str(together.inputs[2].type) == "bool[batch,new+past]"
    assert str(declared.inputs[2].type) == "bool[batch,total]", "the graph given stays as it is"


@pytest.mark.parametrize("exporter", GATHERS)
def test_leading_dimensions_of_their_own_beside_it(exporter: str) -> None:
    text = DECODER.format(numbers=NUMBERS, gather=GATHERS[exporter]).replace(
        "past : float32[batch", "past : float32[b2"
    )
    together, proof = assume_one_batch(graph(text.replace("mask : bool[batch", "mask : bool[b3")))
    assert proof.batchable, proof.reason
    assert [str(value.type) for value in together.inputs[1:]] == ["float32[batch,past,4]", "bool[batch,new+past]"]


def test_nothing_is_assumed_where_rows_meet_anyway() -> None:
    """Every row of one input meets every row of the other, also if their numbers are equal."""
    declared = graph("""
    input %a : float32[n,16]
    input %b : float32[k,16]
    %t : float32[16,k] = Transpose(%b) {perm = [1, 0]}
    %y : float32[n,k] = MatMul(%a, %t)
    output %y""")
    together, proof = assume_one_batch(declared)
    assert together is declared
    assert not proof.batchable
    assert "different leading dimensions: k, n" in proof.reason


TWO_KINDS = """
    input %ids : int64[texts,m]
    input %mask : {mask}
    input %images : float32[images,4]
    const %zero : int64[] = [0]
    const %one : int64[] = [1]
    const %table : float32[9,4] = [{numbers}]
    %is : int64[2] = Shape(%ids)
    %n : int64[] = Gather(%is, %zero) {{axis = 0}}
    %m : int64[] = Gather(%is, %one) {{axis = 0}}
    %rows : int64[texts] = Range(%zero, %n, %one)
    %places : int64[*] = Range(%zero, %m, %one)
    {seen}
    %x : float32[*] = Gather(%table, %ids) {{axis = 0}}
    %kept : float32[*] = Cast(%seen) {{to = 1}}
    %wide : float32[*] = Unsqueeze(%kept) {{axes = [2]}}
    %both : float32[*] = Mul(%x, %wide)
    %text : float32[*] = ReduceSum(%both) {{axes = [1], keepdims = 0}}
    %t : float32[4,images] = Transpose(%images) {{perm = [1, 0]}}
    %y : float32[*] = MatMul(%text, %t)
    output %y"""
SEEN = {"gathered": GATHERS["dynamo"], "multiplied": "%seen : bool[*] = Identity(%mask)"}


@pytest.mark.parametrize("seen", SEEN)
def test_leading_dimensions_that_meet_are_assumed_equal(seen: str) -> None:
    """Rows of texts meet those of images, but each mask is that of a text."""
    declared = graph(TWO_KINDS.format(numbers=NUMBERS, seen=SEEN[seen], mask="bool[masks,m]"))
    together, proof = assume_one_batch(declared)
    assert not proof.batchable
    assert "images, texts" in proof.reason
    assert [str(value.type) for value in together.inputs] == ["int64[texts,m]", "bool[texts,m]", "float32[images,4]"]
    assert [str(value.type) for value in together.outputs] == ["float32[texts,images]"]


def test_a_lead_that_is_an_extent_of_another_input_is_no_number_of_rows() -> None:
    text = TWO_KINDS.format(numbers=NUMBERS, seen=SEEN["multiplied"], mask="bool[masks,m]")
    declared = graph(text.replace("float32[images,4]", "float32[images,4]\n    input %more : float32[3,masks]"))
    assert assume_one_batch(declared)[0] is declared


def test_nothing_is_assumed_if_rows_are_independent_without_it() -> None:
    declared = graph("""
    input %a : float32[n,m]
    %y : float32[n,m] = Relu(%a)
    output %y""")
    together, proof = assume_one_batch(declared)
    assert together is declared
    assert proof.batchable


def test_equal_dimensions_that_the_nodes_do_not_fit() -> None:
    declared = graph("""
    input %a : float32[n,2]
    input %b : float32[k,3]
    const %s : int64[2] = [0, 0]
    %r : float32[*] = Concat(%a, %a) {axis = 0}
    %y : float32[*] = Reshape(%r) {shape = [-1, 4]}
    %z : float32[k,3] = Relu(%b)
    output %y, %z""")
    together, proof = assume_one_batch(declared)
    assert together is declared
    assert not proof.batchable
