"""Packed code that answers for new lengths: what it says, when it does, and that the references have nothing to do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import core
from core import compiler
from core.children import main as child
from core.compiler import compile_to
from core.errors import SessionClosed
from core.options import make_options
from core.runtime.any_length import AnyLength
from core.runtime.background import Background
from core.runtime.general import General
from core.runtime.given import Binding, Given
from core.runtime.shapes import Made
from tests.core.encoders import Encoder, Feeds
from tests.core.runtime import graphs
from tests.server.data.test_padding import attention

ENCODER = Encoder(pools=("mean", "first"), layers=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(ENCODER.model().SerializeToString())
    return path


def opened(model: Path, **options: Any) -> core.Session:
    return core.compile(model, **{"threads": 1, "tune": "off", "cache_dir": model.parent / "cache", **options})


def theirs(model: onnx.ModelProto, feeds: Feeds) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].flags.c_contiguous
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def held_up(session: core.Session) -> None:
    """Let the background make no code for a length; what stands in is made as ever."""

    def waits(binding: Binding, background: Background) -> Made:
        while not background.closed:
            time.sleep(0.01)
        raise SessionClosed("the session is closed")

    session._shapes._maker = replace(session._shapes._maker, later=(waits, waits))


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the references answered")

    monkeypatch.setattr(General, "run", refuse)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize(
    "encoder",
    [
        ENCODER,
        Encoder(positions="mask", pools=("first",), layers=1),
        Encoder(positions="rotary", pools=("max", "min"), layers=1),
        Encoder(causal="trilu", pools=("last",), layers=1),
        Encoder(pools=(), layers=1),
    ],
    ids=str,
)
def test_packed_code_answers_for_new_lengths(encoder: Encoder) -> None:
    model = encoder.model()
    with core.compile(model.SerializeToString(), threads=1, tune="off") as session:
        held_up(session)
        for rows, length in ((1, 7), (3, 7), (2, 1), (1, 128), (20, 120)):  # the last has more tokens than a run takes
            feeds = encoder.feeds(rows, length)
            agree(session.run(feeds), theirs(model, feeds))
        assert not session._shapes.made()
        assert "=7: being compiled; packed code serves meanwhile" in session.explain()


def test_a_length_with_code_of_its_own_is_answered_by_that(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = theirs(ENCODER.model(), ENCODER.feeds(4, 9))
    with opened(model) as session:
        agree(session.run(ENCODER.feeds(4, 9)), expected)
        assert session.settle(timeout=60)
        assert "sequence=9: compiled without measuring" in session.explain()

        def refuse(*_: Any) -> Any:
            raise AssertionError("packed code answered")

        monkeypatch.setattr(AnyLength, "run", refuse)
        agree(session.run(ENCODER.feeds(4, 9)), expected)


@pytest.mark.usefixtures("no_reference")
def test_what_is_at_hand_is_not_compiled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model) as session:
        session.run(ENCODER.feeds(1, 5))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled again")

    with opened(model, new_shapes="background") as session:
        held_up(session)
        monkeypatch.setattr(compiler, "build", refuse)
        monkeypatch.setattr(Background, "submit", lambda self, work: None)
        agree(session.run(ENCODER.feeds(1, 6)), theirs(ENCODER.model(), ENCODER.feeds(1, 6)))


def test_a_child_compiles_what_nobody_is_to_wait_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model, new_shapes="background") as session:

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("compiled in the process that answers")

        monkeypatch.setattr(compiler, "build", refuse)
        agree(session.run(ENCODER.feeds(1, 6)), theirs(ENCODER.model(), ENCODER.feeds(1, 6)))
        assert session.settle(timeout=60)
        assert session._shapes._maker.general.quick  # type: ignore[union-attr]
        assert "=6: compiled without measuring" in session.explain()


def test_runs_wait_for_packed_code_that_is_being_made(model: Path) -> None:
    """One of them is answered by the references, and the others by packed code before their length has its own."""
    session = opened(model, new_shapes="background")
    held_up(session)
    feeds = ENCODER.feeds(2, 11)
    expected = theirs(ENCODER.model(), feeds)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(session.run, [feeds] * 8):
            agree(found, expected)
    assert session._shapes._maker.general.quick  # type: ignore[union-attr]
    assert not session._shapes.made()
    session.close()


def test_threads_meet_new_lengths_while_their_code_comes(model: Path) -> None:
    encoder = ENCODER.model()
    cases = [(feeds, theirs(encoder, feeds)) for feeds in (ENCODER.feeds(rows, 3 * rows) for rows in range(1, 9))]
    with opened(model, threads=2) as session:
        ended = time.monotonic() + 2

        def run(thread: int) -> int:
            runs = 0
            while time.monotonic() < ended:
                feeds, expected = cases[(thread + runs) % len(cases)]
                agree(session.run(feeds), expected)
                runs += 1
            return runs

        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(run, range(3)))


def test_what_cannot_be_made_leaves_the_references_to_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("core.packing.PackedRuns", fails)
    with opened(model, new_shapes="background") as session:
        held_up(session)
        agree(session.run(ENCODER.feeds(1, 4)), theirs(ENCODER.model(), ENCODER.feeds(1, 4)))
        while not session._shapes._maker.general.prepared:  # type: ignore[union-attr]
            time.sleep(0.01)
        agree(session.run(ENCODER.feeds(1, 4)), theirs(ENCODER.model(), ENCODER.feeds(1, 4)))
        assert "the general version serves meanwhile" in session.explain()


def test_packed_code_that_needs_the_references_does_not_stand_in(tmp_path: Path) -> None:
    """Products of six columns have no kernels."""
    with core.compile(attention(), threads=1, tune="off", cache_dir=tmp_path) as session:
        assert session.description.any_length
        session.run({"hidden": np.zeros((1, 4, 6), np.float32), "mask": np.ones((1, 4), np.int64)})
        general = session._shapes._maker.general
        assert isinstance(general, AnyLength) and general.prepared and not general.quick


def test_models_that_cannot_be_packed_have_the_references() -> None:
    session = core.compile(graphs.sequence(), threads=1)
    assert isinstance(session._shapes._maker.general, General) and not session.description.any_length
    session.close()


@pytest.mark.parametrize("options", [{"packing": 64}, {"new_shapes": "wait"}], ids=str)
def test_nothing_stands_in_where_there_is_nothing_to_stand_in_for(model: Path, options: dict[str, Any]) -> None:
    with opened(model, **options) as session:
        assert not isinstance(session._shapes._maker.general, AnyLength)
        agree(session.run(ENCODER.feeds(2, 8)), theirs(ENCODER.model(), ENCODER.feeds(2, 8)))


def test_an_empty_batch_has_nothing_to_be_packed(model: Path) -> None:
    with opened(model) as session:
        held_up(session)
        found = session.run({name: array[:0] for name, array in ENCODER.feeds(2, 8).items()})
        assert {array.shape[0] for array in found.values()} == {0}


def test_a_batch_that_is_bound_is_none_for_packed_code(model: Path) -> None:
    with opened(model) as session:
        session.run(ENCODER.feeds(1, 5))
        general = session._shapes._maker.general
        assert isinstance(general, AnyLength) and general.quick
        feeds = ENCODER.feeds(2, 5)
        found = general.run(Given(2, list(feeds.values()), (("batch", 2), ("sequence", 5))), lambda: False)
        assert found is not None
        agree(dict(zip(session.outputs, found, strict=True)), theirs(ENCODER.model(), feeds))


@pytest.mark.usefixtures("no_reference")
def test_an_artifact_knows_that_its_model_packs(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.lathe"
    compile_to(path, core.load(model), make_options(threads=1))
    with core.load_compiled(path, threads=1, cache_dir=tmp_path / "other", tune="off") as session:
        assert session.description.any_length
        held_up(session)
        agree(session.run(ENCODER.feeds(3, 10)), theirs(ENCODER.model(), ENCODER.feeds(3, 10)))


def test_kernels_of_packed_code_are_recorded(model: Path) -> None:
    with opened(model) as session:
        held_up(session)
        runs: list[Any] = []
        session.run(ENCODER.feeds(1, 12), runs.append)
        assert any("SegmentAttention" in run.op for run in runs)


@pytest.mark.usefixtures("no_reference")
def test_the_compile_stage_leaves_packed_code_in_the_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = model.parent, model.parent / "shared"
    assert child(["parse", str(model), str(folder / "ir")]) == 0
    options = ["--threads", "1", "--tune", "off", "--cache", str(cache)]
    assert child(["compile", str(folder / "ir"), str(folder / "out"), *options]) == 0

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "build", refuse)
    monkeypatch.setattr(Background, "submit", lambda self, work: None)
    path = folder / "out" / "model.lathe"
    with core.load_compiled(path, threads=1, cache_dir=cache, new_shapes="background") as session:
        session.prepare()
        assert session._shapes._maker.general.quick  # type: ignore[union-attr]
        agree(session.run(ENCODER.feeds(2, 13)), theirs(ENCODER.model(), ENCODER.feeds(2, 13)))
