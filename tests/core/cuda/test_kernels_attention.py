"""Attention on GPUs: lengths around tiles, heads, masks, strides, types, special numbers, any n."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.sweep import floats

HEADS: dict[str, Any] = {"perm_q": (0, 2, 1, 3), "perm_k": (0, 2, 3, 1), "perm_v": (0, 2, 1, 3), "perm_y": (0, 2, 1, 3)}


def scaled(extras: int = 0) -> Graph:
    """scores * 0.3 + every extra."""

    def write(b: Any, score: Any, *others: Any) -> Any:
        result = b("Mul", score, b.constant(np.array(0.3, np.float32)))
        for other in others:
            result = b("Add", result, other)
        return result

    return scalar_body(1 + extras, write)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 40), (3, 7), (17, 17), (33, 5), (64, 64), (70, 131)])
def test_lengths(queries: int, keys: int) -> None:
    q, kv = f"float32[n,{queries},3,8]", f"float32[n,{keys},3,8]"
    sweep("FusedAttention", q, kv, kv, batches=(0, 1, 3), epilogue=scaled(), **HEADS)


@pytest.mark.parametrize(("width", "columns"), [(1, 1), (3, 5), (17, 33), (80, 100)])
def test_widths_of_heads(width: int, columns: int) -> None:
    q, v = f"float32[n,21,2,{width}]", f"float32[n,21,2,{columns}]"
    sweep("FusedAttention", q, q, v, batches=(2,), epilogue=scaled(), **HEADS)


@pytest.mark.parametrize("mask", ["n,1,1,37", "21,37", "n,2,21,37", "1,1,21,1", "2,1,37"])
def test_masks(mask: str) -> None:
    q, kv = "float32[n,21,2,8]", "float32[n,37,2,8]"
    sweep("FusedAttention", q, kv, kv, f"float32[{mask}]", epilogue=scaled(1), batches=(1, 2), **HEADS)


@pytest.mark.parametrize("mask", ["n,1,21,37", "n,1,1,37", "21,1"])
def test_boolean_masks(mask: str) -> None:
    def write(b: Any, score: Any, kept: Any) -> Any:
        return b("Where", kept, score, b.constant(np.array(-1e9, np.float32)))

    body, q, kv = scalar_body(1, write, DType.FLOAT32, DType.BOOL), "float32[n,21,2,8]", "float32[n,37,2,8]"
    sweep("FusedAttention", q, kv, kv, f"bool[{mask}]", epilogue=body, batches=(1, 2), **HEADS)


def test_keys_shared_by_groups_of_heads() -> None:
    q, kv, mask = "float32[n,21,2,3,8]", "float32[n,2,1,19,8]", "float32[n,1,1,21,19]"
    perms = {"perm_q": (0, 2, 3, 1, 4), "perm_k": (0, 1, 2, 4, 3), "perm_y": (0, 3, 1, 2, 4)}
    sweep("FusedAttention", q, kv, kv, mask, epilogue=scaled(1), batches=(1, 2), **perms)


def test_causal() -> None:
    mask = np.where(np.tri(40, dtype=np.bool_), np.float32(0), np.float32(-np.inf))
    text = "float32[n,40,2,8]"
    sweep("FusedAttention", text, text, text, mask, epilogue=scaled(1), batches=(2,), **HEADS)


@pytest.mark.parametrize("guarded", [0, 1])
def test_special_numbers(guarded: int) -> None:
    q, k, v = floats(3, 9, 1, 4), floats(3, 23, 1, 4), floats(3, 1, 23, 4).reshape(3, 23, 1, 4)
    q[0, 2] = np.nan
    q[1] *= 1e4  # one key takes all
    k[2, 5] = 0
    mask = np.zeros((3, 1, 9, 23), np.float32)
    mask[2, :, 4] = -np.inf  # nothing to attend to
    texts = ("float32[n,9,1,4]", "float32[n,23,1,4]", "float32[n,23,1,4]", "float32[n,1,9,23]")
    with np.errstate(all="ignore"):
        GpuKernel("FusedAttention", *texts, epilogue=scaled(1), guarded=guarded, **HEADS).check(q, k, v, mask)


def test_keys_shared_by_all_rows_and_heads() -> None:
    sweep("FusedAttention", "float32[n,3,20,8]", "float32[8,30]", "float32[3,30,8]")
    sweep("FusedAttention", "float32[n,20,8]", floats(8, 300), floats(300, 8), batches=(2,))


def test_lengths_may_be_the_batch() -> None:
    sweep("FusedAttention", "float32[2,n,8]", "float32[2,8,n]", "float32[2,n,8]", batches=(1, 7, 70))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow(dtype: str) -> None:
    text = f"{dtype}[n,33,2,16]"
    sweep("FusedAttention", text, text, text, epilogue=scaled(), batches=(2,), rtol=3e-2, atol=2e-2, **HEADS)


def test_every_offer_agrees() -> None:
    text = "float32[n,70,1,8]"
    for rank in range(GpuKernel("FusedAttention", text, text, text, **HEADS).offers):
        sweep("FusedAttention", text, text, text, batches=(2,), rank=rank, **HEADS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiles(dtype: str) -> None:
    text, mask = f"{dtype}[n,128,12,32]", "float32[n,1,1,128]"
    compiles("FusedAttention", text, text, text, mask, epilogue=scaled(1), **HEADS)


def test_odd_sizes_compile() -> None:
    text = "float16[n,77,3,40]"
    compiles("FusedAttention", text, text, text, **HEADS)
