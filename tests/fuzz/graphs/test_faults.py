"""Faults that are put back are found by random graphs, and removed afterwards."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
from onnx import helper

import lathe
import lathe.core.compiler.compile
from lathe.core.errors import ModelError
from lathe.core.passes.proofs.rows import rows
from lathe.core.runtime.session.session import Session
from tests import batching
from tests.fuzz.graphs import faults
from tests.fuzz.graphs.faults import FAULTS, Fault, Found, search
from tests.fuzz.graphs.unknown_rank import UNKNOWN

NAMES = {fault.name: fault for fault in FAULTS}


def own() -> str:
    """The target of this process."""
    return os.environ.get("LATHE_TARGET", "")


@pytest.fixture(autouse=True)
def as_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the command does: without the batching check of all tests, since wrong rows are expected here.

    Graphs of all seeds are checked, so that the same graphs show a fault on every target."""
    monkeypatch.setattr(Session, "run", batching._unchecked_run)
    monkeypatch.setattr(faults, "target_of", lambda seed: own())


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "kind", "first"),
    [
        ("a result over memory of another operand", "raises: PlanError", 30_030),
        ("a symbol as any parameter", "TypeError", 30_250),
        ("rows of values of unknown rank", "rows: ", 30_294),
        ("a C of another symbol in Gemm", "refused: ModelError", 30_676),
    ],
)
def test_a_fault_that_is_put_back_is_found(name: str, kind: str, first: int) -> None:
    """One of the 12 graphs from `first` on shows the fault.

    After changes of rules it may be another graph: `python -m tests.fuzz.graphs.faults NAME` finds it."""
    found = next(search([NAMES[name]], range(first, first + 12)))
    assert isinstance(found, Found), f"not found in {found} graphs"
    assert kind in found.kind


@pytest.mark.parametrize("fault", FAULTS, ids=list(NAMES))
def test_a_fault_is_there_and_gone_again(fault: Fault) -> None:
    def now() -> list[Any]:
        return [getattr(place, attribute) for place, attribute, _ in fault.changes]

    before, changed = now(), [changed for *_, changed in fault.changes]
    assert changed
    with fault.put_back():
        assert all(a is b for a, b in zip(now(), changed, strict=True))
        assert not any(a is b for a, b in zip(now(), before, strict=True))
    assert all(a is b for a, b in zip(now(), before, strict=True))


def test_a_fault_without_effect_is_not_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = Fault("nothing", "It changes nothing.", ())
    assert list(search([nothing], range(30_000, 30_004))) == [4]
    monkeypatch.setattr(faults, "FAULTS", (nothing,))
    assert faults.main(["--first", "30000", "--count", "1"])
    assert capsys.readouterr().out == "nothing: not found in 1 graphs\n"


def test_the_first_graph_that_shows_a_fault_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of another target are counted, but not checked."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ModelError("is refused")

    monkeypatch.setattr(faults, "target_of", lambda seed: own() if seed > 30_000 else "another")
    everything = Fault(
        "everything", "Every model is refused.", ((lathe.core.compiler.compile, "describe_model", refuse),)
    )
    found, count = search([everything], range(30_000, 30_004))
    assert isinstance(found, Found)
    assert (found.seed, found.after, count) == (30_001, 2, 2)
    assert found.kind.startswith("refused: ModelError")


@pytest.mark.parametrize("size", [False, True], ids=["sum", "size"])
def test_rows_of_unknown_rank_count_as_none_while_the_fault_is_there(size: bool) -> None:
    """The model adds the sum or the size of x to x; x passes an If whose branches have different ranks."""
    branches = [
        helper.make_graph([node], f"branch{i}", [], [helper.make_tensor_value_info(node.output[0], 1, None)])
        for i, node in enumerate(
            [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Reshape", ["x", "flat"], ["b"])]
        )
    ]
    turned = helper.make_node("Neg", ["v"], ["w"])
    total = helper.make_node("ReduceSum", ["w"], ["s"], keepdims=0)
    nodes = [
        helper.make_node("ReduceL1", ["many"], ["one"], keepdims=0),
        helper.make_node("Greater", ["one", "none"], ["flag"]),
        helper.make_node("If", ["flag"], ["v"], then_branch=branches[0], else_branch=branches[1]),
        *([helper.make_node("Size", ["v"], ["s"])] if size else [turned, total]),
        helper.make_node("Cast", ["s"], ["t"], to=1),
        helper.make_node("Reshape", ["t", "single"], ["u"]),
        helper.make_node("Add", ["x", "u"], ["y"]),
    ]
    ports = [[helper.make_tensor_value_info(name, 1, ["N", 3])] for name in "xy"]
    constants = {
        "many": np.ones(UNKNOWN, np.float32),
        "none": np.float32(0),
        "flat": np.array([-1]),
        "single": np.array([1]),
    }
    weights = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ports, weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    graph = lathe.load(model.SerializeToString())
    alone = {True: "of Shape and Size alone", False: "of elementwise operators alone"}
    assert not rows(graph).batchable
    for name in ("rows of values of unknown rank", f"rows of values of unknown rank, {alone[size]}"):
        with NAMES[name].put_back():
            assert rows(graph).batchable
    with NAMES[f"rows of values of unknown rank, {alone[not size]}"].put_back():
        assert not rows(graph).batchable
