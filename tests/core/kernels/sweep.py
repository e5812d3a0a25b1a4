"""Runs one kernel over batch sizes and thread counts, and compares with the reference executor.

    sweep("Add", "float32[n,7]", "float32[7]", target=target)

A string is an input of that type, an array is a constant. Data come from a generator seeded by the shape.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType
from lathe.core.ir.types import parse_type as parse
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel

Sample: TypeAlias = Callable[[DType, tuple[int, ...]], Array]


def kernel(op: str, *inputs: str | Array | None, **keywords: Any) -> NodeKernel:
    """One node's kernel; see the module's docstring for `inputs`."""
    given = [tensor(value) if isinstance(value, str) else value for value in inputs]
    return NodeKernel(op, *given, **keywords)


def sweep(
    op: str,
    *inputs: str | Array | None,
    target: Target,
    batches: Sequence[int] = (0, 1, 3, 17),
    sample: Sample | None = None,
    tolerance: float = 1e-5,
    outputs: int = 1,
    **attrs: Any,
) -> None:
    """AssertionError when kernel and reference differ for some batch size or number of threads."""
    compiled = kernel(op, *inputs, target=target, outputs=outputs, **attrs)
    make = sample or normal
    for batch, threads in zip(batches, itertools.cycle((1, 2, 3)), strict=False):
        feeds = [make(v.dtype, v.tensor.evaluate({"n": batch})) for v in compiled.graph.inputs]
        compiled.check(*feeds, threads=threads, rtol=tolerance, atol=tolerance)
        assert compiled.status == 0


def tensor(text: str) -> TensorType:
    """`float32[n,7]` as a type."""
    parsed = parse(text)
    assert isinstance(parsed, TensorType)
    return parsed


def normal(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Random numbers: normally distributed floats, small integers, booleans."""
    rng = _generator(dtype, shape)
    if dtype.is_float:
        return rng.standard_normal(shape).astype(dtype.numpy)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return rng.integers(0 if dtype.label.startswith("u") else -9, 10, shape).astype(dtype.numpy)


def positive(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Numbers from 1 to 4."""
    rng = _generator(dtype, shape)
    if dtype.is_float:
        return (1 + 3 * rng.random(shape)).astype(dtype.numpy)
    return rng.integers(1, 5, shape).astype(dtype.numpy)


def floats(*shape: int) -> Array:
    """A float32 constant."""
    return normal(DType.FLOAT32, shape)


def _generator(dtype: DType, shape: tuple[int, ...]) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{dtype}{shape}".encode()))
