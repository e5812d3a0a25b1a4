"""Elementwise kernels of GPUs: operators, broadcasts, types, tails, squares, special numbers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.types import DType
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.sweep import floats, positive

UNARY = [
    "Abs", "Acosh", "Asin", "Asinh", "Atan", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "IsNaN", "LeakyRelu", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign",
    "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
]  # fmt: skip
POSITIVE = {"Acosh", "Sqrt", "Reciprocal", "Tan"}
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        0.5,
        1.0,
        -1.0,
        1.5,
        -2.5,
        1e-30,
        1e30,
        -1e30,
        3e38,
        -3e38,
        np.inf,
        -np.inf,
        np.nan,
        20,
        88,
        -104,
        -1e3,
    ],
    np.float32,
)


@pytest.mark.parametrize("op", UNARY)
def test_functions_of_one_number(op: str) -> None:
    if op == "Asin":
        sweep(op, "float32[n]", batches=(17,), sample=lambda dtype, shape: np.linspace(-1, 1, 17, dtype=np.float32))
        return
    dtype = "bool" if op == "Not" else "float32"
    sweep(op, f"{dtype}[n,7]", batches=(3,), sample=positive if op in POSITIVE else None, rtol=2e-5)


@pytest.mark.parametrize("op", [op for op in UNARY if op != "Not"])
def test_special_numbers(op: str) -> None:
    waves = op in ("Sin", "Cos", "Tan")
    x = SPECIAL[~(np.isfinite(SPECIAL) & (np.abs(SPECIAL) > 1e4))] if waves else SPECIAL
    with np.errstate(all="ignore"):
        GpuKernel(op, f"float32[{x.size}]").check(x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int32", "int8", "uint8", "uint64"])
@pytest.mark.parametrize("op", ["Add", "Mul", "Div", "Max", "Less", "Mod"])
def test_types(op: str, dtype: str) -> None:
    attrs: dict[str, Any] = {"fmod": 1} if op == "Mod" else {}
    sweep(op, f"{dtype}[n,3]", f"{dtype}[n,3]", batches=(3,), sample=positive, rtol=2e-3, **attrs)


def test_powers() -> None:
    base = np.array([-2, -2, -2, 0, 0, 1, -1, 2.5, np.inf, -8], np.float32)
    power = np.array([2, 3, 0.5, 0, 2, np.nan, 3, -1.5, 0, 1 / 3], np.float32)
    with np.errstate(all="ignore"):
        GpuKernel("Pow", "float32[10]", "float32[10]").check(base, power, rtol=1e-6)


def test_shifts_and_bits() -> None:
    bits = np.arange(12, dtype=np.uint8) * 21
    shift = np.array([0, 1, 2, 7, 8, 9, 255, 3, 4, 5, 6, 1], np.uint8)
    for direction in ("LEFT", "RIGHT"):
        GpuKernel("BitShift", "uint8[12]", "uint8[12]", direction=direction).check(bits, shift)
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        GpuKernel(op, "uint8[12]", "uint8[12]").check(bits, shift)


@pytest.mark.parametrize("to", [DType.INT8, DType.UINT8, DType.INT32, DType.INT64, DType.BOOL, DType.FLOAT16])
def test_casts_saturate(to: DType) -> None:
    numbers = np.array([0, -0.5, 1.9, -1.9, 127.5, 200], np.float32)
    with np.errstate(all="ignore"):
        kernel = GpuKernel("Cast", f"float32[{numbers.size}]", to=to.onnx_code)
        kernel.check(numbers if to not in (DType.INT8, DType.UINT8) else numbers[np.r_[0:5, 0]])
    if to is DType.INT8:
        [low] = GpuKernel("Cast", "float32[3]", to=to.onnx_code)(np.array([-1e9, 1e9, np.nan], np.float32))
        assert low.tolist() == [-128, 127, 0]


@pytest.mark.parametrize(
    "shapes",
    [("n,7", "7"), ("n,3,1,5", "4,1"), ("n,1", "1,33"), ("n,17", "n,1"), ("1", "n,3"), ("3,5", "n,3,5"), ("n", "n")],
)
def test_broadcasts(shapes: tuple[str, str]) -> None:
    sweep("Sub", f"float32[{shapes[0]}]", f"float32[{shapes[1]}]")


def test_more_than_one_program() -> None:
    sweep("Add", "float32[n,513]", "float32[513]", batches=(1, 2, 5))


def test_constant_scalars_are_part_of_the_code() -> None:
    kernel = sweep("Mul", "float32[n,5]", np.float32(0.25).reshape(1))
    assert len(kernel.call.operands) == 2


def test_a_chain_is_one_kernel() -> None:
    body = scalar_body(3, lambda b, x, y, z: b("Relu", b("Add", b("Mul", x, y), z)))
    kernel = sweep("FusedElementwise", "float32[n,5,3]", "float32[3]", "float32[n,1,3]", body=body)
    assert kernel.call.inplace == (0,)


def test_many_operands() -> None:
    body = scalar_body(8, lambda b, *x: functools.reduce(lambda total, each: b("Sub", total, each), x))
    sweep("FusedElementwise", *["float32[n,5]"] * 8, body=body)


def test_every_offer_agrees() -> None:
    shape = "float32[n,33]"
    for rank in range(GpuKernel("Add", shape, shape).offers):
        sweep("Add", shape, shape, batches=(0, 1, 17), rank=rank)


def test_bfloat16_is_computed_wide_and_rounded_at_the_end() -> None:
    sweep("Mul", "bfloat16[n,9]", "bfloat16[n,9]", batches=(1, 3), rtol=2e-2)


def test_selection() -> None:
    sweep("Where", "bool[n,5]", "float32[n,5]", floats(5))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64"])
def test_compiles(dtype: str) -> None:
    compiles("Div", f"{dtype}[n,33]", f"{dtype}[33]")


@pytest.mark.parametrize("op", ["Gelu", "Tanh", "Round", "Mish", "Atan"])
def test_functions_compile(op: str) -> None:
    compiles(op, "float32[n,32]")


def test_powers_and_casts_compile() -> None:
    body = scalar_body(2, lambda b, x, y: b("Cast", b("Pow", x, y), to=DType.UINT8.onnx_code))
    compiles("FusedElementwise", "float32[n,5]", "float32[n,1]", body=body)
