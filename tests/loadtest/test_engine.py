from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from loadtest import engine, zoo
from loadtest.model_builder import Feeds


def test_ahead_is_the_median_over_rounds_against_the_best_peer() -> None:
    rounds = [
        {"lathe": 1.0, "onnxruntime": 2.0, "openvino": 4.0},
        {"lathe": 1.0, "onnxruntime": 9.0, "openvino": 3.0},
        {"lathe": 2.0, "onnxruntime": 1.0, "openvino": 8.0},
    ]
    assert engine.ahead(rounds) == 2.0
    assert engine.ahead([{"lathe": 1.0}]) is None
    assert engine.ahead([{"onnxruntime": 1.0, "openvino": 1.0}]) is None


def test_an_engine_with_wrong_results_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: bytes, feeds: Feeds, threads: int) -> engine.Run:
        return lambda: np.zeros((len(feeds["x"]), 10), np.float32)

    monkeypatch.setitem(engine.ENGINES, "lathe", wrong)
    row = engine.measure("lenet", 2, ["lathe", "onnxruntime"], threads=1, rounds=2, seconds=0.01)
    assert row.wrong == ["lathe"]
    assert "lathe" not in row.ms
    assert row.ahead is None
    assert row.error["onnxruntime"] == 0


def test_a_wrong_shape_is_an_infinite_error() -> None:
    assert engine.relative_error(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)) == float("inf")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_zoo_models_accept_any_batch_and_depend_on_their_input(name: str) -> None:
    session = onnxruntime.InferenceSession(zoo.model(name).SerializeToString(), providers=["CPUExecutionProvider"])
    one, three = (session.run(None, zoo.feeds(name, rows))[0] for rows in (1, 3))
    assert one.shape == (1, *zoo.ZOO[name].output)
    assert three.shape == (3, *zoo.ZOO[name].output)
    assert np.isfinite(three).all()
    assert np.abs(three[0] - three[1]).max() > 1e-3
