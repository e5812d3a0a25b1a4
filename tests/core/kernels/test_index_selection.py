"""Operators that select by index (triangles, diagonals), for known and dynamic sizes, against ONNX Runtime.

No node runs on the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from tests.core.small_models import assert_like_onnx_runtime, model, normal

SIZES = [(1, 5, 7), (3, 7, 4), (2, 1, 1), (0, 3, 5), (2, 0, 3), (1, 33, 65)]


def has_kernels(data: bytes, feeds: dict[str, Any]) -> bool:
    with lathe.compile(data, threads=1, tune="off") as session:
        session.run(feeds)
        return "FALLBACK" not in session.explain()


def numbers(kind: str, *shape: int) -> Any:
    found = np.random.default_rng(1).integers(0, 2 if kind == "bool" else 100, shape)
    return found.astype({"float": "float32", "double": "float64"}.get(kind, kind))


@pytest.mark.sample(5)
@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("diagonal", [None, -3, 0, 2, 2**40, -(2**40)])
@pytest.mark.parametrize("kind", ["float", "double", "int64", "bool"])
def test_triangles(upper: int, diagonal: int | None, kind: str) -> None:
    given, constants = ("x", "") if diagonal is None else ("x, k", f"int64 k = {{{diagonal}}}")
    data = model(f"{kind}[N,R,C] x => {kind}[N,R,C] y", f"y = Trilu <upper = {upper}> ({given})", constants)
    feeds = [{"x": numbers(kind, *sizes)} for sizes in SIZES]
    assert_like_onnx_runtime(data, *feeds)
    assert has_kernels(data, feeds[0])


@pytest.mark.parametrize("sizes", ["N,3,5,7", "N,3,H,W"])
@pytest.mark.sample(2)
def test_a_diagonal_given_at_run_time(sizes: str) -> None:
    data = model(f"float[{sizes}] x, int64 k => float[{sizes}] y", "y = Trilu (x, k)")
    feeds = [{"x": normal(2, 3, 5, 7), "k": np.array(k)} for k in (-9, -2, 0, 3, 7)]
    assert_like_onnx_runtime(data, *feeds)
    assert has_kernels(data, feeds[0])
    with lathe.compile(data, threads=1, tune="off") as session:
        far = session.run({"x": feeds[0]["x"], "k": np.array(2**40)})["y"]
    np.testing.assert_array_equal(far, np.zeros_like(far))


def test_triangles_of_rows_are_not_batched() -> None:
    """The elements that a row keeps depend on its index."""
    with lathe.compile(model("float[N,4] x => float[N,4] y", "y = Trilu (x)"), threads=1, tune="off") as session:
        assert not session.batching.batchable
    with lathe.compile(model("float[N,4,4] x => float[N,4,4] y", "y = Trilu (x)"), threads=1, tune="off") as session:
        assert session.batching.batchable


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("sizes", ["N,R,C", "N,5,7"])
def test_hardmax_marks_the_greatest(axis: int, sizes: str) -> None:
    """The first one of equal elements."""
    data = model(f"float[{sizes}] x => float[{sizes}] y", f"y = Hardmax <axis = {axis}> (x)")
    feeds = [{"x": np.rint(normal(n, 5, 7) * 2)} for n in (1, 4)]
    assert_like_onnx_runtime(data, *feeds)
    assert has_kernels(data, feeds[0])
    with lathe.compile(data, threads=1, tune="off") as session:
        assert session.run({"x": normal(0, 5, 7)})["y"].shape == (0, 5, 7)


@pytest.mark.parametrize("diagonal", [-2, 0, 1])
@pytest.mark.parametrize("kind", ["float", "int32"])
def test_unit_matrices(diagonal: int, kind: str) -> None:
    data = model(f"{kind}[R,C] x => float[R,C] y", f"y = EyeLike <k = {diagonal}, dtype = 1> (x)")
    feeds = [{"x": numbers(kind, *shape)} for shape in ((1, 1), (5, 9), (9, 4), (0, 3))]
    assert_like_onnx_runtime(data, *feeds)
    assert has_kernels(data, feeds[1])


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize(
    ("shape", "signature"), [((5, 4), "A,B"), ((5, 4, 3), "A,B,C"), ((5, 4, 3), "5,4,3"), ((1, 1, 33), "A,B,33")]
)
@pytest.mark.parametrize("kind", ["float", "int64", "bool"])
def test_reversed_sequences(batch: int, shape: tuple[int, ...], signature: str, kind: str) -> None:
    count = signature.split(",")[batch]
    body = f"y = ReverseSequence <batch_axis = {batch}, time_axis = {1 - batch}> (x, lengths)"
    data = model(f"{kind}[{signature}] x, int64[{count}] lengths => {kind}[{signature}] y", body)
    steps = shape[1 - batch]
    lengths = np.arange(shape[batch]) % steps + 1
    feeds = {"x": numbers(kind, *shape), "lengths": lengths}
    assert_like_onnx_runtime(data, feeds)
    assert has_kernels(data, feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        for wrong in (-1, steps + 1, 2**62):
            with pytest.raises(FeedError, match=r"out of range|sequence_lens"):
                session.run({**feeds, "lengths": np.full_like(lengths, wrong)})


def test_reversed_sequences_are_batched() -> None:
    data = model("float[N,L,3] x, int64[N] lengths => float[N,L,3] y",
                 "y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, lengths)")  # fmt: skip
    with lathe.compile(data, threads=1, tune="off") as session:
        assert session.batching.batchable, session.batching.reason
