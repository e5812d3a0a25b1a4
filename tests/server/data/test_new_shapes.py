"""A request of a new shape: its code is compiled in a child process, and nobody else waits for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from core.runtime.background import Background
from core.runtime.general import General
from server.backends.graph import GraphModel
from tests.core.encoders import Encoder
from tests.server.data.fakes import FakeModel, doubler
from tests.server.data.running import Running, infer_request, rows, serving, tensor_of, wait_for
from tests.server.data.test_graph_backend import load


def stretched() -> bytes:
    """Rows of any length, resampled to one element more. The kernel of a Resize that smoothes needs known sizes, so
    there is no code for any sizes, not of a part of the model: a new length is compiled."""
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
    return np.asarray(onnxruntime.InferenceSession(stretched()).run(None, {"x": x})[0])


class SlowChildren:
    """Children of sessions wait for `go_on` before they compile; `started` tells of the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()
        run_child = Background.run_child

        def waiting(background: Background, arguments: list[str], patient: bool) -> bool:
            self.started.set()
            assert self.go_on.wait(60)
            return run_child(background, arguments)  # at once, however busy the machine is

        monkeypatch.setattr(Background, "run_child", waiting)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SlowChildren]:
    monkeypatch.setenv("LATHE_CACHE", str(tmp_path / "cache"))
    slow = SlowChildren(monkeypatch)
    yield slow
    slow.go_on.set()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[GraphModel]:
    made = load(stretched(), tmp_path)
    yield made
    made.close()


def served(model: GraphModel) -> dict[str, FakeModel]:
    return {"softmax": FakeModel(model.execute, model.inputs, model.outputs), "doubler": doubler()}


def ask(running: Running, name: str, x: np.ndarray) -> np.ndarray:
    with running.connect() as raw:
        raw.send(infer_request(name, x))
        return tensor_of(raw.answer())


def test_it_is_answered_while_its_code_is_compiled(children: SlowChildren, model: GraphModel) -> None:
    x = rows(2, 3) / 10
    with serving(served(model)) as running:
        np.testing.assert_allclose(ask(running, "softmax", x), expected(x), rtol=1e-5)
        assert children.started.wait(60)
        assert "being compiled" in model._session.explain()
        children.go_on.set()
        assert model._session.settle(timeout=60)
        assert "being compiled" not in model._session.explain()
        np.testing.assert_allclose(ask(running, "softmax", x), expected(x), rtol=1e-5)


def test_code_for_any_sizes_answers_for_a_new_length(
    children: SlowChildren, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the references answered")

    monkeypatch.setattr(General, "run", refuse)
    encoder = Encoder(layers=1)
    model, feeds = encoder.model().SerializeToString(), encoder.feeds(2, 9)
    children.go_on.set()  # for the code that an upload leaves
    loaded = load(model, tmp_path)
    children.go_on.clear()
    found = loaded.execute(feeds)
    assert "sequence=9: code for any sizes serves" in loaded._session.explain()
    for array, expected in zip(
        found.values(), onnxruntime.InferenceSession(model).run(list(found), feeds), strict=True
    ):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
    children.go_on.set()
    loaded.close()


def test_others_are_answered_even_when_it_has_to_wait(
    children: SlowChildren, model: GraphModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.runtime.general.MOST_WORK", 0)
    x = rows(2, 3) / 10
    with serving(served(model)) as running, running.connect() as waiting:
        waiting.send(infer_request("softmax", x))
        assert children.started.wait(60)
        for _ in range(20):
            np.testing.assert_array_equal(ask(running, "doubler", rows(1)), 2 * rows(1))
        wait_for(lambda: "being compiled" in model._session.explain())
        children.go_on.set()
        np.testing.assert_allclose(tensor_of(waiting.answer()), expected(x), rtol=1e-5)
