"""Every pattern of every pass fires on an example, and the graphs before and after agree on random inputs.

Passes are found in `pipeline.py`, patterns in the modules of the passes: the functions there, and the rules in their
tables. A pattern that no example reaches fails a test. Examples are the case files, and EXAMPLES for long graphs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.types import DType
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes import pipeline
from lathe.core.passes.rewrite.base import Pass
from lathe.core.passes.rewrite.pattern import Rule
from lathe.core.reference import interpret
from tests.core.passes.case_files import TEXTS
from tests.core.passes.examples import EXAMPLES
from tests.core.passes.test_cases import ALL, PASSES
from tests.random_numbers import made_at_import

DISCOVERED: dict[str, Pass] = {
    step.name: step
    for channels_last in (True, False)
    for precision in ("float32", "bfloat16", "float16")
    for host in (True, False)  # last the passes for GPUs, which do what those for CPUs do and more
    for step in pipeline.optimizing_passes(pipeline.Options(channels_last, precision=precision, host=host))
} | PASSES

GRAPHS: list[tuple[str, str, Graph]] = [
    *((case.name, case.title, case.before) for case in ALL),
    *((name, make.__name__, made_at_import(make)) for name, makers in EXAMPLES.items() for make in makers),
]
each_graph = pytest.mark.parametrize(("name", "graph"), [(name, graph) for name, _, graph in GRAPHS],
                                     ids=[f"{name}: {title}" for name, title, _ in GRAPHS])  # fmt: skip
# Relative to the largest element; all other passes change only the rounding.
_TOLERANCES = {"bfloat16": 0.05, "float16": 0.01, "widen": 3e-3, "quantized": 0.06}
# Cases where a result that is not finite may change, and why.
_FINITE_ONLY = {
    "definitions": "what only one operand has is summed before it is multiplied, and a table has zeros",
    "quantized": "integers know neither infinities nor NaN",
    "transposed_conv": "zeros that fill up the kernels of its phases meet the neighbours of a pixel",
    "pack_images": "zeros that fill up windows of blocks meet the neighbours of a window",
    "bfloat16": "what is just finite in float32 may not be in bfloat16",
    "float16": "what is large in float32 is infinite in float16",
}
# Functions that no example reaches: patterns for packed sequences (test_pack.py and runtime/test_packed.py run them),
# functions for types of a small range, and functions that the compiler calls before the pass.
_ELSEWHERE = {
    "indexed_views": {"extents_to_equate"},
    "attention": {"_fuse_segments", "_have_tokens", "_has_tokens", "_compute_in_body", "_changes_leading_axes"},
    "bfloat16": {"_is_bounded", "_degree"},
    "widen": {"product_dtype", "_products"},
}


def prepared(graph: Graph) -> Graph:
    twin = graph.clone()
    infer_graph(twin)
    return twin


def of_pass(name: str) -> list[Graph]:
    return [prepared(graph) for each, _, graph in GRAPHS if each == name]


def test_every_pass_of_the_pipeline_has_examples() -> None:
    assert DISCOVERED.keys() - {name for name, _, _ in GRAPHS} == set()


@pytest.mark.parametrize("name", DISCOVERED)
def test_every_pattern_is_reached(name: str) -> None:
    """All rules of the pass fire, and no function of its module goes unused, over all examples together."""
    step, graphs = DISCOVERED[name], of_pass(name)
    module = sys.modules[type(step).__module__]
    fired: set[str] = set()

    def run() -> None:
        for graph in graphs:
            fired.update(note.rpartition(": ")[0] for note in step.run(graph).notes)

    called = calls(run)
    unused = {function.__name__ for function in functions(module) if function.__code__ not in called}
    assert unused == _ELSEWHERE.get(name, set()), "no example of the pass reaches them"
    assert {rule.name for rule in rules(module)} - fired == set(), "no example of the pass has them fire"


def calls(run: Callable[[], None]) -> set[CodeType]:
    """The code objects of all Python functions that `run` calls."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen


def functions(module: ModuleType) -> list[Any]:
    """The functions of a module, without those that run on import: decorators and functions that make rules."""
    own = [each for each in vars(module).values() if inspect.isfunction(each) and each.__module__ == module.__name__]
    return [each for each in own if not _makes_patterns(each)]


def _makes_patterns(function: Any) -> bool:
    answer = str(inspect.signature(function).return_annotation)
    return any(word in answer for word in ("Callable", "Rule", "Pattern", "Rewrite", "Op", "Const", "Converter"))


def rules(module: ModuleType) -> Iterable[Rule]:
    tables = [value for value in vars(module).values() if isinstance(value, list | tuple)]
    return [rule for table in tables for rule in table if isinstance(rule, Rule)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "sizes",
    [
        {"n": 1, "m": 1, "batch": 1, "size0": 1, "size1": 1, "size2": 1},
        {"n": 7, "m": 5, "batch": 17, "size0": 2, "size1": 3, "size2": 6},
    ],
)
@pytest.mark.parametrize("kind", ["normal", "large", "not finite"])
@each_graph
def test_graphs_before_and_after_agree(name: str, graph: Graph, kind: str, sizes: dict[str, int]) -> None:
    if kind == "not finite" and name in _FINITE_ONLY:
        kind = "normal"
    before, after = prepared(graph), prepared(graph)
    DISCOVERED[name].run(after)
    verify(after, after=name)
    rng = np.random.default_rng([len(kind), *sizes.values()])
    feeds = {value.name: sample(rng, value, kind, sizes) for value in graph.inputs}
    expected, got = interpret(before, feeds), interpret(after, feeds)
    assert got.keys() == expected.keys()
    for key, want in expected.items():
        assert_same(got[key], want, _TOLERANCES.get(name, 1e-5), key)


def sample(rng: np.random.Generator, value: Value, kind: str, sizes: dict[str, int]) -> Array:
    shape = tuple(evaluate(dim, sizes) for dim in value.shape)
    if value.dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if value.dtype.is_integer:
        return rng.integers(0, 4, shape).astype(value.dtype.numpy)
    if value.dtype is DType.STRING:
        return rng.choice(np.array(TEXTS, object), shape)
    data = rng.standard_normal(shape) * (100 if kind == "large" else 1)
    if kind == "not finite":
        strange = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape)
        data = np.where(rng.random(shape) < 0.2, strange, data)
    return data.astype(value.dtype.numpy)


def assert_same(got: Array, want: Array, tolerance: float, label: str) -> None:
    """Check that special values are equal, and others close, relative to the largest finite element."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), label
    if want.dtype.kind not in "fV":
        np.testing.assert_array_equal(got, want, err_msg=label)
        return
    mine, theirs = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(mine[~finite], theirs[~finite], err_msg=label)
    largest = float(np.abs(theirs[finite]).max(initial=1e-3))
    np.testing.assert_allclose(mine[finite] / largest, theirs[finite] / largest, rtol=0, atol=tolerance, err_msg=label)
