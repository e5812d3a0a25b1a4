"""Integers that only depend on their place, of any shape, start and steps."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.errors import ModelError
from lathe.core.ir.text import parse_graph
from lathe.core.ir.types import DType
from lathe.core.reference import interpret
from tests.core.kernels.harness import single_node

_CASES = [
    ("[]", "n", "[]"),
    ("[n]", "0", "[1]"),
    ("[1, n+1]", "n", "[0, 3]"),
    ("[n, 3, 1, 21]", "-7", "[n, -2, 0, 1]"),
    ("[4, n]", "5", "[1, 0]"),
    ("[2, 3]", "n*n", "[n, 1]"),
]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize(("shape", "start", "steps"), _CASES, ids=str)
def test_any_place(dtype: str, shape: str, start: str, steps: str) -> None:
    type_ = f"{dtype}{shape.replace(' ', '')}"
    graph = parse_graph(f"""
        graph @g {{
          input %x : float32[n]
          %y : {type_} = Iota() {{dtype = type {dtype}, shape = {shape}, start = {start}, steps = {steps}}}
          %z : float32[n] = Relu(%x)
          output %y, %z
        }}""")
    with lathe.compile(graph, threads=2) as session:
        assert "FALLBACK" not in session.explain()
        for n in (1, 2, 7, 33, 300):
            feeds = {"x": np.zeros(n, np.float32)}
            np.testing.assert_array_equal(session.run(feeds)["y"], interpret(graph, feeds)["y"])


def test_a_step_for_each_axis() -> None:
    with pytest.raises(ModelError, match="has 1 steps of int64, expected 2 of int32 or int64"):
        single_node("Iota", dtype=DType.INT64, shape=(2, 3), steps=(1,))
