"""Code for any sizes in parts: models of which some nodes have no kernel for any sizes."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import core
from core.errors import FeedError, Interrupted
from core.runtime.any_size import AnySize
from core.runtime.general import General
from core.runtime.given import Sizes, is_any_size
from core.runtime.in_parts import PartsRunner
from core.runtime.record import REFERENCE
from core.runtime.script import PART
from tests.core import partial, sessions
from tests.core.decoders import Decoder
from tests.core.sessions import opened
from tests.onnx_runtime import plain_session

SHAPES = [(2, 16), (1, 23), (3, 31), (1, 7), (2, 64), (5, 2), (1, 57)]
ENDING = {name: make for name, make in partial.MODELS.items() if name != "looped_on"}
IN_PARTS = {name: make for name, make in ENDING.items() if name != "lstm"}  # recurrent layers have kernels

agree = functools.partial(sessions.agree, tolerance=1e-4)

each_in_parts = pytest.mark.parametrize("name", list(IN_PARTS))


def code_of(session: core.Session) -> PartsRunner:
    general = session._shapes._maker.general
    assert isinstance(general, AnySize)
    assert isinstance(general._code, PartsRunner)
    return general._code


def merged(decoder: Decoder, narrow: bool = False) -> onnx.ModelProto:
    """A decoder in each branch of an If, as Optimum writes them: one looks at a past, the other at the new tokens
    alone."""
    whole = decoder.model().graph
    names = [output.name for output in whole.output]
    info = helper.make_tensor_value_info

    def branch(prefix: str, past: bool) -> onnx.GraphProto:
        made = {name: f"{prefix}{name}" for node in whole.node for name in node.output}
        empty = {} if past else {name: f"{prefix}{name}" for name in decoder.pasts}
        nodes = [
            helper.make_node("Slice", [name, "nothing", "nothing", "tokens"], [new]) for name, new in empty.items()
        ]
        for node in whole.node:
            inputs = [(made | empty).get(name, name) for name in node.input]
            twin = helper.make_node(node.op_type, inputs, [made[name] for name in node.output], prefix + node.name)
            twin.attribute.extend(node.attribute)
            nodes.append(twin)
        return helper.make_graph(nodes, prefix, [], [info(made[name], TensorProto.FLOAT, None) for name in names])

    w = partial.Partial(0)
    w.constants = [*whole.initializer]
    for name, value in (("nothing", 0), ("tokens", 2)):
        w.constants.append(helper.make_tensor(name, TensorProto.INT64, [1], [value]))
    flag = "use_cache_branch"
    w.op("Squeeze", flag, name="cached")
    w.several("If", ["cached"], names, then_branch=branch("with_", True), else_branch=branch("without_", False))
    inputs = [*whole.input, info(flag, TensorProto.BOOL, [1])]
    graph = helper.make_graph(w.nodes, "merged", inputs, [*whole.output], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# -- right, and at once ------------------------------------------------------------------------------------------------


@each_in_parts
@pytest.mark.parametrize("threads", [1, 2])
def test_one_code_for_all_lengths(name: str, threads: int, builds: list[Sizes]) -> None:
    model = IN_PARTS[name]()
    with opened(model, threads=threads) as session:
        for rows, length in SHAPES:
            for largest in (2.0, 3.0):  # some models branch on it
                agree(model, session, partial.feeds(rows, length, largest))
        code_of(session)
        assert session.settle(60)
    assert len(builds) == 1
    assert is_any_size(builds[0])


def test_a_recurrent_layer_is_part_of_whole_code(builds: list[Sizes]) -> None:
    model = partial.lstm()
    with opened(model) as session:
        for rows, length in SHAPES:
            agree(model, session, partial.feeds(rows, length))
        assert session.description.any_size
        assert not session.description.in_parts
    assert len(builds) == 1


@pytest.mark.parametrize("decoder", [Decoder(), Decoder(rotary=True, shared=2)], ids=["added", "rotary"])
def test_a_decoder_with_two_branches_token_by_token(
    decoder: Decoder, builds: list[Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token waits for a compilation, nor is answered by references alone; attention of both branches is fused."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the references answered")

    monkeypatch.setattr(General, "run", refuse)
    model, runs = merged(decoder), 500
    oracle = plain_session(model.SerializeToString())
    with opened(model) as session:
        feeds = decoder.feeds(1, 12, 0) | {"use_cache_branch": np.array([False])}
        for token in range(runs):
            answers = session.run(feeds)
            if token % 50 < 2:
                for want, got in zip(oracle.run(None, feeds), answers.values(), strict=True):
                    np.testing.assert_allclose(got, want, rtol=3e-4, atol=3e-4)
            kept = {name: answers[name.replace("past", "present")] for name in decoder.pasts}
            after = decoder.after(feeds, answers)
            feeds = {"ids": after["ids"], "mask": after["mask"], "use_cache_branch": np.array([True])} | kept
        assert session.explain().count("FusedAttention") == 2 * decoder.layers
        assert session.settle(60)
    assert len(builds) == 1


def test_what_a_run_shows_is_a_size_of_the_parts_behind_it() -> None:
    with opened(partial.non_zero()) as session:
        session.run(partial.feeds(2, 9))
        last = [node for node in code_of(session)._script.nodes if node.op == PART][-1]
        assert "_" in str(last.outputs[0].type)


def test_nothing_to_compute_behind_a_node_is_answered() -> None:
    """No element is not zero: kernels are for extents of at least one, so the references answer."""
    model = partial.non_zero()
    low = {"x": np.zeros((2, 5, partial.WIDTH), np.float32)}
    with opened(model) as session:
        agree(model, session, partial.feeds(2, 5))
        assert agree(model, session, low)["y"].shape == (0, partial.WIDTH)
        agree(model, session, partial.feeds(2, 5))


def test_a_shape_that_comes_often_gets_code_of_its_own(builds: list[Sizes]) -> None:
    model, feeds = partial.pooled(), partial.feeds(2, 9)
    with opened(model) as session:
        for _ in range(30):
            agree(model, session, feeds)
        assert session.settle(60)
        agree(model, session, feeds)
        assert "length=9: compiled" in session.explain()
    assert [is_any_size(binding) for binding in builds] == [True, False]


def test_sessions_that_wait_for_each_shape_have_no_parts(builds: list[Sizes]) -> None:
    model = partial.chosen()
    with opened(model, new_shapes="wait") as session:
        for length in (3, 5):
            agree(model, session, partial.feeds(2, length))
    assert not any(map(is_any_size, builds))


# -- a runner like any other -------------------------------------------------------------------------------------------


@each_in_parts
def test_later_sessions_find_the_code(name: str, tmp_path: Path, builds: list[Sizes]) -> None:
    model, path = IN_PARTS[name](), tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for _ in range(2):
        with core.compile(path, threads=1, cache_dir=tmp_path / "cache", tune="off") as session:
            for length in (3, 9):
                agree(model, session, partial.feeds(2, length))
            code_of(session)
        assert len(builds) == 1


def test_a_child_makes_the_code_in_the_background(tmp_path: Path, builds: list[Sizes]) -> None:
    model, path = partial.chosen(), tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    options: dict[str, Any] = {"threads": 1, "cache_dir": tmp_path / "cache", "tune": "off", "new_shapes": "background"}
    with core.compile(path, **options) as session:
        for length in range(2, 9):
            agree(model, session, partial.feeds(2, length))
        assert session.settle(120)
        agree(model, session, partial.feeds(2, 11))
        code_of(session)
    assert not builds


@pytest.fixture
def session() -> Iterator[core.Session]:
    with opened(partial.looped_on()) as session:
        yield session


def test_a_loop_that_data_may_keep_going_is_broken_off(session: core.Session) -> None:
    assert session.may_not_end
    endless = {"x": np.full((2, 4, partial.WIDTH), 3.0, np.float32)}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(session.run, endless)
        until = time.monotonic() + 60
        while not session.runs():
            assert time.monotonic() < until
            assert not running.done(), running.exception()
            time.sleep(0.01)
        [number] = session.runs().values()
        session.interrupt(number + 1)
        time.sleep(0.02)
        assert not running.done()
        session.interrupt(number)
        with pytest.raises(Interrupted):
            running.result(30)
    assert not session.runs()


def test_runs_are_recorded() -> None:
    found: list[Any] = []
    with opened(partial.pooled()) as session:
        session.run(partial.feeds(2, 5))
        session.run(partial.feeds(2, 6), record=found.append)
    assert {"LpPool", "Softmax"} <= {run.op for run in found}
    assert [run.op for run in found if run.kernel == REFERENCE] == ["LpPool"]
    assert all(run.began <= run.ended for run in found)
    assert [run.began for run in found] == sorted(run.began for run in found)


def test_results_are_arrays_of_the_caller(tmp_path: Path) -> None:
    """No output is an input, a constant, or another output."""
    w = partial.Partial(1)
    w.op("LpPool", w.linear("x"), kernel_shape=[3], pads=[1, 1], name="y")
    w.op("Identity", "x", name="same")
    w.op("Reshape", "y", w.op("Shape", "x"), name="viewed")
    w.op("Identity", w.weight(3, 3), name="kept")
    model = w.model()
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("same", "viewed", "kept")
    )
    feeds = partial.feeds(2, 5)
    with opened(model) as session:
        first = agree(model, session, feeds)
        code_of(session)
        for array in (feeds["x"], *first.values()):
            array += 1.0
        arrays = [feeds["x"], *first.values()]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
        agree(model, session, feeds)


def test_explain_says_what_runs_on_references() -> None:
    with opened(partial.pooled()) as session:
        session.run(partial.feeds(2, 5))
        text = session.explain()
    assert "2 parts, and references between them" in text
    assert "(LpPool) runs on the reference: no compiled kernel" in text


def test_threads_meet_new_lengths() -> None:
    model = partial.shorter()
    oracle = plain_session(model.SerializeToString())

    def one(seed: int) -> None:
        feeds = partial.feeds(1 + seed % 3, 1 + seed % 17, 2.0 + seed % 2)
        [want] = oracle.run(None, feeds)
        np.testing.assert_allclose(session.run(feeds)["y"], want, rtol=1e-4, atol=1e-4)

    with opened(model) as session, ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))


def test_much_work_of_references_is_left_to_code_of_the_shape() -> None:
    with opened(partial.scanned()) as session:
        session.run(partial.feeds(1, 4))
        code = code_of(session)
        assert code.sized([1, 100]) is not None
        assert code.sized([1, 10_000_000]) is None


def test_arrays_that_are_not_as_long_as_their_types_say_reach_no_kernel() -> None:
    """The model declares what a branch gives; the code relies on it only where it holds."""
    with opened(partial.chosen()) as session:
        feeds = partial.feeds(2, 6)
        session.run(feeds)
        call = code_of(session).sized([2, 7])  # by mistake
        assert call is not None
        with pytest.raises(core.errors.SessionClosed):
            call([feeds["x"]])


def test_data_that_a_node_refuses_are_an_error() -> None:
    w = partial.Partial(2)
    hot = w.op("LpPool", w.linear("x"), kernel_shape=[3], pads=[1, 1])
    wide = w.op("Reshape", w.linear(hot), w.ints(-1, 7 * partial.WIDTH))
    w.op("Relu", w.op("Hardmax", wide, axis=1), name="y")
    with opened(w.model()) as session:
        assert session.run(partial.feeds(2, 7))["y"].shape == (2, 7 * partial.WIDTH)
        with pytest.raises(FeedError):
            session.run(partial.feeds(2, 5))
        assert session.run(partial.feeds(1, 7))["y"].shape == (1, 7 * partial.WIDTH)


def test_a_closed_session_runs_no_more() -> None:
    session = opened(partial.pooled())
    session.run(partial.feeds(1, 4))
    session.close()
    with pytest.raises(core.errors.SessionClosed):
        session.run(partial.feeds(1, 4))
