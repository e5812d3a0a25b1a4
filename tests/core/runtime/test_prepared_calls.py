"""Repeated shapes: calls are prepared once, with the same checks as the first run."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.parser import parse_model

import lathe
from lathe.core.errors import FeedError, SessionClosed
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.runtime.host.memory import address_of
from lathe.core.runtime.host.run_context import Context, ContextPool
from tests.core.runtime import graphs

Feeds = dict[str, Any]


def model(graph: str) -> bytes:
    return parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {graph}').SerializeToString()


TWO = """(float[n,4] x, float[n,4] z) => (float[n,4] y, int64[n] best)
    { y = Add(x, z) best = ArgMax<axis = 1, keepdims = 0>(y) }"""
SQUARE = "(float[n,m] x) => (float[n,m] y) { y = Mul(x, x) }"


def session_of(graph: str, **options: Any) -> lathe.Session:
    return lathe.compile(lathe.load(model(graph)), threads=1, tune="off", **options)


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def is_prepared(session: lathe.Session, feeds: Feeds) -> bool:
    """True if these feeds take the prepared fast path, which then answers."""
    return session._calls.run(feeds) is not None


def test_the_second_run_of_a_shape_is_prepared() -> None:
    with session_of(TWO) as session:
        for rows in (1, 8, 0, 3, 8, 1):
            feeds = {"x": floats(rows, 4), "z": floats(rows, 4, seed=1)}
            for _ in range(3):
                got = session.run(feeds)
                np.testing.assert_array_equal(got["y"], feeds["x"] + feeds["z"], strict=True)
                np.testing.assert_array_equal(got["best"], got["y"].argmax(axis=1), strict=True)
                assert is_prepared(session, feeds)


def test_other_batch_sizes_take_the_fast_path_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(TWO) as session:
        session.run({"x": floats(2, 4), "z": floats(2, 4)})
        monkeypatch.setattr(session, "_bind", None)
        for rows in (1, 0, 5, 300, 2):
            feeds = {"x": floats(rows, 4), "z": floats(rows, 4, seed=1)}
            np.testing.assert_array_equal(session.run(feeds)["y"], feeds["x"] + feeds["z"], strict=True)


def test_shapes_of_several_symbols_are_prepared() -> None:
    with session_of(SQUARE, new_shapes="wait") as session:
        for shape in ((1, 5), (2, 5), (3, 7), (1, 5)):
            x = floats(*shape)
            for _ in range(3):
                np.testing.assert_array_equal(session.run({"x": x})["y"], x * x, strict=True)
            assert is_prepared(session, {"x": x})


def test_each_run_has_arrays_of_its_own() -> None:
    with session_of(TWO) as session:
        feeds = {"x": floats(2, 4), "z": floats(2, 4)}
        answers = [session.run(feeds)["y"] for _ in range(4)]
        kept = [answer.copy() for answer in answers]
        session.run({"x": floats(2, 4, seed=5), "z": floats(2, 4, seed=6)})
        for one, copy in zip(answers, kept, strict=True):
            np.testing.assert_array_equal(one, copy)
        assert len({address_of(answer) for answer in answers}) == 4


BAD: dict[str, tuple[Feeds, str]] = {
    "missing": ({"x": floats(2, 4)}, "input 'z' is missing"),
    "unknown": ({"x": floats(2, 4), "w": floats(2, 4)}, "unknown input 'w'"),
    "one too many": ({"x": floats(2, 4), "z": floats(2, 4), "w": 1}, "unknown input 'w'"),
    "dtype": ({"x": floats(2, 4), "z": np.zeros((2, 4))}, "input 'z' has dtype float64, expected float32"),
    "swapped bytes": ({"x": floats(2, 4), "z": floats(2, 4).astype(">f4")}, "input 'z' has dtype >f4"),
    "columns": ({"x": floats(2, 4), "z": floats(2, 5)}, r"input 'z' has shape \[2, 5\]"),
    "rows": ({"x": floats(2, 4), "z": floats(3, 4)}, "dimension n: expected 2 as in 'x', got 3 in 'z'"),
    "rank": ({"x": floats(2, 4), "z": floats(8)}, r"input 'z' has shape \[8\]"),
    "nothing": ({"x": floats(2, 4), "z": None}, "input 'z' has dtype object|input 'z' has shape"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_feeds_are_refused_after_good_ones(kind: str) -> None:
    feeds, message = BAD[kind]
    with session_of(TWO) as session:
        for _ in range(2):
            session.run({"x": floats(2, 4), "z": floats(2, 4)})
        with pytest.raises(FeedError, match=message):
            session.run(feeds)


class Own(np.ndarray[Any, Any]):
    """A subclass of ndarray."""


def test_other_forms_of_the_same_feeds_give_the_same(tmp_path: Path) -> None:
    x, z = floats(6, 4), floats(6, 4, seed=1)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    mapped[:] = x
    read_only = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    shifted = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    forms = {
        "fortran": np.asfortranarray(x), "strided": np.repeat(x, 2, axis=0)[::2], "backwards": x[::-1].copy()[::-1],
        "listed": [list(map(np.float32, row)) for row in x], "own kind": x.view(Own), "mapped": mapped,
        "read only": read_only, "shifted": shifted,
    }  # fmt: skip
    with session_of(TWO) as session:
        want = session.run({"x": x, "z": z})
        for name, form in forms.items():
            for _ in range(2):
                for key, got in session.run({"x": form, "z": z}).items():
                    np.testing.assert_array_equal(got, want[key], err_msg=name, strict=True)


def test_an_index_out_of_range_is_refused_as_in_the_first_run() -> None:
    with lathe.compile(graphs.lookup(), threads=1) as session:
        session.run({"ids": np.array([0, 1])})
        for _ in range(2):
            assert is_prepared(session, {"ids": np.array([0, 4])})
            with pytest.raises(FeedError, match=r"node '.*' \(Gather\): index out of range"):
                session.run({"ids": np.array([0, 5])})
        assert session.run({"ids": np.array([4, -5])})


def test_profiles_and_records_do_not_disturb() -> None:
    with session_of(TWO) as session:
        feeds = {"x": floats(2, 4), "z": floats(2, 4)}
        want = session.run(feeds)
        for _ in range(2):
            seen: list[Any] = []
            session.run(feeds, seen.append)
            assert seen
            session.profile(feeds, runs=2)
            other = {"x": floats(5, 4), "z": floats(5, 4)}
            np.testing.assert_array_equal(session.run(other)["y"], 2 * other["x"])
            for name, got in session.run(feeds).items():
                np.testing.assert_array_equal(got, want[name])


def test_out_of_memory_is_an_error_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(TWO) as session:
        feeds = {"x": floats(2, 4), "z": floats(2, 4)}
        session.run(feeds)
        session.run({"x": floats(3, 4), "z": floats(3, 4)})  # the context is set for other shapes now

        def none(self: Context, nbytes: int) -> None:
            raise MemoryError("there is none")

        monkeypatch.setattr(Context, "make_room", none)
        with pytest.raises(FeedError, match="a batch of 2 needs more memory than there is: there is none"):
            session.run(feeds)
        monkeypatch.undo()
        np.testing.assert_array_equal(session.run(feeds)["y"], 2 * feeds["x"])


def test_many_threads_with_many_shapes() -> None:
    with session_of(TWO) as session:

        def run(index: int) -> None:
            rows = index % 5
            feeds = {"x": floats(rows, 4, seed=index), "z": floats(rows, 4, seed=index + 1)}
            np.testing.assert_array_equal(session.run(feeds)["y"], feeds["x"] + feeds["z"])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, range(2000)))


def test_a_closed_session_refuses_shapes_that_it_knew() -> None:
    session = session_of(TWO)
    feeds = {"x": floats(2, 4), "z": floats(2, 4)}
    for _ in range(3):
        session.run(feeds)
    session.close()
    with pytest.raises(SessionClosed):
        session.run(feeds)


def test_code_of_a_dropped_shape_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.core.runtime.session.session._MAX_SHAPES", 2)
    with lathe.compile(graphs.sequence(), threads=1, tune="off", new_shapes="wait") as session:
        (first,) = session.run({"x": floats(1, 5, 8)}).values()
        (code,) = map(ref, session._shapes.cached_runners().values())
        for length in range(6, 12):  # enough lengths that even a repeated shape is dropped
            session.run({"x": floats(1, length, 8)})
        gc.collect()
        assert code() is None
        assert not is_prepared(session, {"x": floats(1, 5, 8)})
        np.testing.assert_array_equal(*session.run({"x": floats(1, 5, 8)}).values(), first)


def test_a_used_shape_is_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.core.runtime.session.session._MAX_SHAPES", 2)
    with lathe.compile(graphs.sequence(), threads=1, tune="off", new_shapes="wait") as session:
        for length in range(6, 12):
            session.run({"x": floats(1, 5, 8)})
            session.run({"x": floats(1, length, 8)})
            assert is_prepared(session, {"x": floats(1, 5, 8)}), length
        assert len(session._shapes.cached_runners()) == 2


def test_more_shapes_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.core.runtime.session.prepared_calls._MAX_CALLS", 3)
    with session_of(TWO) as session:
        for rows in [1, 2, 3, 4, 5, 1, 2] * 2:
            feeds = {"x": floats(rows, 4), "z": floats(rows, 4)}
            np.testing.assert_array_equal(session.run(feeds)["y"], 2 * feeds["x"])
            assert is_prepared(session, feeds)
            assert len(session._calls._calls) <= 3


def test_a_pool_closes_once_and_after_everything_is_returned() -> None:
    """Threads take and return objects while the pool closes; exactly one call learns that it was the last."""
    for _ in range(50):
        pool, ends, together = ContextPool(2), [], threading.Barrier(5)

        def work() -> None:
            together.wait()  # noqa: B023 (joined below)
            while True:
                try:
                    context = pool.take(lambda: object())  # type: ignore[arg-type, return-value]  # noqa: B023
                except SessionClosed:
                    return
                if pool.release(context):  # noqa: B023
                    ends.append(1)  # noqa: B023

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        together.wait()
        if pool.close():
            ends.append(1)
        for thread in threads:
            thread.join(30)
        assert ends == [1]
        assert not pool.idle and pool._count == 0
        assert not pool.close()


def test_an_unused_pool_ends_when_it_is_closed() -> None:
    pool = ContextPool(2)
    assert pool.close()
    assert not pool.close()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, np.float32), np.zeros((2, 0)), np.array(5), np.array(["a"], object), np.array(["ab"]),
        np.zeros((4, 4))[::2, 1:], np.frombuffer(b"12345678", np.uint8)[1:], np.zeros(2, ml_dtypes.bfloat16),
        np.zeros(2, [("a", "f4")]),
    ],
)  # fmt: skip
def test_the_address_of_any_array(array: np.ndarray[Any, Any]) -> None:
    assert address_of(array) == array.ctypes.data


LABELS = """(float[n,3] x) => (string[n] word, float[n,3] y)
    { y = Softmax(x) best = ArgMax<axis = 1, keepdims = 0>(x) word = Gather(words, best) }"""
WORDS = ["one", "two", "three"]


def labelled() -> bytes:
    graph = parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {LABELS}')
    graph.graph.initializer.append(helper.make_tensor("words", TensorProto.STRING, [3], WORDS))
    return graph.SerializeToString()


def test_strings_after_native_code() -> None:
    with lathe.compile(labelled(), threads=1, tune="off") as session:
        assert "1 on the reference" in session.explain()
        for rows in (3, 1, 0, 3, 8):
            x = floats(rows, 3, seed=rows)
            for _ in range(3):
                got = session.run({"x": x})
                assert got["word"].tolist() == [WORDS[place] for place in x.argmax(axis=1)]
                assert got["word"].dtype == object and got["word"].shape == (rows,)
                np.testing.assert_allclose(got["y"].sum(axis=1), np.ones(rows), 1e-5)
                assert is_prepared(session, {"x": x})
        seen: list[Any] = []
        session.run({"x": floats(3, 3)}, seen.append)
        assert [run.kernel for run in seen][-1] == "reference"


def test_strings_in_many_threads() -> None:
    with lathe.compile(labelled(), threads=1, tune="off") as session:

        def run(index: int) -> None:
            x = floats(index % 4, 3, seed=index)
            assert session.run({"x": x})["word"].tolist() == [WORDS[place] for place in x.argmax(axis=1)]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, range(2000)))


PICK = "(float[n,3] x, int64[n] at) => (string[n] word, float[n,3] y) { y = Exp(x) word = Gather(words, at) }"
TURNS = "(float[n,3] x, int64[n] at) => (string[n] word) { two = Add(at, at) word = Gather(words, two) }"


@pytest.mark.parametrize("graph", [PICK, TURNS])
def test_errors_of_fast_paths_are_explained_by_the_reference(graph: str) -> None:
    proto = parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {graph}')
    proto.graph.initializer.append(helper.make_tensor("words", TensorProto.STRING, [3], WORDS))
    with lathe.compile(proto.SerializeToString(), threads=1, tune="off") as session:
        good = {"x": floats(2, 3), "at": np.array([0, -1])}
        for _ in range(3):
            assert session.run(good)["word"].tolist() == ["one", "three" if graph == PICK else "two"]
            with pytest.raises(FeedError, match=r"index (14|7) is out of range"):
                session.run(good | {"at": np.array([7, 0])})


def test_string_operators_run_after_native_code() -> None:
    """A string lookup between native steps would split the native code into two parts."""
    proto = parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n,3] x) => (string[n] word, float[n,3] y)
        {
            best = ArgMax<axis = 1, keepdims = 0>(x) word = Gather(words, best)
            z = Softmax(x) y = Softmax<axis = 0>(z)
        }"""
    )
    proto.graph.initializer.append(helper.make_tensor("words", TensorProto.STRING, [3], WORDS))
    with lathe.compile(proto.SerializeToString(), threads=1, tune="off") as session:
        (code,) = session._shapes.cached_runners().values()
        assert len(code.shares[0].plan.schedule) == 2
        x = floats(4, 3)
        for _ in range(3):
            assert session.run({"x": x})["word"].tolist() == [WORDS[place] for place in x.argmax(axis=1)]


