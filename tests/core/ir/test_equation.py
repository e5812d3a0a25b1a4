"""Equations of dimensions, solved for a symbol or a maximum."""

from __future__ import annotations

import pytest

from lathe.core.ir.dim import evaluate, parse_dim, symbols
from lathe.core.ir.equation import solve, solve_maximum

SOLVED = [
    ("a", "b", "a", "b"),
    ("a", "5", "a", "5"),
    ("7", "a", "a", "7"),
    ("a", "b - 2", "a", "b - 2"),
    ("a + s", "b + s", "b", "a"),
    ("s + t", "m", "m", "s + t"),
    ("s + t + 1", "m + 1", "m", "s + t"),
    ("2*m", "6*s + 4*t", "m", "3*s + 2*t"),
    ("64*s*b", "16*s*c", "c", "4*b"),
    ("a + 3", "5", "a", "2"),
    ("a*b", "a*c + a*d", "b", "c + d"),
]
NOT_SOLVED = [
    ("2*a", "3*b"), ("a*b", "c*d"), ("a", "a + 1"), ("5", "6"), ("a + 5", "3"), ("a + s", "b + t"), ("a", "a"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "name", "value"), SOLVED)
def test_a_symbol_is_found(one: str, other: str, name: str, value: str) -> None:
    sides = parse_dim(one), parse_dim(other)
    found = solve(*sides, lambda each: True)
    assert found == (name, parse_dim(value))
    values = {each: 3 + 2 * index for index, each in enumerate("abcdmst")}
    values[name] = evaluate(found[1], values)
    left, right = (evaluate(side, values) for side in sides)
    assert left == right


@pytest.mark.parametrize(("one", "other"), NOT_SOLVED)
def test_equations_without_a_solution(one: str, other: str) -> None:
    assert solve(parse_dim(one), parse_dim(other), lambda each: True) is None


def test_only_free_symbols_are_solved_for() -> None:
    found = solve(parse_dim("a + s"), parse_dim("b + s"), lambda each: each == "a")
    assert found == ("a", parse_dim("b"))
    assert solve(parse_dim("a"), parse_dim("b"), lambda each: each == "s") is None
    assert symbols(found[1]) == {"b"}


@pytest.mark.parametrize(
    ("one", "other", "side"),
    [
        ("a", "a + 64 - (64|a)", "64"),
        ("4*a*b", "4*b*(64 + a - (64|a))", "64"),
        ("a", "(64|a)", "a"),
        ("64", "(64|a)", "64"),
        ("a + b", "(a + b|c)", "a + b"),
    ],
)
def test_a_maximum_is_one_of_its_sides(one: str, other: str, side: str) -> None:
    found = solve_maximum(parse_dim(one), parse_dim(other))
    assert found is not None
    maximum, taken = found
    assert taken == parse_dim(side)
    for values in ({"a": a, "b": b, "c": c} for a in range(1, 70, 9) for b in (1, 3) for c in (2, 50)):
        equal = evaluate(parse_dim(one), values) == evaluate(parse_dim(other), values)
        assert equal == all(evaluate(taken, values) >= evaluate(each, values) for each in maximum.sides)


@pytest.mark.parametrize(
    ("one", "other"), [("a", "b"), ("a", "(64|b)"), ("a*a", "(64 + a - (64|a))*(64 + a - (64|a))"), ("(a|b)", "(a|c)")]
)
def test_an_ambiguous_maximum_has_no_solution(one: str, other: str) -> None:
    assert solve_maximum(parse_dim(one), parse_dim(other)) is None
