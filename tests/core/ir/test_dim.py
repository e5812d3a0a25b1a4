"""Symbolic dimensions: algebra in one normal form, exact division, substitution, text."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.core.ir.dim import (
    Dim,
    SymDim,
    affine,
    evaluate,
    floor_div,
    is_never_negative,
    maximum,
    parse_dim,
    product,
    substitute,
    symbol,
    symbols,
)
from lathe.core.ir.dims import filled, size, size_index

N, H = symbol("n"), symbol("H")

ENV = {"n": 5, "H": 7}
leaves = st.one_of(st.integers(-6, 6), st.sampled_from([N, H]))
DIVISORS = st.integers(-5, 6).filter(bool)
OPERATIONS: list[Callable[[Any, Any], Any]] = [operator.add, operator.sub, operator.mul]


def _combine(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda f, a, b: f(a, b), st.sampled_from(OPERATIONS), parts, parts) | st.builds(
        floor_div, parts, DIVISORS
    )


dims = st.recursive(leaves, _combine, max_leaves=6)


def test_equal_expressions_have_one_form() -> None:
    assert (N + 1) * 2 - N == N + 2
    assert hash(N * H) == hash(H * N)
    assert N - N == 0
    assert isinstance(N * 0, int)
    assert (N + 3) - N == 3


def test_division_is_exact_where_every_term_allows() -> None:
    assert floor_div(6 * N * H, 3 * N) == 2 * H
    assert floor_div(6 * N + 7, 3) == 2 * N + 2
    assert floor_div(N * H, N * H) == 1
    assert 12 * N % 4 == 0
    assert str(floor_div(N, 2)) == "((n)//(2))"


def test_inexact_divisions_stay_symbolic_quotients() -> None:
    half = floor_div(N - 1, 2) + 1
    assert [evaluate(half, {"n": n}) for n in range(1, 6)] == [1, 1, 2, 2, 3]
    assert floor_div(2 * N, 4) == floor_div(N, 2)


def test_terms_divisible_by_the_divisor_leave_the_quotient() -> None:
    assert floor_div(N - 20, 10) == floor_div(N, 10) - 2
    assert floor_div(N - 1, 2) + 1 == floor_div(N + 1, 2)
    assert floor_div(2 * N + 1, 4) == floor_div(N, 2)
    assert floor_div(N, -3) == floor_div(-N, 3)
    assert floor_div(N * H + 3 * H, H) == N + 3


def test_nested_quotients_become_one() -> None:
    assert floor_div(floor_div(N, 3) + H, 4) == floor_div(N + 3 * H, 12)
    convolved = floor_div(floor_div(N - 10, 5) + 1 - 3, 2) + 1  # two convolutions, of 10 and 3 taps, strides 5 and 2
    assert convolved == floor_div(N - 20, 10) + 1 == floor_div(N, 10) - 1
    assert floor_div(2 * floor_div(N, 3) + 1, 4) == floor_div(N, 6)


def test_shared_factors_of_a_quotient_are_cancelled() -> None:
    assert floor_div(N * H, 3 * N) == floor_div(H, 3)
    assert floor_div(N * H + N, 4 * N * H) == floor_div(H + 1, 4 * H)
    assert floor_div(2 * N * H, 4 * N * H) == 0


def test_a_sum_divides_its_multiples() -> None:
    half = floor_div(N, 2)
    assert floor_div(4 * half - 4, half - 1) == 4
    assert floor_div((half - 1) * (N + H) * 3, (half - 1) * 3) == N + H
    assert floor_div((N - H) * (N + H), N - H) == N + H
    assert str(floor_div(N * H - 1, N - 1)) == "((H*n-1)//(n-1))"
    assert str(floor_div(product([N] * 200) - 1, N - 1)).endswith("//(n-1))")  # 200 terms would be too large


def test_a_quotient_by_zero_has_no_value() -> None:
    quotient = floor_div(N, 3 * H)
    for zero in (substitute(quotient, {"n": 5, "H": 0}), floor_div(5, 0), floor_div(0, 0), floor_div(N, 0)):
        assert parse_dim(str(zero)) == zero
        with pytest.raises(KeyError):
            evaluate(zero, ENV)
    with pytest.raises(KeyError, match="divides by zero"):
        evaluate(quotient, {"n": 5, "H": 0})


@given(dims, dims)
def test_arithmetic_commutes_with_evaluation(a: Dim, b: Dim) -> None:
    for apply in OPERATIONS:
        assert evaluate(apply(a, b), ENV) == apply(evaluate(a, ENV), evaluate(b, ENV))


@given(dims, DIVISORS)
def test_floor_division_commutes_with_evaluation(a: Dim, divisor: int) -> None:
    assert evaluate(floor_div(a, divisor), ENV) == evaluate(a, ENV) // divisor


@given(dims)
def test_text_reads_back_equal(dim: Dim) -> None:
    assert parse_dim(str(dim)) == dim


@pytest.mark.parametrize("text", ["n + ", "f(n)", "n ** 2", "n / 2", "'n'", "n.shape", ""])
def test_text_that_is_no_dimension_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a dimension|is not allowed in a dimension"):
        parse_dim(text)


def test_substitution_reaches_into_quotients() -> None:
    dim = floor_div(N * H + 1, 2)
    assert substitute(dim, {"H": 2}) == floor_div(2 * N + 1, 2)
    assert substitute(dim, {"H": 3, "n": 3}) == 5
    assert symbols(dim) == {"n", "H"}


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(KeyError, match="no value for H"):
        evaluate(N + H, {"n": 1})


def test_affine_form() -> None:
    assert affine(3 * N + 4, "n") == (3, 4)
    assert affine(7, "n") == (0, 7)
    assert affine(N * N, "n") is None
    assert affine(H, "n") is None


def test_product_of_dimensions() -> None:
    assert product([]) == 1
    assert product([2, N, 3]) == 6 * N
    assert isinstance(product([N, 4]), SymDim)


def test_a_maximum_is_resolved_if_the_difference_has_a_sign() -> None:
    assert maximum(3, 5) == 5
    assert maximum(N + 2, N) == maximum(N, N + 2) == N + 2
    assert maximum(N + H, H) == N + H
    assert maximum(N, N) == N


def test_other_maxima_stay_symbolic() -> None:
    both = maximum(N, H + 1)
    assert both == maximum(H + 1, N) and symbols(both) == {"n", "H"} and affine(both, "n") is None
    assert parse_dim(str(2 * both - 1)) == 2 * both - 1
    for n, h in ((5, 2), (2, 5), (3, 2)):
        assert evaluate(4 * both + N, {"n": n, "H": h}) == 4 * max(n, h + 1) + n
    assert substitute(both, {"n": H}) == H + 1
    assert is_never_negative(both) and is_never_negative(maximum(N - 3, H))
    assert not is_never_negative(maximum(N - 3, H - 1))


def test_equal_maxima_have_one_form() -> None:
    least = N + 64 - maximum(N, 64)  # min(n, 64)
    assert 64 - maximum(64 - N, 0) == least == N - maximum(N - 64, 0)
    assert maximum(3 * N + H, 2 * H + N) == maximum(2 * N, H) + N + H
    for n in (0, 63, 64, 65, 100):
        assert evaluate(least, {"n": n}) == min(n, 64)


def test_a_minimum_is_between_its_sides() -> None:
    least = N + 64 - maximum(N, 64)
    assert is_never_negative(least) and is_never_negative(64 - least) and is_never_negative(N - least)
    assert not is_never_negative(least - 1) and not is_never_negative(63 - least)


def test_sizes_in_use_are_at_least_one() -> None:
    some = filled(0)
    assert maximum(some, 1) == some and is_never_negative(2 * some - 2) and is_never_negative(some * filled(1) + H - 1)
    assert not is_never_negative(some - 2) and not is_never_negative(size(0) - 1)
    assert size_index(str(some)) == size_index(str(size(0))) == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2*n//3 | 4 - 1", 5),
        ("20 - 3 - 2*2", 13),
        ("-n//2*3", -12),
        ("(2 | n)*(1 | 0)", 7),
        ("class + None*n", 24),  # no word is reserved: exporters write any name
    ],
)
def test_operators_bind_as_in_python(text: str, value: int) -> None:
    assert evaluate(parse_dim(text), {"n": 7, "class": 3, "None": 3}) == value