def test_a_reference_before_native_code_writes_into_the_output() -> None:
    """The reference runs before any native code has looked up the addresses of outputs for this run."""
    b = Builder(Graph("empty"))
    x = b.input("x", TensorType(DType.FLOAT32, (graphs.N, 0)))
    b.graph.outputs = [b("MatMul", x, b.constant(np.zeros((0, 3), np.float32)))]
    with lathe.compile(b.graph, threads=1, tune="off", optimize=False) as session:
        held = []
        for rows in (2, 3, 2, 2, 5, 3):
            held.append(session.run({"x": np.zeros((rows, 0), np.float32)})["matmul"])
            np.testing.assert_array_equal(held[-1], np.zeros((rows, 3)))
            held[-1][:] = 7


def test_quick_references_give_new_memory_of_the_declared_type() -> None:
    """The contract of `OpDef.quickly`: its results are returned to the caller without a copy."""
    data, places = np.array(WORDS, object), np.array([0, 2, 2])
    b = Builder(Graph("one"))
    read = [b.input("d", TensorType(DType.STRING, (3,))), b.input("i", TensorType(DType.INT64, (graphs.N,)))]
    (node,) = [b("Gather", *read).producer]
    assert node is not None
    quick = registry.get("Gather").quickly(registry.NodeView(registry.get("Gather"), node))
    assert quick is not None
    for index in (places, places[:0], np.array(1)):
        got, want = quick(data, index), np.take(data, index)
        assert type(got) is np.ndarray and got.dtype == object and got.shape == np.shape(index)
        assert got.tolist() == (want.tolist() if index.ndim else want)
        assert not np.may_share_memory(got, data)
