"""Dynamic-shape code in parts: models of which some nodes have no dynamic-shape kernel."""

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

import lathe
from lathe.core.errors import FeedError, Interrupted
from lathe.core.runtime.session.dynamic_shapes import DynamicShapeCode
from lathe.core.runtime.session.partitioned import PartitionedRunner
from lathe.core.runtime.session.record import REFERENCE
from lathe.core.runtime.session.reference_runner import ReferenceRunner
from lathe.core.runtime.session.run_inputs import CodeBinding, is_dynamic
from lathe.core.runtime.session.runner import serves_none
from lathe.core.runtime.session.script import PART
from tests.core import partly_dynamic_models as partial
from tests.core import sessions
from tests.core.decoders import Decoder
from tests.core.sessions import opened
from tests.onnx_runtime import plain_session

SHAPES = [(2, 16), (1, 23), (3, 31), (1, 7), (2, 64), (5, 2), (1, 57)]
ENDING = {name: make for name, make in partial.MODELS.items() if name != "looped_on"}
IN_PARTS = {name: make for name, make in ENDING.items() if name != "lstm"}  # recurrent layers have kernels

agree = functools.partial(sessions.agree, tolerance=1e-4)

each_in_parts = pytest.mark.parametrize("name", list(IN_PARTS))


def code_of(session: lathe.Session) -> PartitionedRunner:
    general = session._shapes._maker.general
    assert isinstance(general, DynamicShapeCode)
    assert isinstance(general._code, PartitionedRunner)
    return general._code


def merged(decoder: Decoder, narrow: bool = False) -> onnx.ModelProto:
    """A decoder in each branch of an If, as Optimum writes it: one branch attends to a past, the other has none."""
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


@pytest.mark.sample(4)
@each_in_parts
@pytest.mark.parametrize("threads", [1, 2])
def test_one_code_for_all_lengths(name: str, threads: int, builds: list[CodeBinding]) -> None:
    model = IN_PARTS[name]()
    with opened(model, threads=threads) as session:
        for rows, length in SHAPES:
            for largest in (2.0, 3.0):  # some models branch on it
                agree(model, session, partial.feeds(rows, length, largest))
        code_of(session)
        assert session.settle(60)
    assert len(builds) == 1
    assert is_dynamic(builds[0])


def test_a_recurrent_layer_needs_no_separate_part(builds: list[CodeBinding]) -> None:
    model = partial.lstm()
    with opened(model) as session:
        for rows, length in SHAPES:
            agree(model, session, partial.feeds(rows, length))
        assert session.description.any_size
        assert not session.description.in_parts
    assert len(builds) == 1


