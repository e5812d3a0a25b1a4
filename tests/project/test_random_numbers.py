"""No test may draw from a random generator that another test has moved on.

The numbers from a module's generator depend on which tests of the module ran before. So a run of some of the tests
(`make test-slow`, `-k`, more processes) would draw other numbers than a run of all tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

GENERATORS = {"default_rng", "RandomState", "Random", "Generator"}
TESTS = Path(__file__).resolve().parents[1]


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that Python evaluates when it imports a module: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import(child)


def shared_generators(source: str) -> list[str]:
    """The statements of a module that keep a generator of their own, or draw from the tests' generator at import."""
    found = []
    for node in at_import(ast.parse(source)):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Call):
            function = value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in GENERATORS:
                found.append(f"line {node.lineno}: keeps a {name}")
        if isinstance(node, ast.Name) and node.id == "RNG" and isinstance(node.ctx, ast.Load):
            found.append(f"line {node.lineno}: draws from RNG at import")
    return found


def test_no_generator_is_shared_between_tests() -> None:
    modules = set(TESTS.rglob("*.py")) - {TESTS / "random_numbers.py"}
    found = {str(path.relative_to(TESTS)): shared_generators(path.read_text()) for path in modules}
    assert {name: lines for name, lines in found.items() if lines} == {}, (
        "use RNG of tests/random_numbers.py in the test"
    )


@pytest.mark.parametrize(
    "source",
    ["A = np.random.default_rng(3)", "class C:\n    a: Random = Random(1)", "from x import RNG\nX = [RNG.random()]"],
)
def test_a_shared_generator_is_found(source: str) -> None:
    assert shared_generators(source)


def test_draws_inside_functions_are_not_shared() -> None:
    assert not shared_generators(
        "A = default_rng(3).random(4)\ndef f():\n    rng = default_rng(1)\n    return RNG.random()"
    )
