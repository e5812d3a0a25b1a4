"""Random ONNX graphs agree with the oracles; disagreements are found, stored and minimised."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from lathe.core.errors import FeedError
from tests.fuzz.graphs import campaign, coverage, minimise
from tests.fuzz.graphs.batching import Differs, check_batching
from tests.fuzz.graphs.check import Outcome, check, confirmed, difference, symptom, tolerance
from tests.fuzz.graphs.generate import Case, make
from tests.fuzz.graphs.state import State

MANY = 50  # graphs for each test: a process of its own for each target


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 500, MANY))
def test_graphs_agree(first: int, tmp_path: Path) -> None:
    state = State(tmp_path)
    campaign.run(range(first, first + MANY), 1, state, scripts=False)
    state.close()
    assert len(state.seeds) == MANY
    assert not state.findings, state
    assert state.outcomes["excluded"] <= 1, state


def test_a_seed_always_makes_the_same_graph() -> None:
    seeds = range(100, 106)
    first, again = ([make(seed) for seed in seeds] for _ in range(2))
    models = [made.model.SerializeToString() for made in first]
    assert models == [made.model.SerializeToString() for made in again]
    assert [made.config for made in first] == [made.config for made in again]
    assert len(set(models)) == len(models)


@pytest.mark.slow
def test_graphs_are_valid_and_varied() -> None:
    made = [make(seed) for seed in range(80)]
    models = [each.model for each in made]
    typed = [m for m in models if all(port.type.tensor_type.HasField("shape") for port in m.graph.output)]
    assert len(typed) > 3
    for model in typed:  # the checker requires shapes of outputs, and outputs of unknown rank have none
        onnx.checker.check_model(model)
    kinds = Counter(kind for each in made for _, _, kind in each.kinds)
    assert min(kinds[kind] for kind in coverage.KINDS) > 5, kinds
    assert len({each.model.opset_import[0].version for each in made}) > 12
    assert len({op for each in made for op, _, _ in each.kinds}) > 80
    assert {node.op_type for each in made for node in each.model.graph.node} >= {"If", "Loop", "Scan"}


def agreeing() -> tuple[onnx.ModelProto, list[Case]]:
    """A model whose cases have correct outputs, with these cases."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Tanh", ["x"], ["y"]), onnx.helper.make_node("ArgMax", ["y"], ["z"], axis=1)],
        "right",
        [onnx.helper.make_tensor_value_info("x", 1, ["N", 3])],
        [onnx.helper.make_tensor_value_info("y", 1, None), onnx.helper.make_tensor_value_info("z", 7, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    y = np.tanh(x)
    arrays = {"y": y, "z": y.argmax(1)[:, None]}
    return model, [Case(4, {"x": x}, arrays, arrays)]


@pytest.mark.parametrize(
    ("name", "array", "kind"),
    [
        ("y", np.zeros((4, 3), np.float32), "differs: values"),
        ("z", np.full((4, 1), 3), "differs: values"),
        ("y", np.zeros((3, 3), np.float32), "differs: shape"),
        ("z", np.zeros((4, 1), np.int32), "differs: type"),
    ],
)
def test_a_wrong_result_is_noticed(name: str, array: np.ndarray, kind: str) -> None:
    model, cases = agreeing()
    config = make(0).config
    assert check(model, cases, config).kind == "agrees"
    arrays = {**cases[0].expected, name: array}
    wrong = replace(cases[0], expected=arrays, shadows=arrays)
    assert check(model, [wrong], config).kind == kind
    assert confirmed(model, [wrong])[1].startswith("ONNX Runtime contradicts itself")


def test_a_tolerance_grows_with_the_effect_of_small_changes() -> None:
    want = np.array([1.0, -2.0], np.float32)
    assert difference(want + np.float32(1e-4), want, want) == ""
    assert difference(want + np.float32(1e-3), want, want).startswith("values: 2 of 2")
    assert difference(want + np.float32(1e-3), want, want + np.float32(1e-4)) == ""
    assert difference(np.array([1, np.nan], np.float32), want, want).startswith("values: 1 of 2")


class Rows:
    """A fake session whose rows depend on the number of rows, or on the previous row."""

    inputs, defaults = ("x",), ()

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = feeds["x"]
        before = np.roll(x, 1, 0)
        more = {"count": len(x), "neighbour": before, "none": 0}[self.kind]
        return {"y": (x + more).astype(np.float32)}


@pytest.mark.parametrize(("kind", "found"), [("count", "alone"), ("neighbour", "in another order")])
def test_dependent_rows_are_noticed(kind: str, found: str) -> None:
    _, (case,) = agreeing()
    for session in (Rows("none"), Rows(kind)):
        case = replace(case, shadows=session.run(case.feeds))
        with nullcontext() if session.kind == "none" else pytest.raises(Differs) as caught:
            check_batching(session, [case], tolerance)  # type: ignore[arg-type]
    assert caught.value.kind == found


@pytest.mark.slow
def test_every_way_to_fail_is_noticed_and_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seeds that crash, exit and raise, in place of the real worker; another campaign reads the stored results."""
    monkeypatch.setattr(campaign, "WORKER", "tests.fuzz.graphs.faulty")
    monkeypatch.setattr("tests.fuzz.graphs.config.TARGETS", ("",))
    state = State(tmp_path)
    campaign.run(range(6), 1, state, scripts=False)
    state.close()
    assert state.seeds == set(range(6))
    assert state.outcomes == {"agrees": 2, "disagrees": 3, "excluded": 1}
    ends = ["KeyError: 'lost'", "SIGSEGV", "exit 7"]
    assert sorted(state.findings) == [f"ends (checks): {how}" for how in ends]
    assert state.reasons == {"ONNX Runtime ends the process (SIGSEGV)": 1}
    again = State(tmp_path)
    assert again.seeds == state.seeds and again.findings == state.findings
    campaign.run(range(8), 1, again, scripts=False)
    again.close()
    assert again.outcomes["agrees"] == 4


def test_a_disagreement_is_minimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the node that causes the symptom stays."""

    def wrong(model: onnx.ModelProto, *_: object) -> Outcome:
        return Outcome("differs: values" if any(n.op_type == "Concat" for n in model.graph.node) else "agrees")

    monkeypatch.setattr(minimise, "check", wrong)
    drawn = (make(seed) for seed in range(50))
    made = next(each for each in drawn if "Concat" in {node.op_type for node in each.model.graph.node})
    trial, kind, _ = minimise.smallest(made)
    assert kind == "differs: values"
    assert [node.op_type for node in trial.model.graph.node if node.op_type != "Constant"] == ["Concat"]


def test_a_symptom_is_the_same_for_the_same_fault() -> None:
    errors = [FeedError(f"node 'v{n}' (Slice) gave shape [{n}, 3]") for n in (1, 2)]
    assert len({symptom(error) for error in errors}) == 1
    assert symptom(errors[0]).startswith("refused: FeedError")
    assert symptom(TypeError("1")).startswith("raises: TypeError")


def test_more_seeds_aim_at_an_empty_cell(tmp_path: Path) -> None:
    aims = coverage.aims()
    state, (op, index, kind) = State(tmp_path), aims[7]
    reached = {":".join(map(str, cell)): 1 for cell in aims if cell != (op, index, kind)}
    state.add({"seed": 0, "kind": "agrees", "kinds": reached})
    seeds = campaign.aimed_at_empty(state, 3)
    state.close()
    assert len(set(seeds)) == 3 and all(aims[seed % len(aims)] == (op, index, kind) for seed in seeds)
