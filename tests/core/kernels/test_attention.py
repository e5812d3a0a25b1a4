"""Attention against the reference: lengths around tiles, heads, masks, strides, targets, threads, any n."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType
from lathe.core.kernels.attention.spec import QueryRowsSpec
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import scalar_body, single_node
from tests.core.kernels.sweep import floats, kernel, sweep, tensor
from tests.core.targets import each_target

HEADS: dict[str, Any] = {"perm_q": (0, 2, 1, 3), "perm_k": (0, 2, 3, 1), "perm_v": (0, 2, 1, 3), "perm_y": (0, 2, 1, 3)}


def scaled(extras: int = 0) -> Graph:
    """scores * 0.3 + every extra."""

    def write(b: Any, score: Any, *others: Any) -> Any:
        result = b.emit("Mul", score, b.constant(np.array(0.3, np.float32)))[0]
        for other in others:
            result = b.emit("Add", result, other)[0]
        return result

    return scalar_body(1 + extras, write)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 40), (3, 7), (17, 17), (33, 5), (64, 64), (70, 131)])
def test_lengths(target: Target, queries: int, keys: int) -> None:
    q, kv = f"float32[n,{queries},3,8]", f"float32[n,{keys},3,8]"
    sweep("FusedAttention", q, kv, kv, target=target, batches=(0, 1, 3), epilogue=scaled(), **HEADS)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize(("width", "columns"), [(1, 1), (3, 5), (17, 33), (32, 32), (64, 64), (80, 100)])
def test_widths_of_heads(target: Target, width: int, columns: int) -> None:
    q, v = f"float32[n,21,2,{width}]", f"float32[n,21,2,{columns}]"
    sweep("FusedAttention", q, q, v, target=target, batches=(1, 2), epilogue=scaled(), **HEADS)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("mask", ["n,1,1,37", "21,37", "n,2,21,37", "1,1,21,1", "2,1,37"])
def test_masks(target: Target, mask: str) -> None:
    q, kv = "float32[n,21,2,8]", "float32[n,37,2,8]"
    sweep("FusedAttention", q, kv, kv, f"float32[{mask}]", target=target, epilogue=scaled(1), batches=(1, 2), **HEADS)


def test_two_masks() -> None:
    q, masks = "float32[n,21,2,8]", ("float32[n,1,1,21]", "float32[21,21]")
    sweep("FusedAttention", q, q, q, *masks, target=_vectors(), epilogue=scaled(2), **HEADS)


@each_target
def test_causal(target: Target) -> None:
    x = floats(2, 40, 2, 8)
    mask = np.where(np.tri(40, dtype=np.bool_), np.float32(0), np.float32(-np.inf))
    text = "float32[n,40,2,8]"
    compiled = kernel("FusedAttention", text, text, text, mask, target=target, epilogue=scaled(1), **HEADS)
    compiled.check(x, x[::-1], x, threads=2)


@each_target
def test_special_numbers(target: Target) -> None:
    q, k, v = floats(3, 9, 1, 4), floats(3, 23, 1, 4), floats(3, 1, 23, 4).reshape(3, 23, 1, 4)
    q[0, 2] = np.nan
    q[1] *= 1e4  # one key takes all
    k[2, 5] = 0
    mask = np.zeros((3, 1, 9, 23), np.float32)
    mask[2, :, 4] = -np.inf  # nothing to attend to
    texts = ("float32[n,9,1,4]", "float32[n,23,1,4]", "float32[n,23,1,4]", "float32[n,1,9,23]")
    for guarded in (0, 1):
        compiled = kernel("FusedAttention", *texts, target=target, epilogue=scaled(1), guarded=guarded, **HEADS)
        with np.errstate(invalid="ignore"):
            compiled.check(q, k, v, mask)


@pytest.mark.sample(3)
@each_target
@pytest.mark.parametrize(("queries", "keys"), [(1, 4), (2, 33), (3, 130), (5, 16), (7, 131), (9, 23)])
def test_few_queries(target: Target, queries: int, keys: int) -> None:
    """Keys that are contiguous along the depth, along the keys, or along neither; widths around vector lengths."""
    for width in (3, 16, 21):
        q, v, mask = f"float32[n,2,{queries},{width}]", f"float32[n,2,{keys},5]", f"float32[n,1,{queries},{keys}]"
        layouts = {(0, 1, 3, 2): (2, keys, width), (0, 1, 2, 3): (2, width, keys), (0, 3, 2, 1): (keys, width, 2)}
        for perm, shape in layouts.items():
            k = "float32[n," + ",".join(map(str, shape)) + "]"
            sweep("FusedAttention", q, k, v, mask, target=target, batches=(2,), epilogue=scaled(1), perm_k=perm)


@pytest.mark.sample(4)
@each_target
@pytest.mark.parametrize("queries", [3, 5])
@pytest.mark.parametrize("mask", ["n,1,1,37", "Q,37", "n,2,Q,37", "1,1,Q,1", "2,1,37"])
def test_masks_of_few_queries(target: Target, queries: int, mask: str) -> None:
    q, kv, m = f"float32[n,{queries},2,8]", "float32[n,37,2,8]", f"float32[{mask.replace('Q', str(queries))}]"
    sweep("FusedAttention", q, kv, kv, m, target=target, epilogue=scaled(1), batches=(1, 2), **HEADS)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("queries", [2, 5, 21])
def test_boolean_masks(target: Target, queries: int) -> None:
    """Where a mask is false the score is a constant; with this many keys a whole vector may be masked."""

    def write(b: Any, score: Any, mask: Any) -> Any:
        return b.emit("Where", mask, score, b.constant(np.array(-1e9, np.float32)))[0]

    body = scalar_body(1, write, DType.FLOAT32, DType.BOOL)
    q, kv = f"float32[n,{queries},2,8]", "float32[n,37,2,8]"
    for mask in (f"bool[n,1,{queries},37]", "bool[n,1,1,37]"):
        sweep("FusedAttention", q, kv, kv, mask, target=target, epilogue=body, batches=(1, 2), **HEADS)


@each_target
@pytest.mark.parametrize("queries", [2, 5])
def test_queries_that_are_no_rows(target: Target, queries: int) -> None:
    q, kv = f"float32[n,2,21,{queries}]", "float32[n,2,19,21]"
    perms = {"perm_q": (0, 1, 3, 2), "perm_k": (0, 1, 3, 2)}
    sweep("FusedAttention", q, kv, kv, target=target, batches=(2,), **perms)


@pytest.mark.parametrize("queries", [150, 201])
def test_masks_of_each_pair(queries: int) -> None:
    """Several blocks of queries, the last one smaller."""
    q, kv, mask = f"float32[n,{queries},2,8]", "float32[n,37,2,8]", f"float32[{queries},37]"
    compiled = kernel("FusedAttention", q, kv, kv, mask, target=_vectors(), epilogue=scaled(1), **HEADS)
    assert isinstance(compiled.call.spec, QueryRowsSpec)
    for threads in (1, 3):
        compiled.check(
            floats(2, queries, 2, 8), floats(2, 37, 2, 8), floats(2, 37, 2, 8), floats(queries, 37), threads=threads
        )


def test_heads_already_in_front() -> None:
    sweep("FusedAttention", "float32[n,3,20,8]", "float32[n,3,8,30]", "float32[n,3,30,8]", target=_vectors())


def test_keys_shared_by_all_rows_and_heads() -> None:
    q, k, v = "float32[n,3,20,8]", "float32[8,30]", "float32[3,30,8]"
    sweep("FusedAttention", q, k, v, target=_vectors())


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_keys_shared_by_groups_of_heads(target: Target, queries: int) -> None:
    """The heads of a group are a batch axis, or the axis of the queries."""
    q, kv, mask = f"float32[n,{queries},2,3,8]", "float32[n,2,1,19,8]", f"float32[n,1,1,{queries},19]"
    perms = {"perm_q": (0, 2, 3, 1, 4), "perm_k": (0, 1, 2, 4, 3), "perm_y": (0, 3, 1, 2, 4)}
    sweep("FusedAttention", q, kv, kv, mask, target=target, epilogue=scaled(1), batches=(1, 2), **perms)
    q, mask = f"float32[n,2,{queries},1,8]", "float32[n,1,1,1,19]"
    perms = {"perm_q": (0, 1, 3, 2, 4), "perm_k": (0, 1, 2, 4, 3), "perm_y": (0, 2, 1, 3, 4)}
    sweep("FusedAttention", q, kv, kv, mask, target=target, epilogue=scaled(1), batches=(1, 2), **perms)


@pytest.mark.sample(2)
@each_target
@pytest.mark.parametrize(("queries", "width"), [(1, 16), (1, 21), (3, 3), (5, 16), (40, 8)])
def test_any_number_of_keys(target: Target, queries: int, width: int) -> None:
    """n past keys and one key for each query; n is 0, around a vector, or around a panel."""
    keys, past = f"n+{queries}", (0, 1, 2, 7, 15, 16, 17, 31, 33, 100, 130)
    q, mask = f"float32[2,3,{queries},{width}]", f"float32[2,1,{queries},{keys}]"
    k, v = f"float32[2,3,{keys},{width}]", f"float32[2,3,{keys},5]"
    attrs = {"epilogue": scaled(1), "perm_k": (0, 1, 3, 2)}
    sweep("FusedAttention", q, k, v, mask, target=target, batches=past, **attrs)
    q, kv = f"float32[2,{queries},3,{width}]", f"float32[2,{keys},3,{width}]"
    sweep("FusedAttention", q, kv, kv, target=target, batches=past, guarded=1, **HEADS)


def test_any_number_of_narrow_keys() -> None:
    q, kv = "bfloat16[2,3,1,16]", "bfloat16[2,3,n+1,16]"
    sweep("FusedAttention", q, kv, kv, target=_vectors(), batches=(1, 15, 40), tolerance=1e-2, perm_k=(0, 1, 3, 2))


def test_constant_keys() -> None:
    sweep("FusedAttention", "float32[n,20,8]", floats(8, 300), floats(300, 8), target=_vectors())


@pytest.mark.parametrize("keys", [1000, 5000])
def test_many_keys(keys: int) -> None:
    kv = f"float32[n,{keys},2,8]"
    sweep("FusedAttention", "float32[n,70,2,8]", kv, kv, target=_vectors(), batches=(1, 2), tolerance=5e-5, **HEADS)


def test_heads_are_split_among_threads() -> None:
    text = "float32[n,128,4,32]"
    compiled = kernel("FusedAttention", text, text, text, **HEADS)
    for threads in (1, 2, 4):
        compiled.check(floats(5, 128, 4, 32), floats(5, 128, 4, 32), floats(5, 128, 4, 32), threads=threads)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ("float64[n,4,8]", "float64[n,8,4]", "float64[n,4,8]"),
        ("float32[n,n,8]", "float32[n,8,4]", "float32[n,4,8]"),
        ("float32[n,4,8]", "float32[n,8,n]", "float32[n,n,8]"),
        ("float32[n,4,8]", "float32[n,8,0]", "float32[n,0,8]"),
        ("float32[2,4,8]", "float32[2,8,n+1]", "float32[2,n+1,8]"),
        ("float32[2,4,1]", "float32[2,1,n]", "float32[2,n,8]"),
    ],
)
def test_unsupported_attention_runs_on_the_reference(q: str, k: str, v: str) -> None:
    graph = single_node("FusedAttention", tensor(q), tensor(k), tensor(v))
    assert select(Request(graph.nodes[0], graph.constants, _vectors())) is None


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(ModelError, match=r"queries \[5,4\], keys \[4,7\] and values \[6,3\] do not fit"):
        single_node("FusedAttention", tensor("float32[5,4]"), tensor("float32[4,7]"), tensor("float32[6,3]"))


def _vectors() -> Target:
    return kernel("Relu", "float32[n]").target
