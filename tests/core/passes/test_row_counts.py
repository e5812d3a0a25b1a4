"""Uses of the number of rows that keep rows independent, and those that do not, which a batched run reveals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.ir.dim import parse_dim
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import parse_graph
from lathe.core.ops.opdef.registry import Infer, MixesRows, RowAxis
from lathe.core.ops.opdef.type_rules import broadcast_rows
from lathe.core.ops.tensor.movement import Split
from lathe.core.passes.proofs import row_counts, rows
from lathe.core.passes.proofs.row_counts import Counts, steps_per_row
from lathe.core.passes.proofs.rows import rows as proof
from tests.batching import RowsNotIndependent, check_batching

TABLE = "const %table : float32[40] = [" + ", ".join(f"{i}.5" for i in range(40)) + "]"

# The number of rows as a vector %n, a scalar %one_n, and further counts.
COUNTS = """
    const %zero : int64[] = [0]
    const %zeros : int64[1] = [0]
    const %ones : int64[1] = [1]
    const %four : int64[1] = [4]
    %s : int64[*] = Shape(%x)
    %one_n : int64[*] = Gather(%s, %zero) {axis = 0}
    %n : int64[*] = Unsqueeze(%one_n, %zeros)
    %n1 : int64[*] = Add(%n, %ones)"""

# Models whose rows differ in a batch and alone, with the node and input at which the proof must fail.
MISUSED = {
    "x + table[n]": (
        """
        %e : float32[*] = Slice(%table, %n, %n1) "element"
        %y : float32[*] = Add(%x, %e)""",
        "node 'element' (Slice): computes with the number of rows (input 1, starts)",
    ),
    "the sum of x[:, :n]": (
        """
        %e : float32[*] = Slice(%x, %zeros, %n, %ones) "columns"
        %y : float32[*] = ReduceSum(%e) {axes = [1], keepdims = 1}""",
        "node 'columns' (Slice): computes with the number of rows (input 2, ends)",
    ),
    "x[:, :n]": (
        """
        %y : float32[*] = Slice(%x, %zeros, %n, %ones) "columns" """,
        "node 'columns' (Slice): computes with the number of rows (input 2, ends)",
    ),
    "columns from the n-th on": (
        """
        const %end : int64[1] = [9223372036854775807]
        %e : float32[*] = Slice(%x, %n, %end, %ones) "columns"
        %y : float32[*] = ReduceSum(%e) {axes = [1], keepdims = 1}""",
        "node 'columns' (Slice): computes with the number of rows (input 1, starts)",
    ),
    "repeated n times": (
        """
        %r : int64[*] = Concat(%ones, %n) {axis = 0}
        %e : float32[*] = Tile(%x, %r) "repeated"
        %y : float32[*] = ReduceSum(%e) {axes = [1], keepdims = 1}""",
        "node 'repeated' (Tile): its size depends on the number of rows ('e' is float32[n,4*n])",
    ),
    "expanded to [n, n, 4]": (
        """
        %r : int64[*] = Concat(%n, %n, %four) {axis = 0}
        %u : float32[*] = Unsqueeze(%x, %ones)
        %e : float32[*] = Expand(%u, %r) "wide"
        %y : float32[*] = ReduceSum(%e) {axes = [1], keepdims = 0}""",
        "node 'wide' (Expand): its size depends on the number of rows ('e' is float32[n,n,4])",
    ),
    "the n greatest": (
        """
        %v : float32[*], %i : int64[*] = TopK(%x, %n) {axis = 1} "greatest"
        %y : float32[*] = ReduceSum(%v) {axes = [1], keepdims = 1}""",
        "node 'greatest' (TopK): computes with the number of rows (input 1, K)",
    ),
    "a triangle from diagonal n on": (
        """
        %u : float32[*] = Unsqueeze(%x, %ones)
        %y : float32[*] = Trilu(%u, %one_n) {upper = 1} "triangle" """,
        "node 'triangle' (Trilu): computes with the number of rows (input 1, k)",
    ),
    "padded by n": (
        """
        %w : int64[*] = Concat(%zeros, %n, %zeros, %zeros) {axis = 0}
        %e : float32[*] = Pad(%x, %w) {mode = "edge"} "wider"
        %y : float32[*] = ReduceSum(%e) {axes = [1], keepdims = 1}""",
        "node 'wider' (Pad): computes with the number of rows (input 1, pads)",
    ),
    "one of n": (
        """
        const %values : float32[2] = [0.0, 1.0]
        %i : int64[*] = ArgMax(%x) {axis = 1, keepdims = 0}
        %h : float32[*] = OneHot(%i, %n, %values) "places"
        %y : float32[*] = ReduceMax(%h) {axes = [1], keepdims = 1}""",
        "node 'places' (OneHot): computes with the number of rows (input 1, depth)",
    ),
    "a branch gives the number of rows": (
        """
        const %f : bool[1] = [1]
        %c : int64[*] = If(%f) {else_branch = graph @e {
          %u : int64[*] = Shape(%x) {start = 0, end = 1}
          output %u
        }, then_branch = graph @t {
          %v : int64[*] = Shape(%x) {start = -2, end = -1}
          output %v
        }} "choice"
        %g : float32[*] = Cast(%c) {to = 1}
        %y : float32[*] = Add(%x, %g)""",
        "node 'choice' (If): its nested graph outputs the number of rows",
    ),
    "equal to five": (
        """
        const %five : int64[1] = [5]
        %c : bool[*] = Equal(%five, %n) "five"
        %g : float32[*] = Cast(%c) {to = 1}
        %y : float32[*] = Add(%x, %g)""",
        "node 'five' (Equal): computes with the number of rows (input 1, B)",
    ),
}

# An If whose branches differ in rank makes values of unknown rank; the width of x selects the branch.
UNKNOWN_RANK = """
    const %column : int64[] = [1]
    const %three : int64[] = [3]
    %m : int64[*] = Gather(%s, %column) {axis = 0}
    %c : bool[*] = Less(%three, %m)
    %u : float32[*] = If(%c) {else_branch = graph @e {
      const %second : int64[1] = [1]
      %q : float32[*] = Unsqueeze(%x, %second)
      output %q
    }, then_branch = graph @t {
      %p : float32[*] = Neg(%x)
      output %p
    }} "branches" """


UNKNOWN = {
    "x + the sum over all rows": UNKNOWN_RANK
    + """
        const %two : float32[] = [2.0]
        %o : float32[*] = Mul(%u, %two)
        %t : float32[] = ReduceSum(%o) {keepdims = 0}
        %y : float32[*] = Add(%x, %t)""",
    "x + Size(y)": UNKNOWN_RANK
    + """
        %t : int64[*] = Size(%u) "size"
        %g : float32[*] = Cast(%t) {to = 1}
        %y : float32[*] = Add(%x, %g)""",
    "x + the first of Shape(y)": UNKNOWN_RANK
    + """
        %t : int64[*] = Shape(%u) {start = 0, end = 1} "shape"
        %g : float32[*] = Cast(%t) {to = 1}
        %y : float32[*] = Add(%x, %g)""",
}


def model(body: str, width: str = "4") -> Graph:
    return parse_graph(text(body, width))


def text(body: str, width: str = "4") -> str:
    return f"graph @g {{ input %x : float32[n,{width}]\n{COUNTS}\n{TABLE}\n{body}\noutput %y }}"


# Uses of the number of rows that do not change any row.
RIGHT = {
    "a shape": """
        %p : int64[*] = Concat(%n, %ones, %four) {axis = 0}
        %u : float32[*] = Reshape(%x, %p)
        %y : float32[*] = Softmax(%u)""",
    "several steps for each row, there and back": """
        const %two : int64[1] = [2]
        const %any : int64[1] = [-1]
        %n2 : int64[*] = Mul(%n, %two)
        %p : int64[*] = Concat(%n2, %any) {axis = 0}
        %q : int64[*] = Concat(%n, %any) {axis = 0}
        %u : float32[*] = Reshape(%x, %p)
        %v : float32[*] = Softmax(%u)
        %y : float32[*] = Reshape(%v, %q)""",
    "the same row for all": """
        %p : int64[*] = Concat(%n, %four) {axis = 0}
        %r : float32[*] = Slice(%table, %zeros, %four)
        %e : float32[*] = Expand(%r, %p)
        %y : float32[*] = Concat(%x, %e) {axis = 1}""",
    "zeros of several steps for each row": """
        const %two : int64[1] = [2]
        %n2 : int64[*] = Mul(%n, %two)
        %p : int64[*] = Concat(%n2, %two) {axis = 0}
        %q : int64[*] = Concat(%n, %four) {axis = 0}
        %z : float32[*] = ConstantOfShape(%p)
        %w : float32[*] = Reshape(%z, %q)
        %y : float32[*] = Sub(%x, %w)""",
    "rows that are expanded to as many as they are": """
        %p : int64[*] = Concat(%n, %four, %four) {axis = 0}
        const %two : int64[1] = [2]
        %u : float32[*] = Unsqueeze(%x, %two)
        %e : float32[*] = Expand(%u, %p)
        %y : float32[*] = ReduceSum(%e) {axes = [1], keepdims = 0}""",
    "all rows": """
        %y : float32[*] = Slice(%x, %zeros, %n, %zeros)""",
    "images of another size": """
        const %side : int64[3] = [1, 2, 2]
        %p : int64[*] = Concat(%n, %side) {axis = 0}
        %i : float32[*] = Reshape(%x, %p)
        %sizes : int64[*] = Concat(%n, %ones, %four, %four) {axis = 0}
        %y : float32[*] = Resize(%i, _, _, %sizes) {mode = "linear"}""",
    "inside a branch": """
        const %column : int64[] = [1]
        const %three : int64[] = [3]
        %m : int64[*] = Gather(%s, %column) {axis = 0}
        %c : bool[*] = Less(%three, %m)
        %y : float32[*] = If(%c) {else_branch = graph @e {
          %a : float32[*] = Slice(%x, %zeros, %n, %zeros)
          output %a
        }, then_branch = graph @t {
          const %any : int64[1] = [-1]
          %p : int64[*] = Concat(%n, %any) {axis = 0}
          %b : float32[*] = Reshape(%x, %p)
          output %b
        }}""",
}

# Former errors ("holes") of the proof, restored for a test: each changes one place.
Hole = Callable[[pytest.MonkeyPatch], None]


def any_parameter(patch: pytest.MonkeyPatch) -> None:
    """The proof accepts a count as any parameter of any operator."""

    class Anything(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return (lambda view, counted: True) if key[1] else None

    patch.setattr(row_counts, "_USES", Anything())


def any_size(patch: pytest.MonkeyPatch) -> None:
    """The proof checks neither dimensions nor the number of steps per row."""
    patch.setattr(rows, "_check_steps", lambda node, axes: None)
    patch.setattr(rows, "_check_dims", lambda where, value, axis, batch: None)


def any_body(patch: pytest.MonkeyPatch) -> None:
    """The proof does not check whether a nested graph passes counts on."""
    patch.setattr(Counts, "check_body", lambda self, body, node: None)


def any_measure(patch: pytest.MonkeyPatch) -> None:
    """The proof accepts Shape and Size also of values of unknown rank."""
    check = Counts.check
    patch.setattr(Counts, "check", lambda self, node: node.op in ("Shape", "Size") or check(self, node))


def any_rank(patch: pytest.MonkeyPatch) -> None:
    """The proof gives the result of a broadcast no row axis if the rank of an input is unknown."""

    def broadcast(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return broadcast_rows(c, axes) if all(c.shape(i) is not None for i in range(len(axes))) else [None]

    patch.setattr("lathe.core.ops.tensor.elementwise.broadcast_rows", broadcast)


HOLES: dict[str, tuple[Hole, ...]] = {
    "x + table[n]": (any_parameter,),
    "the sum of x[:, :n]": (any_parameter, any_size),
    "x[:, :n]": (any_parameter, any_size),
    "columns from the n-th on": (any_parameter, any_size),
    "repeated n times": (any_parameter, any_size),
    "expanded to [n, n, 4]": (any_size,),
    "the n greatest": (any_parameter, any_size),
    "a triangle from diagonal n on": (any_parameter,),
    "padded by n": (any_parameter, any_size),
    "one of n": (any_parameter, any_size),
    "a branch gives the number of rows": (any_body,),
    "x + the sum over all rows": (any_size, any_rank),
    "x + Size(y)": (any_size, any_measure),
    "x + the first of Shape(y)": (any_size, any_measure),
}


@pytest.mark.parametrize(("body", "reason"), MISUSED.values(), ids=MISUSED)
def test_a_misuse_ends_the_proof_at_the_node_and_input(body: str, reason: str) -> None:
    found = proof(model(body))
    assert not found.batchable
    assert reason in found.reason


@pytest.mark.parametrize("body", UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_rank_ends_the_proof(body: str) -> None:
    found = proof(model(body, "m"))
    assert not found.batchable
    assert "node 'branches' (If): the rank of 'u' is not known" in found.reason


@pytest.mark.parametrize("label", HOLES)
def test_a_batch_reveals_a_hole_in_the_proof(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof fails until all holes of a case are made; then it wrongly succeeds, and a batch shows the error."""
    width = "m" if label in UNKNOWN else "4"
    body = UNKNOWN[label] if label in UNKNOWN else MISUSED[label][0]
    for hole in HOLES[label]:
        assert not proof(model(body, width)).batchable
        hole(monkeypatch)
    session = lathe.compile(model(body, width), threads=1)
    assert session.batching.batchable, session.batching.reason
    with pytest.raises((RowsNotIndependent, FeedError)) as found:
        check_batching(session, {"x": np.random.default_rng(0).standard_normal((3, 4), np.float32)})
    assert isinstance(found.value, RowsNotIndependent) or label == "the n greatest"  # n is too large


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_a_right_use_is_proven_and_true(body: str) -> None:
    session = lathe.compile(model(body, "m" if "%column" in body else "4"), threads=1)
    assert session.batching.batchable, session.batching.reason
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4), np.float32)}
    assert check_batching(session, feeds, session.run(feeds)) == ""


