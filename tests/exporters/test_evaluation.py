"""The evaluation of exported models: every possible result, on a model made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.runtime.session.session import Session
from tests.core.small_models import model, normal
from tests.exporters.corpus import examined
from tests.exporters.evaluation import difference, evaluate, evaluate_in_child

MIXED = model("float[n,4] x => float[n,4] y", "y = CumSum(x, zero)", "int64 zero = {0}")
PLAIN = model("float[n,4] x => float[n,4] y", "y = Tanh(x)")
FEEDS = [{"x": normal(3, 4)}, {"x": normal(1, 4)}]


def _kept(data: bytes, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("timed", [False, True])
def test_a_model_that_agrees(tmp_path: Path, timed: bool) -> None:
    found = evaluate("plain", _kept(PLAIN, tmp_path), FEEDS, timed=timed, packed=not timed)
    assert (found.result, found.batchable, found.independent, found.fallbacks) == ("agrees", True, True, [])
    assert len(found.ratios) == (len(FEEDS) if timed else 0)
    assert found.packable or timed or found.unpacked


def test_a_model_with_dependent_rows(tmp_path: Path) -> None:
    found = evaluate("mixed", _kept(MIXED, tmp_path), FEEDS)
    assert (found.result, found.batchable, found.independent) == ("agrees", False, False)
    assert "CumSum" in found.reason and found.notes[0].startswith("not batched: ")


def test_a_model_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Session.run

    def wrong(session: Session, feeds: Any, record: Any = None) -> dict[str, Any]:
        return {name: array * np.float32(1.01) for name, array in run(session, feeds).items()}

    monkeypatch.setattr(Session, "run", wrong)
    found = evaluate("wrong", _kept(PLAIN, tmp_path), FEEDS)
    assert found.result == "differs"
    assert found.notes[0] == "output 'y' for {'x': [1, 4]}: 1.0e-02 of the largest element"


def test_models_that_one_engine_refuses(tmp_path: Path) -> None:
    unknown = model("float[n,4] x => float[n,4] y", "y = Nonesuch(x)")
    assert evaluate("unknown", _kept(unknown, tmp_path), FEEDS).result == "ORT no"
    found = evaluate("plain", _kept(PLAIN, tmp_path), [{"x": normal(3, 5)}])
    assert found.result == "ORT no"


def test_evaluation_in_a_child_process(tmp_path: Path) -> None:
    _kept(PLAIN, tmp_path)
    for index, feeds in enumerate(FEEDS):
        np.savez(tmp_path / f"feeds-{index}.npz", **feeds)  # type: ignore[arg-type]
    here, there = evaluate(tmp_path.name, tmp_path / "model.onnx", FEEDS, packed=True), examined(tmp_path)
    assert (there.name, there.result, there.error, there.batchable, there.packable, there.notes) == (
        here.name, here.result, here.error, here.batchable, here.packable, here.notes,
    )  # fmt: skip


def test_a_child_that_takes_too_long_or_crashes(tmp_path: Path) -> None:
    assert evaluate_in_child("late", _kept(PLAIN, tmp_path), FEEDS, 0.01).result == "crashes"
    assert evaluate_in_child("missing", tmp_path / "nowhere.onnx", FEEDS, 60).result in ("crashes", "ORT no")


def test_differences() -> None:
    x = np.array([1.0, -2.0, np.inf], np.float32)
    assert difference(x, x) == (0.0, "")
    assert difference(np.array([1.0, -1.9, np.inf], np.float32), x)[0] == pytest.approx(0.05)
    assert difference(np.array([1.0, -2.0, 3.0], np.float32), x)[1]
    assert difference(x.astype(np.float64), x)[1] and difference(x[:2], x)[1]
    assert difference(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == (0.25, "")
    assert difference(np.array(["a"], object), np.array(["a"], object)) == (0.0, "")
    assert difference(np.array(["a"], object), np.array(["b"], object))[1]
    assert difference([{0: 0.5, 1: 1.0}], [{0: 0.6, 1: 1.0}])[0] == pytest.approx(0.1)
    assert difference([{0: 0.5, 1: 1.0}], [{0: 0.5, 2: 1.0}])[1] and difference([x], [x, x])[1]
    assert difference([x, x[:2]], [x, x[:2]]) == (0.0, "") and difference([x], [x[:2]])[1]
