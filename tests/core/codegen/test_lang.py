"""The vector language end to end: small kernels, compiled, loaded and run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.codegen.lang import Kernel
from lathe.core.codegen.target import host
from lathe.core.ir.dim import evaluate, floor_div, maximum
from lathe.core.ir.types import DType, symbol
from lathe.core.kernels.call import Status
from lathe.core.kernels.target import Target
from tests.core.codegen.demo import DemoSpec, run
from tests.core.targets import each_target

F32 = DType.FLOAT32
N = symbol("n")


@each_target
@pytest.mark.parametrize(("n", "threads"), [(1, 1), (5, 1), (16, 2), (1000, 3)])
def test_elementwise_over_any_n(target: Target, n: int, threads: int) -> None:
    x = np.arange(3 * n + 1, dtype=np.float32)
    y = np.full(3 * n + 2, -7, np.float32)

    def write(k: Kernel) -> None:
        a, b = k.operand(0, F32), k.operand(1, F32)
        with k.chunks(k.dim(3 * N + 1), grain=100) as (start, stop):

            def body(i: Any, mask: Any) -> None:
                b.store(a.load(start + i, k.lanes, mask) * 2.0 + 1.0, start + i, mask)

            k.strip(stop - start, body)

    run(write, [x, y], n, threads, target)
    np.testing.assert_array_equal(y[:-1], x * 2 + 1)
    assert y[-1] == -7


@each_target
@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 16, 17, 30])
def test_quotients_of_negative_dimensions_are_rounded_down(target: Target, n: int) -> None:
    dims = (floor_div(N - 7, 10), -floor_div(-N, 2), floor_div(3 - 2 * N, 7), maximum(floor_div(N - 7, 10), 0))
    found = np.full(len(dims), 99, np.int64)

    def write(k: Kernel) -> None:
        for place, dim in enumerate(dims):
            k.operand(0, DType.INT64).store(k.dim(dim), place)

    run(write, [found], n=n, target=target)
    assert found.tolist() == [evaluate(dim, {"n": n}) for dim in dims]


@each_target
@pytest.mark.parametrize("size", [1, 7, 16, 100])
def test_strip_carries_values_through_full_vectors_and_tail(target: Target, size: int) -> None:
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    y = np.zeros(2, np.float32)

    def write(k: Kernel) -> None:
        a, out = k.operand(0, F32), k.operand(1, F32)
        for extent, slot in ((k.n, 0), (size, 1)):  # known at run time, and while generating
            [total] = k.strip(extent, lambda i, m, s: [s + a.load(i, k.lanes, m)], [k.zeros(F32, k.lanes)])
            out.store(k.ops.sum(total), slot)

    run(write, [x, y], n=size, target=target)
    np.testing.assert_allclose(y, [x.sum(), x.sum()], rtol=1e-5, atol=1e-5)


@each_target
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    ("source", "goal"),
    [(DType.INT32, DType.UINT8), (DType.INT32, DType.INT16), (DType.INT64, DType.INT32), (DType.INT64, DType.INT8),
     (F32, DType.UINT8), (F32, DType.FLOAT16), (F32, DType.BFLOAT16), (DType.FLOAT64, F32), (DType.UINT8, DType.INT32),
     (DType.UINT8, DType.BOOL)],
    ids=str,
)  # fmt: skip
def test_a_tail_in_another_type_does_not_write_past_its_end(
    source: DType, goal: DType, count: int, target: Target
) -> None:
    x = np.arange(1, 33).astype(source.numpy)
    before = np.arange(99, 131).astype(goal.numpy)
    y = before.copy()

    def write(k: Kernel) -> None:
        a, out = k.operand(0, source), k.operand(1, goal)
        mask = k.lane_mask(count, k.lanes)
        out.store(a.load(0, k.lanes, mask).cast(goal), 3, mask)

    run(write, [x, y], target=target)
    written = min(count, target.lanes)
    np.testing.assert_array_equal(y[3 : 3 + written], x[:written].astype(goal.numpy))
    np.testing.assert_array_equal(np.delete(y, range(3, 3 + written)), np.delete(before, range(3, 3 + written)))


def test_parallel_gives_every_coordinate_to_exactly_one_thread() -> None:
    seen = np.zeros((5, 7, 3), np.int64)

    def write(k: Kernel) -> None:
        out = k.operand(0, DType.INT64)
        with k.parallel(k.n, 7, 3) as (a, b, c):
            at = (a * 7 + b) * 3 + c
            out.store(out.load(at) + (a * 100 + b * 10 + c), at)

    run(write, [seen], n=5, threads=3)
    a, b, c = np.indices(seen.shape)
    np.testing.assert_array_equal(seen, a * 100 + b * 10 + c)


@each_target
def test_hiding_an_integer_from_the_optimizer_keeps_its_value(target: Target) -> None:
    seen = np.zeros(40, np.int64)

    def write(k: Kernel) -> None:
        out = k.operand(0, DType.INT64)
        with k.loop(0, k.n, 4) as index:
            at = k.hidden(index)
            for i in range(4):
                out.store(at + k.hidden(k.index(i)) * 100, at + i)

    run(write, [seen], n=40, target=target)
    np.testing.assert_array_equal(seen, np.arange(40) // 4 * 4 + np.arange(40) % 4 * 100)


def test_gather_when_and_status() -> None:
    table, indices, y = np.arange(10, dtype=np.float32) * 10, np.array([3, 0, 9, 12], np.int64), np.zeros(4, np.float32)

    def write(k: Kernel) -> None:
        source, where, out = k.operand(0, F32), k.operand(1, DType.INT64), k.operand(2, F32)
        offsets = where.load(0, 4)
        valid = offsets < 10
        out.store(source.gather(offsets, valid), 0)
        with k.when(k.ops.any(~valid)):
            k.refuse(Status.INDEX_OUT_OF_RANGE)

    assert run(write, [table, indices, y]) == Status.INDEX_OUT_OF_RANGE
    np.testing.assert_array_equal(y, [30, 0, 90, 0])


def test_booleans_are_bytes_in_memory() -> None:
    x, y = np.array([1, 0, 5, 0] * 4, np.uint8).view(np.bool_), np.zeros(16, np.bool_)

    def write(k: Kernel) -> None:
        k.operand(1, DType.BOOL).store(~k.operand(0, DType.BOOL).load(0, 16))

    run(write, [x, y])
    np.testing.assert_array_equal(y.view(np.uint8), [0, 1, 0, 1] * 4)


def test_mixing_element_types_is_refused() -> None:
    k = Kernel(DemoSpec(), host())
    with pytest.raises(TypeError, match="int64, float32 do not mix"):
        k.ops.add(k.n, k.constant(1.0, F32))


def test_only_n_may_vary() -> None:
    with pytest.raises(ValueError, match="dimension height is unknown"):
        Kernel(DemoSpec(), host()).dim(symbol("height"))
