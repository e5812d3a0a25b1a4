"""Position formulas: the formula found for a value gives the reference's result for all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import parse_graph
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.proofs.positions import PositionFinder, Positions
from lathe.core.reference import interpret

SIZES = [{"n": 1, "m": 1}, {"n": 3, "m": 5}, {"n": 5, "m": 2}, {"n": 0, "m": 4}]

BEGIN = """
  input %x : float32[n,m]
  const %zero : int64[] = [0]
  const %one : int64[] = [1]
  const %two : int64[] = [2]
  const %minus : int64[] = [-3]
  const %first : int64[1] = [0]
  const %last : int64[1] = [-1]
  const %flat : int64[1] = [-1]
  %shape : int64[2] = Shape(%x)
  %n : int64[] = Gather(%shape, %zero) {axis = 0}
  %m : int64[] = Gather(%shape, %one) {axis = 0}
  %rows : int64[n] = Range(%zero, %n, %one)
  %columns : int64[m] = Range(%zero, %m, %one)
"""


def of(lines: str, name: str) -> tuple[Graph, Positions | None]:
    """A graph of these lines after BEGIN, and the formula found for its value %name."""
    graph = parse_graph(f"graph @g {{{BEGIN}{lines}\n  output %{name}\n}}")
    finder = PositionFinder(infer_graph(graph))
    return graph, finder.of(graph.outputs[0])


def values(found: Positions, sizes: dict[str, int]) -> Any:
    """The values of a formula."""
    shape = tuple(evaluate(extent, sizes) for extent in found.shape)
    result = np.full(shape, evaluate(found.offset, sizes), np.int64)
    for axis, step in enumerate(found.steps):
        places = np.arange(shape[axis]).reshape(*(-1 if i == axis else 1 for i in range(len(shape))))
        result = result + places * evaluate(step, sizes)
    return result


def check(graph: Graph, found: Positions) -> None:
    for sizes in SIZES:
        feeds = {"x": np.zeros((sizes["n"], sizes["m"]), np.float32)}
        (expected,) = interpret(graph, feeds).values()
        np.testing.assert_array_equal(values(found, sizes), expected, str(sizes))


COLUMN = "%a : int64[n,1] = Unsqueeze(%rows, %last)"
KNOWN = {
    "a range": ("", "rows"),
    "a column": ("%a : int64[n,1] = Unsqueeze(%rows, %last)", "a"),
    "times a size": ("%a : int64[n,1] = Unsqueeze(%rows, %last)\n%b : int64[n,1] = Mul(%a, %m)", "b"),
    "a size times it": ("%a : int64[n,1] = Unsqueeze(%rows, %last)\n%b : int64[n,1] = Mul(%m, %a)", "b"),
    "row * width + column": (
        f"{COLUMN}\n%b : int64[n,1] = Mul(%a, %m)\n%c : int64[n,m] = Add(%b, %columns)",
        "c",
    ),
    "flattened": (
        f"{COLUMN}\n%b : int64[n,1] = Mul(%a, %m)\n%c : int64[n,m] = Add(%b, %columns)\n"
        "%d : int64[n*m] = Reshape(%c, %flat)",
        "d",
    ),
    "transposed": (
        f"{COLUMN}\n%c : int64[n,m] = Sub(%a, %columns)\n%d : int64[m,n] = Transpose(%c)",
        "d",
    ),
    "expanded": ("%a : int64[n,m] = Expand(%columns, %shape)", "a"),
    "from a number on, by a step": (
        "%a : int64[2] = Range(%minus, %two, %two)\n%b : int32[3] = Cast(%a) {to = 6}",
        "b",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_formulas(name: str) -> None:
    graph, found = of(*KNOWN[name])
    assert found is not None
    check(graph, found)


@pytest.mark.parametrize(
    "lines",
    [
        "%y : int64[n] = Mul(%rows, %rows)",
        "%y : int64[n] = Div(%rows, %two)",
        "%a : int64[m,n] = Expand(%rows, %turned)\n%y : int64[n*m] = Reshape(%a, %flat)",
        "%y : int64[2] = Identity(%shape)",
        "%y : int64[n] = Neg(%rows)",
    ],
)
def test_other_values_have_no_formula(lines: str) -> None:
    begin = "  const %order : int64[2] = [1, 0]\n  %turned : int64[2] = Gather(%shape, %order) {axis = 0}\n"
    assert of(begin + lines, "y")[1] is None


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_arithmetic(data: st.DataObject) -> None:
    """If a formula is found for random arithmetic on ranges and numbers, it gives the results of the reference."""
    lines, names = [], ["rows", "columns", "zero", "one", "two", "minus", "n", "m"]
    for index in range(data.draw(st.integers(1, 6))):
        a, b = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
        line = data.draw(
            st.sampled_from([
                f"Add(%{a}, %{b})", f"Sub(%{a}, %{b})", f"Mul(%{a}, %{b})", f"Unsqueeze(%{a}, %first)",
                f"Unsqueeze(%{a}, %last)", f"Transpose(%{a})", f"Reshape(%{a}, %flat)", f"Identity(%{a})",
            ])
        )  # fmt: skip
        trial = [*lines, f"%v{index} = {line}"]
        if _fits(trial, f"v{index}"):
            lines, names = trial, [*names, f"v{index}"]
    graph, found = of("\n".join(lines), names[-1])
    if found is not None:
        check(graph, found)


def _fits(lines: list[str], name: str) -> bool:
    """True if the reference computes the value for all sizes."""
    try:
        graph, _ = of("\n".join(lines), name)
        for sizes in SIZES:
            interpret(graph, {"x": np.zeros((sizes["n"], sizes["m"]), np.float32)})
    except Exception:
        return False
    return True
