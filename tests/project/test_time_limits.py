"""No test may fail because the machine was slow: speed is measured in loadtest/, not asserted.

A busy machine can stop all processes for a minute. A test that must not hang has a time limit that ends it; it does not
assert that it was quick. It may subtract the time without a processor (`seconds_without_processor`).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = {"monotonic", "perf_counter", "time"}


def time_limits(source: str) -> list[int]:
    """The lines that assert an upper limit of a difference of two times."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            left = node.test.left
            is_upper = isinstance(node.test.ops[0], ast.Lt | ast.LtE)
            is_difference = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub)
            if is_upper and is_difference and _calls(left) & CLOCKS and "seconds_without_processor" not in _calls(left):
                found.append(node.lineno)
    return found


def _calls(node: ast.AST) -> set[str]:
    """The names of the functions that an expression calls."""
    called = (child.func for child in ast.walk(node) if isinstance(child, ast.Call))
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("assert time.monotonic() - began < 8", [1]),
        ("assert time.perf_counter() - began <= 8, 'slow'", [1]),
        ("assert time.monotonic() - began > 1.5", []),
        ("assert time.monotonic() < deadline", []),
        ("assert time.monotonic() - began - seconds_without_processor(process) < 5", []),
    ],
)
def test_time_limits_are_found(line: str, found: list[int]) -> None:
    assert time_limits(line) == found


def test_no_test_asserts_that_it_was_quick() -> None:
    found = [
        f"{file.relative_to(TESTS)}:{line}"
        for file in sorted(TESTS.rglob("*.py"))
        for line in time_limits(file.read_text())
    ]
    assert found == []
