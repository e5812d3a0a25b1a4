"""Size inputs: numbers that a caller feeds and that decide extents, such as the size of a resized image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import lathe
from lathe import nn
from lathe.core.compiler.compile import compile_to
from lathe.core.compiler.options import make_options
from lathe.core.errors import FeedError, SessionClosed
from lathe.core.passes.proofs.size_inputs import size_inputs
from lathe.core.runtime.session import variants
from tests.onnx_runtime import plain_session


def parsed(inputs: str, body: str, outputs: str = "float[p,q,r,s] y", constants: str = "") -> bytes:
    text = f'<ir_version: 8, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {constants} {{ {body} }}'
    return bytes(onnx.parser.parse_model(text).SerializeToString())


RESIZED = parsed(
    "float[n,3,h,w] x, int64[2] size",
    """
    dims = Shape <start = 0, end = 2> (x)
    sizes = Concat <axis = 0> (dims, size)
    larger = Resize <mode = "linear"> (x, , , sizes)
    y = Relu(larger)
    """,
)
AS_FLOATS = parsed(  # as Segment Anything takes the size of the original image
    "float[n,1,h,w] x, float[2] size",
    """
    whole = Cast <to = 7> (size)
    dims = Shape <start = 0, end = 2> (x)
    sizes = Concat <axis = 0> (dims, whole)
    y = Resize <mode = "linear"> (x, , , sizes)
    """,
)


def feeds(height: int, width: int, rows: int = 1) -> dict[str, Any]:
    x = np.random.default_rng((rows, 5)).standard_normal((rows, 3, 8, 10)).astype(np.float32)
    return {"x": x, "size": np.array([height, width], np.int64)}


@pytest.fixture
def session() -> Iterator[lathe.Session]:
    with lathe.compile(lathe.load(RESIZED), threads=1, tune="off") as opened:
        yield opened


def check(session: lathe.Session, given: dict[str, Any], data: bytes = RESIZED) -> None:
    expected = plain_session(data).run(None, given)[0]
    np.testing.assert_allclose(session.run(given)["y"], expected, 1e-5, 1e-5)


def test_the_first_values_get_code_in_which_they_are_constants(session: lathe.Session) -> None:
    for rows in (1, 3, 1):
        check(session, feeds(16, 20, rows))
    explained = session.explain().partition("with size = [16, 20]:")[2]
    assert "Resize " in explained and "0 on the reference" in explained


def test_other_values_get_code_when_they_are_frequent(session: lathe.Session) -> None:
    check(session, feeds(16, 20))
    for _ in range(3):
        check(session, feeds(24, 30))
        assert "size = [24, 30]" not in session.explain()
    check(session, feeds(24, 30))
    assert "size = [24, 30]" in session.explain()


def test_equal_shapes_with_other_values_give_other_results(session: lathe.Session) -> None:
    for height, width in ((16, 20), (12, 15), (16, 20), (12, 15), (9, 31)) * 3:
        assert session.run(feeds(height, width))["y"].shape == (1, 3, height, width)
        check(session, feeds(height, width))


def test_sessions_in_use_keep_their_places(session: lathe.Session) -> None:
    """With more frequent sizes than places, the sessions of some sizes stay; none is compiled for each run."""
    for _ in range(5):
        for width in range(10, 22):
            check(session, feeds(9, width))
    made = dict(session._sized.sessions.cached_sessions())
    assert len(made) == 8
    for width in range(10, 22):
        check(session, feeds(9, width))
    assert session._sized.sessions.cached_sessions() == made


def test_frequent_sizes_replace_an_idle_session(monkeypatch: pytest.MonkeyPatch, session: lathe.Session) -> None:
    monkeypatch.setattr(variants, "_IDLE", 20)
    for width in range(10, 18):
        for _ in range(4):
            check(session, feeds(9, width))
    for _ in range(20):
        check(session, feeds(9, 30))
    explained = session.explain()
    assert "size = [9, 30]" in explained and "size = [9, 10]" not in explained and "size = [9, 17]" in explained


def test_a_profile_is_of_the_code_that_runs(session: lathe.Session) -> None:
    check(session, feeds(16, 20))
    assert "reference" not in session.profile(feeds(16, 20), runs=1).table()
    assert "reference" in session.profile(feeds(17, 20), runs=1).table()


def test_sizes_may_be_floats() -> None:
    x = np.random.default_rng(0).standard_normal((2, 1, 6, 7)).astype(np.float32)
    with lathe.compile(lathe.load(AS_FLOATS), threads=1, tune="off") as session:
        for size in ((12, 14), (9, 9), (12, 14)):
            check(session, {"x": x, "size": np.array(size, np.float32)}, AS_FLOATS)
        assert "with size = [12.0, 14.0]:" in session.explain()


@pytest.mark.parametrize("size", [(np.inf, 9), (1e30, 9), (2.0**62, 2.0**62), (2.0**44, 1)])
def test_sizes_of_results_larger_than_the_memory_are_refused(size: tuple[float, float]) -> None:
    x = np.zeros((1, 1, 6, 7), np.float32)
    with lathe.compile(lathe.load(AS_FLOATS), threads=1, tune="off") as session:
        with pytest.raises(FeedError):
            session.run({"x": x, "size": np.array(size, np.float32)})
        check(session, {"x": x, "size": np.array([12, 14], np.float32)}, AS_FLOATS)


def test_a_range_larger_than_the_memory_is_refused() -> None:
    body = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    whole = Range(zero, limit, one)
    numbers = Cast <to = 1> (whole)
    y = Add(x, numbers)
    """
    data = parsed("float[n,1] x, int64 limit", body, "float[p,q] y")
    x = np.zeros((1, 1), np.float32)
    with lathe.compile(lathe.load(data), threads=1, tune="off") as session:
        for limit in (1 << 42, 5, (1 << 63) - 1, 7):
            given = {"x": x, "limit": np.array(limit)}
            if limit < 10:
                check(session, given, data)
                continue
            with pytest.raises(FeedError):
                session.run(given)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (np.array([16], np.int64), "'size'"),
        (np.array([16, 20], np.int32), "'size'"),
        (np.array([-1, 20], np.int64), r"shape \[1, 3, -1, 20\]"),
        (np.zeros((40,), np.int64), "'size'"),
        ([16, 20, 3], "'size'"),
    ],
)
def test_wrong_sizes_are_refused(session: lathe.Session, size: Any, message: str) -> None:
    given = feeds(16, 20)
    for _ in range(2):  # the first values, and later ones
        with pytest.raises(FeedError, match=message):
            session.run({**given, "size": size})
        check(session, given)


