"""Kernels for packed sequences against the references: lengths around blocks and tiles, heads, extras, any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.sweep import floats, kernel
from tests.core.targets import each_target

HEADS: dict[str, Any] = {"perm_q": (0, 2, 1, 3), "perm_k": (0, 2, 3, 1), "perm_v": (0, 2, 1, 3), "perm_y": (0, 2, 1, 3)}
LENGTHS = [(1,), (16,), (17, 1, 33), (3, 64, 7, 130), (1,) * 20, (65, 48)]


def offsets(*lengths: int) -> NDArray[np.int64]:
    """The start offsets of sequences with these lengths."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if lengths else 0
    return np.concatenate([[0], ends, np.full(total - len(lengths), total)]).astype(np.int64)


def summed(extras: int) -> Graph:
    """scores * 0.3 + every extra."""

    def write(b: Any, score: Any, *others: Any) -> Any:
        result = b.emit("Mul", score, b.constant(np.array(0.3, np.float32)))[0]
        for other in others:
            result = b.emit("Add", result, other)[0]
        return result

    return scalar_body(1 + extras, write)


@each_target
def test_attention_within_sequences(target: Target) -> None:
    text = "float32[1,n,3,20]"
    compiled = kernel("SegmentAttention", text, text, text, "int64[n+1]", target=target, epilogue=summed(0), **HEADS)
    for threads, lengths in enumerate(LENGTHS, 1):
        x = floats(1, sum(lengths), 3, 20)
        compiled.check(x, x[:, ::-1], x * 2, offsets(*lengths), threads=min(threads, 3))


def test_no_tokens() -> None:
    text = "float32[1,n,3,20]"
    compiled = kernel("SegmentAttention", text, text, text, "int64[n+1]", epilogue=summed(0), **HEADS)
    assert compiled(*[floats(1, 0, 3, 20)] * 3, np.zeros(1, np.int64))[0].shape == (1, 0, 3, 20)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize(("width", "columns"), [(1, 1), (17, 33), (64, 80)])
def test_widths_of_heads(target: Target, width: int, columns: int) -> None:
    q, v = f"float32[1,n,2,{width}]", f"float32[1,n,2,{columns}]"
    compiled = kernel("SegmentAttention", q, q, v, "int64[n+1]", target=target, epilogue=summed(0), **HEADS)
    x, y = floats(1, 61, 2, width), floats(1, 61, 2, columns)
    compiled.check(x, x[:, ::-1], y, offsets(2, 39, 20))


@pytest.mark.sample(2)
@each_target
@pytest.mark.parametrize("shapes", [["1,1,1,n"], ["1,1,n,1"], ["1,2,n,1", "1,1,1,n"], ["2,1,1"]])
def test_extras_by_query_and_key(target: Target, shapes: list[str]) -> None:
    text, total = "float32[1,n,2,8]", 55
    epilogue = summed(len(shapes))
    texts = [f"float32[{shape}]" for shape in shapes]
    compiled = kernel("SegmentAttention", *[text] * 3, "int64[n+1]", *texts, target=target, epilogue=epilogue, **HEADS)
    sizes = [[total if dim == "n" else int(dim) for dim in text[8:-1].split(",")] for text in texts]
    x = floats(1, total, 2, 8)
    compiled.check(x, x[:, ::-1], x, offsets(34, 1, 20), *(floats(*size) for size in sizes), threads=2)


@each_target
def test_causal_by_positions(target: Target) -> None:
    def write(b: Any, score: Any, key: Any, query: Any) -> Any:
        later = b.emit("Greater", key, query)[0]
        return b.emit("Where", later, b.constant(np.array(-np.inf, np.float32)), score)[0]

    text, lengths = "float32[1,n,2,8]", (5, 33, 18)
    epilogue = scalar_body(3, write)
    compiled = kernel(
        "SegmentAttention",
        *[text] * 3,
        "int64[n+1]",
        "float32[1,n]",
        "float32[n,1]",
        target=target,
        epilogue=epilogue,
        **HEADS,
    )
    place = np.concatenate([np.arange(length) for length in lengths]).astype(np.float32)
    x = floats(1, 56, 2, 8)
    compiled.check(x, x[:, ::-1], x, offsets(*lengths), place[None], place[:, None])


def test_special_numbers_stay_in_their_sequence() -> None:
    text = "float32[1,n,1,4]"
    compiled = kernel("SegmentAttention", *[text] * 3, "int64[n+1]", epilogue=summed(0), **HEADS)
    x = floats(1, 30, 1, 4)
    x[0, 12] = np.nan
    result = compiled(x, x, x, offsets(10, 7, 13))[0]
    assert np.isnan(result[0, 10:17]).all() and np.isfinite(result[0, :10]).all() and np.isfinite(result[0, 17:]).all()


@each_target
def test_a_guard_gives_zeros_where_every_key_is_masked(target: Target) -> None:
    text, mask = "float32[1,n,1,4]", np.zeros((1, 1, 1, 30), np.float32)
    mask[..., 10:17] = mask[..., 20] = -np.inf
    epilogue, x = summed(1), floats(1, 30, 1, 4)
    texts = [*[text] * 3, "int64[n+1]", "float32[1,1,1,n]"]
    compiled = kernel("SegmentAttention", *texts, target=target, epilogue=epilogue, guarded=1, **HEADS)
    compiled.check(x, x, x, offsets(10, 7, 13), mask)
    assert not compiled(x, x, x, offsets(10, 7, 13), mask)[0][0, 10:17].any()


@each_target
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "min", "first", "last"])
@pytest.mark.parametrize("columns", [7, 70])
def test_one_row_per_sequence(target: Target, mode: str, columns: int) -> None:
    lengths = (3, 1, 40)
    compiled = kernel("SegmentReduce", f"float32[1,n,{columns}]", "int64[n+1]", target=target, axis=1, mode=mode)
    x = floats(1, 44, columns)
    rows = compiled(x, offsets(*lengths), threads=2)[0][:3, 0]
    over = {"first": lambda part: part[0], "last": lambda part: part[-1]}.get(mode) or (
        lambda part: getattr(part, mode)(0)
    )
    expected = [over(part) for part in np.split(x[0], [3, 4])]
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


@each_target
def test_counts(target: Target) -> None:
    compiled = kernel("SegmentReduce", "int64[n,5]", "int64[n+1]", target=target, axis=0, mode="sum")
    x = np.arange(45).reshape(9, 5)
    assert (compiled(x, offsets(2, 7))[0][:2] == [x[:2].sum(0), x[2:].sum(0)]).all()


def test_invalid_segments_are_refused() -> None:
    text = "float32[1,n,2,8]"
    with pytest.raises(ModelError, match="offsets are int64"):
        kernel("SegmentAttention", *[text] * 3, "int64[n]", **HEADS)
    with pytest.raises(ModelError, match="not the same tokens"):
        kernel("SegmentAttention", text, "float32[1,9,2,8]", "float32[1,9,2,8]", "int64[n+1]", **HEADS)
    with pytest.raises(ModelError, match="'mode' is 'median'"):
        kernel("SegmentReduce", "float32[n,8]", "int64[n+1]", axis=0, mode="median")
