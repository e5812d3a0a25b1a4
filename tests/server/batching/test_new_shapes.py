"""A request of a new shape: a child process compiles its code, and no other request waits for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.reference_runner import ReferenceRunner
from lathe.server.backends.graph import GraphModel
from tests.core.encoders import Encoder
from tests.server.backends.test_graph_backend import load
from tests.server.fakes import FakeModel, doubler
from tests.server.running import Running, infer_request, rows, serving, tensor_of, wait_for


def resampling_model() -> bytes:
    """Rows of any length, resampled to one element more.

    The kernel of a Resize with antialiasing needs known sizes, so there is no dynamic-shape code, not even for a
    part of the model: a new length must be compiled."""
    text = """
    <ir_version: 8, opset_import: ["": 18]> stretched (float[n,length] x) => (float[n,longer] y)
    <int64[1] one = {1}, int64[2] image = {1, 2}>
    {
        length = Shape <start = 1, end = 2> (x)
        longer = Add(length, one)
        wide = Unsqueeze(x, image)
        resized = Resize <mode = "linear", antialias = 1, axes = [3]> (wide, , , longer)
        y = Squeeze(resized, image)
    }
    """
    return bytes(onnx.parser.parse_model(text).SerializeToString())


def expected(x: np.ndarray) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(resampling_model()).run(None, {"x": x})[0])


class SlowChildren:
    """Holds child processes that compile for sessions back until `go_on`; `started` is set by the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.stop_waiting = threading.Event(), threading.Event()
        run_child = Background.run_child

        def waiting(background: Background, arguments: list[str], patient: bool) -> bool:
            self.started.set()
            assert self.stop_waiting.wait(60)
            return run_child(background, arguments)  # not in idle time, so that a busy machine does not delay it

        monkeypatch.setattr(Background, "run_child", waiting)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SlowChildren]:
    monkeypatch.setenv("LATHE_CACHE_DIR", str(tmp_path / "cache"))
    slow = SlowChildren(monkeypatch)
    yield slow
    slow.stop_waiting.set()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[GraphModel]:
    made = load(resampling_model(), tmp_path)
    yield made
    made.close()


def served(model: GraphModel) -> dict[str, FakeModel]:
    return {"softmax": FakeModel(model.execute, model.inputs, model.outputs), "doubler": doubler()}


def ask(running: Running, name: str, x: np.ndarray) -> np.ndarray:
    with running.connect() as raw:
        raw.send(infer_request(name, x))
        return tensor_of(raw.answer())


def test_a_new_shape_is_answered_while_its_code_is_compiled(children: SlowChildren, model: GraphModel) -> None:
    x = rows(2, 3) / 10
    with serving(served(model)) as running:
        np.testing.assert_allclose(ask(running, "softmax", x), expected(x), rtol=1e-5)
        assert children.started.wait(60)
        assert "being compiled" in model._session.explain()
        children.stop_waiting.set()
        assert model._session.settle(timeout=60)
        assert "being compiled" not in model._session.explain()
        np.testing.assert_allclose(ask(running, "softmax", x), expected(x), rtol=1e-5)


def test_dynamic_shape_code_answers_for_a_new_length(
    children: SlowChildren, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the references answered")

    monkeypatch.setattr(ReferenceRunner, "run", refuse)
    encoder = Encoder(layers=1)
    model, feeds = encoder.model().SerializeToString(), encoder.feeds(2, 9)
    children.stop_waiting.set()  # for the code that an upload compiles
    loaded = load(model, tmp_path)
    children.stop_waiting.clear()
    found = loaded.execute(feeds)
    assert "sequence=9: dynamic-shape code serves" in loaded._session.explain()
    for array, expected in zip(
        found.values(), onnxruntime.InferenceSession(model).run(list(found), feeds), strict=True
    ):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
    children.stop_waiting.set()
    loaded.close()


def test_other_models_are_answered_while_a_new_shape_waits_for_its_code(
    children: SlowChildren, model: GraphModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lathe.core.runtime.session.reference_runner.MAX_OPERATIONS", 0)
    x = rows(2, 3) / 10
    with serving(served(model)) as running, running.connect() as waiting:
        waiting.send(infer_request("softmax", x))
        assert children.started.wait(60)
        for _ in range(20):
            np.testing.assert_array_equal(ask(running, "doubler", rows(1)), 2 * rows(1))
        wait_for(lambda: "being compiled" in model._session.explain())
        children.stop_waiting.set()
        np.testing.assert_allclose(tensor_of(waiting.answer()), expected(x), rtol=1e-5)
