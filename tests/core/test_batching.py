"""The batching check finds rows that depend on each other, on their position or on the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.ir.text import parse_graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.session.session import Session
from tests.batching import EMPTY, RowsNotIndependent, Tally, check_batching, install

MIXING = {
    "the sum of all rows": """
        %s : float32[*] = ReduceSum(%x) {axes = [0], keepdims = 1}
        %y : float32[*] = Add(%x, %s)""",
    "the greatest element of all rows, which few rows change": """
        %s : float32[*] = ReduceMax(%x) {keepdims = 1}
        %y : float32[*] = Add(%x, %s)""",
    "the place of a row": """
        const %axis : int64[] = [0]
        const %one : float32[1,1] = [1.0]
        %o : float32[*] = Expand(%one) {shape = [n, 1]}
        %s : float32[*] = CumSum(%o, %axis)
        %y : float32[*] = Mul(%x, %s)""",
    "the number of rows": """
        %s : int64[*] = Shape(%x) {start = 0, end = 1}
        %f : float32[*] = Cast(%s) {to = 1}
        %y : float32[*] = Mul(%x, %f)""",
    "the first row": """
        %s : float32[*] = Slice(%x) {starts = [0], ends = [1], axes = [0]}
        %y : float32[*] = Sub(%x, %s)""",
    "the next row": """
        %a : float32[*] = Slice(%x) {starts = [1], ends = [9223372036854775807], axes = [0]}
        %b : float32[*] = Slice(%x) {starts = [0], ends = [1], axes = [0]}
        %y : float32[*] = Concat(%a, %b) {axis = 0}""",
}
APART = """
    const %w : float32[4,3] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    %h : float32[*] = MatMul(%x, %w)
    %y : float32[*] = Softmax(%h) {axis = -1}"""


def declared_batchable(body: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session that declares its rows independent, whatever it computes."""
    monkeypatch.setattr(
        "lathe.core.passes.proofs.assumptions.rows",
        lambda graph, simplified=None: BatchInfo(True, "says the test", "n"),
    )
    monkeypatch.setattr("lathe.core.runtime.host.chunks._CACHE_BYTES", 1 << 30)  # batches are not split into chunks
    return lathe.compile(parse_graph("graph @g { input %x : float32[n,4]" + body + "\noutput %y }"), threads=1)


def feeds_of(rows: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, 4), np.float32)}


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("body", MIXING.values(), ids=MIXING)
def test_dependent_rows_are_found(body: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    session = declared_batchable(body, monkeypatch)
    with pytest.raises(RowsNotIndependent, match="output 'y'"):
        check_batching(session, feeds_of(rows))


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_independent_rows_pass(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_batching(declared_batchable(APART, monkeypatch), feeds_of(rows)) == ""


def test_the_given_results_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    session, feeds = declared_batchable(APART, monkeypatch), feeds_of(3)
    answers = {name: array.copy() for name, array in session.run(feeds).items()}
    assert check_batching(session, feeds, answers) == ""
    answers["y"][1] += 0.5
    with pytest.raises(RowsNotIndependent, match=r"row 1 of output 'y'.*the rows of the feeds: 3 rows"):
        check_batching(session, feeds, answers)


def test_an_output_with_missing_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "%y : float32[*] = ReduceSum(%x) {axes = [0], keepdims = 1}"
    with pytest.raises(RowsNotIndependent, match=r"output 'y' of 2 rows has shape \[1, 4\]"):
        check_batching(declared_batchable(body, monkeypatch), feeds_of(2))


def test_models_with_random_numbers_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
        %r : float32[*] = RandomNormal() {shape = [1, 4]}
        %y : float32[*] = Add(%x, %r)"""
    assert check_batching(declared_batchable(body, monkeypatch), feeds_of(2)) == "the model draws random numbers"


def test_refused_random_rows_are_replaced_by_rows_of_the_feeds() -> None:
    """No other index than 0 fits: random rows would be refused."""
    text = """graph @g {
        input %i : int64[n]
        input %x : float32[n,4]
        const %t : float32[1] = [3.0]
        %e : float32[*] = Gather(%t, %i) {axis = 0}
        %u : float32[*] = Unsqueeze(%e) {axes = [1]}
        %y : float32[*] = Mul(%x, %u)
        output %y }"""
    session = lathe.compile(parse_graph(text), threads=1)
    assert check_batching(session, {"i": np.zeros(2, np.int64), **feeds_of(2)}) == ""


def test_the_installed_check_runs_once_per_session(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def checking(session: Session, feeds: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
        checked.append(len(feeds["x"]))
        return check_batching(session, feeds, answers)

    tally = Tally()
    monkeypatch.setattr("tests.batching.check_batching", checking)
    uninstall = install(tally)
    try:
        session = declared_batchable(APART, monkeypatch)
        session.run(feeds_of(0))
        assert tally.left_out[EMPTY] == 1
        session.run(feeds_of(3))
        session.run(feeds_of(4))
        assert (tally.validate, checked, tally.left_out[EMPTY]) == (1, [0, 3], 0)
        bad = declared_batchable(MIXING["the number of rows"], monkeypatch)
        with pytest.raises(RowsNotIndependent):
            bad.run(feeds_of(3))
        assert len(tally.failures) == 1 and any("FAILED g: row" in line for line in tally.lines())
    finally:
        uninstall()
