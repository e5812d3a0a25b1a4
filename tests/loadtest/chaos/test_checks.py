"""Each check on a history that obeys it, and on a history with a single fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.chaos.checks import PROMISES
from loadtest.chaos.history import Operation, Outcome, read_history, write_history


def op(kind: str, invoked: float, completed: float | None, outcome: Outcome = "ok", **more: Any) -> Operation:
    return Operation(kind, "a client", invoked, completed, outcome, model="m", **more)


def start(invoked: float, completed: float | None) -> Operation:
    return Operation("start", "server", invoked, completed, "ok" if completed else "unknown")


FIRST = [
    start(0, 1),
    op("upload", 1, 2, alias="live", version=1, factor=10, generation=1),
    op("upload", 3, 4, version=2, factor=20, generation=2),
    op("infer", 5, 6, version=1, factor=10),
    op("infer", 5, 6, asked="2", version=2, factor=20),
    op("move", 7, 8, alias="live", version=2, generation=3),
    op("aliases", 9, 10, found={"live": 2}),
    op("versions", 9, 10, found={"1": 10, "2": 20}),
]
LOST = op("upload", 11, None, "unknown", alias="live", factor=30)
AGAIN = start(20, 25)

GOOD: dict[str, list[Operation]] = {
    "a quiet history": [],
    "an upload that was lost": [LOST, AGAIN, op("aliases", 26, 27, found={"live": 2})],
    "an upload that succeeded without an answer": [
        LOST,
        AGAIN,
        op("aliases", 26, 27, found={"live": 3}),
        op("infer", 28, 29, version=3, factor=30),
    ],
    "a rollback that succeeded without an answer": [
        op("rollback", 11, None, "unknown", alias="live"),
        AGAIN,
        op("infer", 26, 27, version=1, factor=10),
    ],
    "a deletion that succeeded without an answer": [
        op("delete", 11, None, "unknown", version=1),
        AGAIN,
        op("versions", 26, 27, found={"2": 20}),
        op("infer", 26, 27, "failed", status=404, asked="1"),
    ],
    "a deletion": [op("delete", 11, 12, version=1, generation=4), op("audit", 13, 14, found={"2": 20})],
    "moves that change nothing": [
        op("move", 11, 14, alias="live", version=2, generation=3, changed=False),
        op("move", 12, 13, alias="live", version=2, generation=3, changed=False),
        op("move", 15, 16, alias="live", version=1, generation=4),
        op("move", 17, 18, alias="live", version=1, generation=4, changed=False),
    ],
    "a refusal": [op("move", 11, 12, "failed", alias="live", version=1, status=409)],
}
BAD: dict[str, tuple[str, list[Operation]]] = {
    "an acknowledged move is gone after a start": (
        "each alias is a linearizable register",
        [AGAIN, op("aliases", 26, 27, found={"live": 1})],
    ),
    "an older version answers for the alias": (
        "each alias is a linearizable register",
        [op("infer", 11, 12, version=1, factor=10)],
    ),
    "an upload takes effect once another server is ready": (
        "each alias is a linearizable register",
        [
            LOST,
            AGAIN,
            op("aliases", 26, 27, found={"live": 2}),
            op("infer", 28, 29, version=3, factor=30),
        ],
    ),
    "a refused move takes effect": (
        "each alias is a linearizable register",
        [op("move", 11, 12, "failed", alias="live", version=1, status=409), op("aliases", 13, 14, found={"live": 1})],
    ),
    "a number that is used twice": (
        "changes are numbered in their order",
        [op("delete", 11, 12, version=1, generation=3)],
    ),
    "a move that changes nothing, with an old number": (
        "changes are numbered in their order",
        [op("move", 11, 12, alias="live", version=2, generation=2, changed=False)],
    ),
    "a move that changes nothing, with the number of a later change": (
        "changes are numbered in their order",
        [
            op("move", 11, 12, alias="live", version=2, generation=4, changed=False),
            op("delete", 13, 14, version=1, generation=4),
        ],
    ),
    "a move to another version that changes nothing": (
        "each alias is a linearizable register",
        [op("move", 11, 12, alias="live", version=1, generation=3, changed=False)],
    ),
    "numbers that decrease": ("changes are numbered in their order", [op("delete", 11, 12, version=1, generation=0)]),
    "a version is not listed": ("nothing acknowledged is lost", [AGAIN, op("versions", 26, 27, found={"2": 20})]),
    "a version does not answer the audit": ("nothing acknowledged is lost", [op("audit", 26, 27, found={"1": 10})]),
    "a version that was only seen is gone": (
        "nothing acknowledged is lost",
        [LOST, AGAIN, op("infer", 26, 27, version=3, factor=30), op("versions", 28, 29, found={"1": 10, "2": 20})],
    ),
    "a version is not found by its number": (
        "nothing acknowledged is lost",
        [op("infer", 11, 12, "failed", status=404, asked="1")],
    ),
    "a deleted version is listed again": (
        "nothing deleted comes back",
        [op("delete", 11, 12, version=1, generation=4), AGAIN, op("versions", 26, 27, found={"1": 10, "2": 20})],
    ),
    "a deleted version answers": (
        "nothing deleted comes back",
        [op("delete", 11, 12, version=1, generation=4), op("infer", 13, 14, asked="1", version=1, factor=10)],
    ),
    "an alias names a deleted version": (
        "nothing deleted comes back",
        [op("delete", 11, 12, version=1, generation=4), op("aliases", 13, 14, found={"live": 2, "blue": 1})],
    ),
    "another version answers than was asked": (
        "answers have the values of the version that answers",
        [op("infer", 11, 12, asked="2", version=1, factor=10)],
    ),
    "a version has the values of another one": (
        "answers have the values of the version that answers",
        [op("infer", 11, 12, asked="2", version=2, factor=10)],
    ),
    "values that were never uploaded": (
        "answers have the values of the version that answers",
        [op("infer", 11, 12, asked="5", version=5, factor=77)],
    ),
    "values of an upload that was cut off": (
        "answers have the values of the version that answers",
        [op("upload", 11, 12, "failed", factor=40), op("versions", 13, 14, found={"1": 10, "2": 20, "3": 40})],
    ),
    "one upload is two versions": (
        "answers have the values of the version that answers",
        [op("versions", 11, 12, found={"1": 10, "2": 20, "3": 20})],
    ),
    "a 500": ("nothing is answered with 500", [op("infer", 11, 12, "failed", status=500)]),
}


def violations_of(history: list[Operation]) -> dict[str, list[str]]:
    found = {promise: list(check(history)) for promise, check in PROMISES.items()}
    return {promise: violations for promise, violations in found.items() if violations}


@pytest.mark.parametrize("more", GOOD.values(), ids=GOOD)
def test_a_correct_history_passes(more: list[Operation]) -> None:
    assert violations_of([*FIRST, *more]) == {}


@pytest.mark.parametrize(("promise", "more"), BAD.values(), ids=BAD)
def test_a_history_with_one_fault_fails(promise: str, more: list[Operation]) -> None:
    found = violations_of([*FIRST, *more])
    assert list(found) == [promise]
    assert all(violation.startswith("m: ") or promise.startswith("each") for violation in found[promise])


def test_a_history_can_be_read_back(tmp_path: Path) -> None:
    history = [*FIRST, LOST, AGAIN]
    write_history(tmp_path / "history.jsonl", history)
    assert read_history(tmp_path / "history.jsonl") == history


def test_a_line_that_is_no_operation_is_named(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"kind": "move"}\n')
    with pytest.raises(ValueError, match=r"history.jsonl, line 1: no operation"):
        read_history(tmp_path / "history.jsonl")