@pytest.mark.parametrize(
    ("dim", "steps"),
    [
        ("n", 1),
        ("3*n", 3),
        ("n*s", "s"),
        ("n + 1", None),
        ("n*n", None),
        ("n//2", None),
        ("-n", None),
        ("s", None),
        ("4", None),
    ],
)
def test_steps_per_row_are_an_integer_factor(dim: str, steps: int | str | None) -> None:
    expected = parse_dim(steps) if isinstance(steps, str) else steps
    assert steps_per_row(parse_dim(dim), "n") == expected


def test_rows_with_different_numbers_of_steps_do_not_combine() -> None:
    """[1,2] and [2,2] broadcast, [n,2] and [2*n,2] do not."""
    body = """
        %r : float32[*] = Reshape(%x) {shape = [2*n, 2]}
        %h : float32[*] = Slice(%x) {starts = [0], ends = [2], axes = [1]}
        %a : float32[*] = Add(%r, %h) "sum"
        %y : float32[*] = Reshape(%a) {shape = [n, 4]}"""
    assert "node 'sum' (Add): its inputs have" in proof(model(body)).reason


def test_a_scale_for_each_place_of_a_row_ends_the_proof() -> None:
    """The scale would fit a batch of three rows, and each row would have a scale of its own."""
    body = """
        const %scale : float32[3,4] = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]
        %y : float32[*] = LayerNormalization(%x, %scale) {axis = 1} "norm" """
    assert (
        "node 'norm' (LayerNormalization): an input without rows varies along the row axis" in proof(model(body)).reason
    )


def test_a_rule_that_forgets_an_output_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
        %y : float32[*], %z : float32[*] = Split(%x) {axis = 1} "halves" """
    assert proof(model(body)).batchable
    monkeypatch.setattr(Split, "rows", lambda self, c, axes: [0])
    assert "node 'halves' (Split): its rule for rows covers 1 of 2 outputs" in proof(model(body)).reason


def test_a_branch_that_does_not_fit_is_no_error() -> None:
    """The branch is for another rank, and is never taken."""
    body = """
        const %f : bool[] = [1]
        const %c : float32[3] = [1.0, 2.0, 3.0]
        %y : float32[*] = If(%f) {else_branch = graph @e {
          %u : float32[*] = Add(%x, %c)
          output %u
        }, then_branch = graph @t {
          %v : float32[*] = Softmax(%x)
          output %v
        }}"""
    assert proof(model(body)).batchable