@pytest.mark.sample(2, native=True)
@pytest.mark.parametrize("decoder", [Decoder(), Decoder(rotary=True, shared=2)], ids=["added", "rotary"])
def test_a_decoder_with_two_branches_token_by_token(
    decoder: Decoder, builds: list[CodeBinding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token waits for a compilation or runs on references alone; attention is fused in both branches."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the references answered")

    monkeypatch.setattr(ReferenceRunner, "run", refuse)
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


def test_a_data_dependent_extent_is_a_size_of_later_parts() -> None:
    with opened(partial.non_zero()) as session:
        session.run(partial.feeds(2, 9))
        last = [node for node in code_of(session)._script.nodes if node.op == PART][-1]
        assert "_" in str(last.outputs[0].type)


def test_nothing_to_compute_behind_a_node_is_answered() -> None:
    """All elements are zero, so NonZero returns an extent of 0; kernels need at least 1, so the references answer."""
    model = partial.non_zero()
    low = {"x": np.zeros((2, 5, partial.WIDTH), np.float32)}
    with opened(model) as session:
        agree(model, session, partial.feeds(2, 5))
        assert agree(model, session, low)["y"].shape == (0, partial.WIDTH)
        agree(model, session, partial.feeds(2, 5))


def test_a_frequent_shape_gets_specialised_code(builds: list[CodeBinding]) -> None:
    model, feeds = partial.pooled(), partial.feeds(2, 9)
    with opened(model) as session:
        for _ in range(30):
            agree(model, session, feeds)
        assert session.settle(60)
        agree(model, session, feeds)
        assert "length=9: compiled" in session.explain()
    assert [is_dynamic(binding) for binding in builds] == [True, False]


def test_a_frequent_shape_keeps_parts_that_leave_less_to_the_references(tmp_path: Path) -> None:
    """Behind NonZero, code for a shape would leave three nodes to references, the parts leave only NonZero."""
    model, path, feeds = partial.non_zero(), tmp_path / "model.onnx", partial.feeds(2, 9)
    path.write_bytes(model.SerializeToString())
    for _ in range(2):
        with lathe.compile(path, threads=1, cache_dir=tmp_path / "cache", tune="off") as session:
            for _ in range(20):
                agree(model, session, feeds)
                assert session.settle(60)
            parts = code_of(session)
            assert parts.reference_nodes < 3
            assert all(serves_none(runner) for runner in session._shapes.cached_runners().values())
            [known] = session._calls._calls.values()
            assert known.runner is parts


def test_sessions_that_wait_for_each_shape_have_no_parts(builds: list[CodeBinding]) -> None:
    model = partial.chosen()
    with opened(model, new_shapes="wait") as session:
        for length in (3, 5):
            agree(model, session, partial.feeds(2, length))
    assert not any(map(is_dynamic, builds))


# -- a runner like any other -------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@each_in_parts
def test_later_sessions_load_the_code_from_the_cache(name: str, tmp_path: Path, builds: list[CodeBinding]) -> None:
    model, path = IN_PARTS[name](), tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for _ in range(2):
        with lathe.compile(path, threads=1, cache_dir=tmp_path / "cache", tune="off") as session:
            for length in (3, 9):
                agree(model, session, partial.feeds(2, length))
            code_of(session)
        assert len(builds) == 1


def test_a_child_makes_the_code_in_the_background(tmp_path: Path, builds: list[CodeBinding]) -> None:
    model, path = partial.chosen(), tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    options: dict[str, Any] = {"threads": 1, "cache_dir": tmp_path / "cache", "tune": "off", "new_shapes": "background"}
    with lathe.compile(path, **options) as session:
        for length in range(2, 9):
            agree(model, session, partial.feeds(2, length))
        assert session.settle(120)
        agree(model, session, partial.feeds(2, 11))
        code_of(session)
    assert not builds


@pytest.fixture
def session() -> Iterator[lathe.Session]:
    with opened(partial.looped_on()) as session:
        yield session


def test_an_unbounded_loop_can_be_interrupted(session: lathe.Session) -> None:
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


def test_explain_lists_nodes_on_references() -> None:
    with opened(partial.pooled()) as session:
        session.run(partial.feeds(2, 5))
        text = session.explain()
    assert "2 parts, and references between them" in text
    assert "(LpPool) runs on the reference: no compiled kernel" in text


def test_new_lengths_in_many_threads() -> None:
    model = partial.shorter()
    oracle = plain_session(model.SerializeToString())

    def one(seed: int) -> None:
        feeds = partial.feeds(1 + seed % 3, 1 + seed % 17, 2.0 + seed % 2)
        [want] = oracle.run(None, feeds)
        np.testing.assert_allclose(session.run(feeds)["y"], want, rtol=1e-4, atol=1e-4)

    with opened(model) as session, ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))


def test_expensive_reference_work_uses_code_per_shape() -> None:
    with opened(partial.scanned()) as session:
        session.run(partial.feeds(1, 4))
        code = code_of(session)
        assert code.dynamic_call([1, 100]) is not None
        assert code.dynamic_call([1, 10_000_000]) is None


def test_arrays_of_a_wrong_declared_length_reach_no_kernel() -> None:
    """The model declares the shape of a branch's output; the code checks it before relying on it."""
    with opened(partial.chosen()) as session:
        feeds = partial.feeds(2, 6)
        session.run(feeds)
        call = code_of(session).dynamic_call([2, 7])  # a call for the wrong length
        assert call is not None
        with pytest.raises(lathe.errors.SessionClosed):
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


def test_a_closed_session_refuses_runs() -> None:
    session = opened(partial.pooled())
    session.run(partial.feeds(1, 4))
    session.close()
    with pytest.raises(lathe.errors.SessionClosed):
        session.run(partial.feeds(1, 4))
