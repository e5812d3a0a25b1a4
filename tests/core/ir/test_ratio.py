"""Ratios of dimensions round to the same integers as float32, for every size that they assume."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.dim import Dim, evaluate, symbol, violated_assumption
from lathe.core.ir.ratio import MOST, Ratio

N = symbol("n")
F32 = np.float32
SIZES = [*range(200), 4095, 65535, 1 << 20, (1 << 21) - 1, 1 << 21, MOST - 7, MOST - 1, MOST]

Step = Callable[[Any], Any]
PROGRAMS: Sequence[tuple[Step, ...]] = [
    (lambda x: x / F32(3), lambda x: x + F32(1)),
    (lambda x: x + F32(5), lambda x: x / F32(8), lambda x: x + F32(1)),
    (lambda x: x - F32(7), lambda x: x / F32(320)),
    (lambda x: x * F32(0.5),),
    (lambda x: x * F32(1.5), lambda x: x - F32(0.25)),
    (lambda x: F32(3) - x, lambda x: x / F32(7)),
    (lambda x: x / F32(-10),),
    (lambda x: x * F32(0.25), lambda x: x / F32(255), lambda x: x + F32(900)),
]


def rounded(x: Any, way: str) -> Any:
    return np.floor(x) if way == "floor" else np.ceil(x)


@pytest.mark.parametrize("way", ["floor", "ceil"])
@pytest.mark.parametrize("steps", PROGRAMS)
def test_rounded_ratios_are_those_of_float32(steps: Sequence[Step], way: str) -> None:
    ratio: Any = Ratio(N)
    for step in steps:
        ratio = step(ratio)
    supposed = ratio.supposed
    found: Dim = (math.floor(ratio) if way == "floor" else math.ceil(ratio)).whole
    checked = 0
    for n in SIZES:
        number: Any = F32(n)
        for step in steps:
            number = step(number)
            assert number.dtype == np.float32
        if not violated_assumption(supposed, {"n": n}):
            assert evaluate(found, {"n": n}) == int(rounded(number, way)), n
            checked += 1
    assert checked >= 200


def test_rounding_towards_zero_needs_a_sign() -> None:
    assert evaluate((Ratio(N) / 3).whole, {"n": 8}) == 2
    with pytest.raises(TypeError, match="rounded up or down"):
        _ = ((Ratio(N) - 5) / 3).whole


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x * F32(1 / 3),  # the factor itself is rounded
        lambda x: x / 3 * 3,
        lambda x: x / 3 / 5,
        lambda x: x / 3 + F32(0.5),
        lambda x: x / 3 + 5000,
        lambda x: x + x,  # a number on the way may be larger than the last one
        lambda x: x / x,
        lambda x: 1 / x,
        lambda x: x / 0,
        lambda x: x / 100_000,
        lambda x: x == 3,
        lambda x: x < 3,
        lambda x: x * F32("inf"),
        bool,
        float,
        int,
        abs,
    ],
)
def test_ratios_that_float32_may_round_differently_are_refused(step: Step) -> None:
    with pytest.raises(TypeError):
        step(Ratio(N))


OPERATORS = [getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "lt")]


@pytest.mark.parametrize("of", OPERATORS, ids=lambda of: of.__name__)
def test_operators_give_a_ratio_or_a_type_error(of: Callable[[Any, Any], Any]) -> None:
    """Whatever number or object stands on the other side: shape inference catches no other error."""
    ratios = [Ratio(N), Ratio(N, 3), Ratio(0), Ratio(5, 8)]
    others = [0, 1, -3, 10**400, N, 0.0, -0.1, 2.0**-60, 1e300, math.inf, -math.inf, math.nan, F32("nan"), np.int64(7)]
    for ratio, other in itertools.product(ratios, [*others, np.float16(0.5), True, None, "text", *ratios]):
        for pair in ((ratio, other), (other, ratio)):
            try:
                result = of(*pair)
            except TypeError:
                continue
            assert isinstance(result, Ratio), pair
