"""Nodes that quantize a number together: every float gives the same integer as by the nodes one by one."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import parse_graph
from lathe.core.ops.nn.rounded_integers import rounded_integers
from tests.core.small_models import model

F = np.float32
SCALES = [float(F(scale)) for scale in (0.0078125, 0.00784313725, 0.1, 1 / 3, 0.0061, 1.7, 3.0, 255.0, 1e-6, 12345.678)]


def floats_near_halves(scale: float) -> np.ndarray:
    """float32 numbers around every half of the scale at which the rounded quotient changes, and special ones."""
    near = F((np.arange(-600, 600) + 0.5) * scale)[:, None].view(np.int32) + np.arange(-3, 4, dtype=np.int32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-42, -1e-42, 2.0**31 * scale, -(2.0**31) * scale]
    return np.concatenate([near.view(F).ravel(), F(special), F(np.random.default_rng(0).normal(0, 99 * scale, 999))])


@pytest.mark.parametrize(("kind", "zero"), [("uint8", 0), ("uint8", 131), ("int8", 0), ("int8", -7)])
def test_compiled_code_gives_the_integers_of_the_definition(kind: str, zero: int) -> None:
    """One QuantizeLinear for each scale: what NumPy's division and rounding give."""
    columns = np.stack([floats_near_halves(scale) for scale in SCALES], axis=1)
    names = ", ".join(f"{kind}[n] y{i}" for i in range(len(SCALES)))
    nodes = " ".join(
        f"c{i} = Gather<axis = 1>(x, k{i}) y{i} = QuantizeLinear(c{i}, s{i}, z)" for i in range(len(SCALES))
    )
    constants = [f"{kind} z = {{{zero}}}"]
    constants += [f"int64 k{i} = {{{i}}}, float s{i} = {{{scale!r}}}" for i, scale in enumerate(SCALES)]
    text = model(f"float[n,{len(SCALES)}] x => {names}", nodes, ", ".join(constants))
    with lathe.compile(text, threads=1, tune="off") as session:
        found = session.run({"x": columns})
    limits = np.iinfo(kind)
    for i, scale in enumerate(SCALES):
        with np.errstate(invalid="ignore", over="ignore"):
            whole = np.rint(columns[:, i] / F(scale)) + zero
        expected = np.clip(np.where(np.isnan(whole), 0, whole), limits.min, limits.max).astype(kind)
        np.testing.assert_array_equal(found[f"y{i}"], expected, err_msg=f"scale {scale}")


def body(nodes: str, constants: str = "", output: str = "y") -> Graph:
    given = f"  input %x : float32[]\n  const %s : float32[] = [0.1]\n{constants}"
    return parse_graph(f"graph @g {{\n{given}{nodes}  output %{output}\n}}\n")


DIVIDED = "  %q : float32[] = Div(%x, %s)\n"
ROUNDED = DIVIDED + "  %r : float32[] = Round(%q)\n"


def test_a_rounded_number_becomes_a_step_of_a_quantization_with_its_zero_point() -> None:
    raised = "  %t : float32[] = Add(%r, %z)\n  %y : int8[] = Cast(%t) {to = 3}\n"
    found, replaced = rounded_integers(body(ROUNDED + raised, "  const %z : float32[] = [7.0]\n"))
    assert [(each.source.name, each.zero) for each in found.values()] == [("q", 7)]
    assert {node.op for node in replaced} == {"Round", "Add"}
    assert rounded_integers(body(ROUNDED + raised, "  const %z : float32[] = [7.5]\n")) == ({}, set())


def test_a_rounded_number_that_is_used_otherwise_is_no_step_of_a_quantization() -> None:
    cast = "  %y : uint8[] = Cast(%r) {to = 2}\n"
    found, replaced = rounded_integers(body(ROUNDED + cast))
    assert [(each.source.name, each.zero) for each in found.values()] == [("q", 0)]
    assert [node.op for node in replaced] == ["Round"]
    twice = "  %t : float32[] = Cast(%y) {to = 1}\n  %u : float32[] = Add(%t, %r)\n"
    assert rounded_integers(body(ROUNDED + cast + twice, output="u")) == ({}, set())
