"""The kernels of the paged cache against the references: prompts and single tokens, groups of heads, windows, types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel
from tests.core.targets import each_target

PAGES, MOST = 24, 9  # pages of the cache, and the most pages of a sequence
CHUNKS = ((0, 1), (7, 1), (3, 30), (40, 17), (68, 1))  # first position and number of tokens of each sequence


def operands(heads: int, kv_heads: int, size: int, page: int, dtype: str, chunks: Any = CHUNKS) -> list[Array]:
    """Operands of CachedAttention, with the pages of the sequences in any order."""
    rng = np.random.default_rng(heads * size + page)
    cache = rng.standard_normal((2, PAGES, kv_heads, size, page)).astype(DType[dtype.upper()].numpy)
    positions = np.concatenate([np.arange(first, first + count) for first, count in chunks])
    sequences = np.repeat(np.arange(len(chunks)), [count for _, count in chunks])
    tables = np.full((len(positions), MOST * 32 // page), -1)
    tables[: len(chunks)] = rng.integers(0, PAGES, (len(chunks), MOST * 32 // page))
    values = np.ascontiguousarray(cache[1].swapaxes(2, 3))
    return [floats(len(positions), heads, size), cache[0], values, positions, sequences, tables]


def attention(
    target: Target | None,
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    dtype: str = "float32",
    window: int = 0,
    *scales: str,
) -> Any:
    return kernel(
        "CachedAttention",
        f"float32[n,{heads},{size}]",
        f"{dtype}[{PAGES},{kv_heads},{size},{page}]",
        f"{dtype}[{PAGES},{kv_heads},{page},{size}]",
        *("int64[n]", "int64[n]", f"int64[n,{MOST * 32 // page}]", *scales),
        target=target,
        scale=0.25,
        window=window,
    )


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page"), [(3, 1, 64, 32), (2, 2, 20, 32), (14, 2, 16, 16), (16, 1, 7, 4)]
)
def test_queries_over_pages(target: Target, heads: int, kv_heads: int, size: int, page: int) -> None:
    compiled = attention(target, heads, kv_heads, size, page)
    for threads in (1, 3):
        compiled.check(*operands(heads, kv_heads, size, page, "float32"), threads=threads)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("window", [1, 5, 32, 100])
def test_windows(target: Target, window: int) -> None:
    compiled = attention(target, 4, 2, 16, 32, window=window)
    compiled.check(*operands(4, 2, 16, 32, "float32"), threads=2)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_caches(target: Target, dtype: str) -> None:
    compiled = attention(target, 4, 2, 20, 32, dtype)
    compiled.check(*operands(4, 2, 20, 32, dtype), threads=2)


def quantized(rows: Array) -> tuple[Array, Array]:
    """Codes of int8, and a scale for each row [..., 1]."""
    scales = (np.abs(rows).max(-1, keepdims=True) / 127).astype(np.float32)
    return np.rint(rows / scales).astype(np.int8), scales


def coded(arrays: list[Array]) -> list[Array]:
    """Operands over a cache of int8 with scales."""
    q, keys, values, *rest = arrays
    (keys, key_scales), (values, value_scales) = quantized(keys.swapaxes(2, 3)), quantized(values)
    return [q, np.ascontiguousarray(keys.swapaxes(2, 3)), values, *rest, key_scales, value_scales]


@each_target
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(9, 3, 64, 32), (2, 2, 20, 32), (16, 1, 7, 8)])
def test_caches_of_int8_have_scales(target: Target, heads: int, kv_heads: int, size: int, page: int) -> None:
    plain = operands(heads, kv_heads, size, page, "float32")
    arrays, scales = coded(plain), f"float32[{PAGES},{kv_heads},{page},1]"
    compiled = attention(target, heads, kv_heads, size, page, "int8", 33, scales, scales)
    for threads in (1, 3):
        compiled.check(*arrays, threads=threads)
    exact = attention(target, heads, kv_heads, size, page, window=33)(*plain)[0]
    # An error of half a code in keys moves a score by at most 0.25 * size * |q| * |k| / 254; values have 1/254 more.
    np.testing.assert_allclose(compiled(*arrays)[0], exact, 0, 0.05)


def test_a_token_gets_the_same_bits_alone() -> None:
    """Results do not depend on the other tokens of a run."""
    compiled = attention(None, 6, 2, 64, 32, window=50)
    q, keys, values, positions, sequences, tables = operands(6, 2, 64, 32, "float32")
    together = compiled(q, keys, values, positions, sequences, tables)[0]
    for token in (0, 1, 2, 13, 31, 40, 49):
        at, row = slice(token, token + 1), sequences[token]
        alone = compiled(q[at], keys, values, positions[at], np.zeros(1, np.int64), tables[row : row + 1])[0]
        assert (alone == together[at]).all()


def test_keys_beyond_the_last_position_are_not_read() -> None:
    compiled = attention(None, 2, 1, 16, 32)
    q, keys, values, positions, sequences, tables = operands(2, 1, 16, 32, "float32", ((0, 1), (7, 1)))
    keys[...], values[...] = np.nan, np.nan
    keys[tables[0, 0], :, :, :1] = keys[tables[1, 0], :, :, :8] = 0
    values[tables[0, 0], :, :1] = values[tables[1, 0], :, :8] = 1
    assert (compiled(q, keys, values, positions, sequences, tables)[0] == 1).all()


@pytest.mark.parametrize("wrong", ["position", "sequence", "page"])
def test_numbers_out_of_range_are_refused(wrong: str) -> None:
    compiled = attention(None, 2, 1, 16, 32)
    arrays = operands(2, 1, 16, 32, "float32")
    if wrong == "position":
        arrays[3][0] = MOST * 32
    elif wrong == "sequence":
        arrays[4][-1] = len(arrays[4])
    else:
        arrays[5][0, 0] = PAGES
    compiled(*arrays)
    assert compiled.status


@each_target
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("transposed", [0, 1])
def test_rows_go_to_their_slots(target: Target, dtype: str, transposed: int) -> None:
    shape = (5, 2, 20, 8) if transposed else (5, 2, 8, 20)
    text = ",".join(map(str, shape))
    compiled = kernel(
        "CacheWrite",
        f"{dtype}[{text}]",
        f"{'int8' if dtype == 'int8' else 'float32'}[n,2,20]",
        "int64[n]",
        target=target,
        transposed=transposed,
    )
    pages = (40 * floats(*shape)).astype(DType[dtype.upper()].numpy)
    for threads, count in ((1, 0), (1, 1), (3, 40)):
        slots = np.random.default_rng(count).permutation(40)[:count]
        rows = 40 * floats(count, 2, 20)
        compiled.check(pages, rows.astype(np.int8) if dtype == "int8" else rows, slots, threads=threads)


def test_a_slot_outside_the_cache_is_refused() -> None:
    compiled = kernel("CacheWrite", "float32[5,1,8,4]", "float32[n,1,4]", "int64[n]")
    pages = floats(5, 1, 8, 4)
    written = compiled(pages, floats(2, 1, 4), np.array([40, 3]))[0]
    assert compiled.status
    assert (written[0, 0, 3] == floats(2, 1, 4)[1, 0]).all()