def test_a_closed_session_refuses_further_values(session: lathe.Session) -> None:
    check(session, feeds(16, 20))
    session.close()
    with pytest.raises(SessionClosed):
        session.run(feeds(16, 20))


def test_artifacts_know_size_inputs(tmp_path: Path) -> None:
    path = tmp_path / "resized.lathe"
    compile_to(path, lathe.load(RESIZED), make_options(cache_dir=tmp_path, tune="off"))
    with lathe.load_compiled(path, cache_dir=tmp_path) as session:
        check(session, feeds(16, 20))
        assert "with size = [16, 20]:" in session.explain()


BODIES = {
    "a shape": ("float[n,4] x, int64[2] shape", "y = Reshape(x, shape)", {"shape"}),
    "ends of a range": (
        "int64 limit, int64 start",
        "one = Constant <value_int = 1> () y = Range(start, limit, one)",
        {"limit", "start"},
    ),
    "an end": ("float[n,4] x, int64[1] end", "zero = Constant <value_ints = [0]> () y = Slice(x, zero, end)", {"end"}),
    "places of rows": ("float[n,4] x, int64[3] rows", "y = Gather(x, rows)", set()),
    "a shape in a matrix": (
        "float[9,4] x, int64[1,2] shape",
        "flat = Constant <value_ints = [-1]> () s = Reshape(shape, flat) y = Expand(x, s)",
        set(),
    ),
    "data": ("float[n,4] x, float[4] b", "y = Add(x, b)", set()),
}


@pytest.mark.parametrize(("inputs", "body", "expected"), BODIES.values(), ids=BODIES)
def test_size_inputs_are_found(inputs: str, body: str, expected: set[str]) -> None:
    outputs = "int64[m] y" if "Range" in body else "float[p,q] y"
    assert set(size_inputs(lathe.load(parsed(inputs, body, outputs)))) == expected


def test_the_number_of_sizes_may_be_an_extent_itself() -> None:
    def function(x: nn.Tensor, lengths: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        rows = nn.tensor(0).op("Range", lengths.sum(), nn.tensor(1))
        ones = nn.tensor(1).expand(lengths.shape[0])
        counts = nn.tensor(0).expand(rows.shape[0]).op("ScatterND", lengths.unsqueeze(-1), ones, reduction="add")
        return x.op("Gather", rows, axis=0), counts

    graph = nn.trace(function, {"x": "float32[n,2]", "lengths": "int64[k]"}, ["y", "counts"])
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    with lathe.compile(graph, threads=1, tune="off") as session:
        found = session.run({"x": x, "lengths": np.array([2, 1, 3])})  # code for these values
    np.testing.assert_array_equal(found["y"], x[:6])
    np.testing.assert_array_equal(found["counts"], [0, 1, 1, 1, 0, 0])
