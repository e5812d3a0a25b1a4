from __future__ import annotations

import numpy as np
import onnxruntime
import orjson
import pytest

from loadtest import zoo
from loadtest.version_oracle import Moves, Oracle, reference_outputs, variant
from loadtest.wire import Response


@pytest.fixture
def moves() -> Moves:
    """Version 1 first; the move to version 2 was called at 10 and acknowledged at 11."""
    made = Moves([1])
    made.start(2, 10.0)
    made.acknowledge(11.0)
    return made


@pytest.mark.parametrize(
    ("sent", "received", "allowed"),
    [
        (5, 6, {1}),  # ended before the move began
        (5, 10.5, {1, 2}),  # in flight when the move began
        (10.2, 10.4, {1, 2}),  # sent during the call
        (10.9, 12, {1, 2}),
        (11.1, 12, {2}),  # after the acknowledgement only the new version
    ],
)
def test_which_versions_may_answer(moves: Moves, sent: float, received: float, allowed: set[int]) -> None:
    assert moves.allowed(sent, received) == allowed


def test_an_unacknowledged_move_stays_open(moves: Moves) -> None:
    moves.start(1, 20.0)
    assert moves.allowed(25, 26) == {2, 1}


def test_a_slow_request_may_see_every_version_live_during_it(moves: Moves) -> None:
    moves.start(3, 12.0)
    moves.acknowledge(13.0)
    assert moves.allowed(5, 14) == {1, 2, 3}


def answer(version: int, value: float) -> Response:
    y = {"name": "y", "datatype": "FP32", "shape": [1], "data": [value]}
    return Response(200, {}, orjson.dumps({"model_name": "m", "model_version": str(version), "outputs": [y]}))


def test_the_oracle_refuses_old_versions_and_foreign_values(moves: Moves) -> None:
    def outputs(value: float) -> list[dict[str, np.ndarray]]:
        return [{"y": np.array([value], np.float32)}]

    oracle = Oracle(moves, {1: outputs(1.0), 2: outputs(2.0)})
    assert oracle.check(0, 12, 13, answer(2, 2.0)) is None
    assert "not live" in str(oracle.check(1, 12, 13, answer(1, 1.0)))
    assert "not what this version computes" in str(oracle.check(2, 12, 13, answer(2, 1.0)))
    assert oracle.seen == {2: 2, 1: 1}


def test_a_variants_outputs_differ_only_by_the_factor() -> None:
    base = zoo.model("mlp").SerializeToString()
    feeds = {"x": zoo.sample("mlp", 2)}

    def run(model: bytes) -> np.ndarray:
        return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)[0]

    changed = variant(base, 1.5)
    np.testing.assert_allclose(run(changed), run(base) * 1.5, rtol=1e-5)
    np.testing.assert_allclose(reference_outputs(changed, [feeds])[0]["y"], run(changed), rtol=1e-3, atol=1e-4)
