"""Elementary functions against NumPy in float64: the error bounds of vmath's docstring, and special cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lathe.core.codegen.lang import Kernel
from lathe.core.codegen.target import host
from lathe.core.codegen.vmath import exp_of_nonpositive
from lathe.core.ir.types import DType
from lathe.core.kernels.target import Target
from tests.core.codegen.demo import run
from tests.core.targets import each_target

F32 = DType.FLOAT32
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1.1754944e-38,
        3.4028235e38,
        -3.4028235e38,
        88.7,
        -103.9,
    ],
    np.float32,
)
_erf = np.vectorize(__import__("math").erf, otypes=[np.float64])
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "exp": (np.exp, 1.5),
    "log": (np.log, 1.0),
    "tanh": (np.tanh, 6.0),
    "erf": (_erf, 5.0),
    "sin": (np.sin, 2.0),
    "cos": (np.cos, 2.0),
    "sqrt": (np.sqrt, 0.5),
}


def apply(name: str, arrays: list[Any], target: Target, dtype: DType = F32) -> Any:
    """Apply the scalar function `name` to whole arrays with one kernel."""
    y = np.empty_like(arrays[0])

    def write(k: Kernel) -> None:
        inputs = [k.operand(i, dtype) for i in range(len(arrays))]
        out = k.operand(len(arrays), dtype)

        def body(i: Any, mask: Any) -> None:
            out.store(getattr(k.ops, name)(*(x.load(i, k.lanes, mask) for x in inputs)), i, mask)

        k.strip(k.n, body)

    run(write, [*arrays, y], n=y.size, target=target)
    return y


def every_magnitude(count: int, seed: int = 0) -> Any:
    """Floats of every exponent and sign, denormals included, and the special values."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, np.uint64).astype(np.uint32)
    near = np.random.default_rng(seed).standard_normal(count).astype(np.float32) * 4
    return np.concatenate([SPECIAL, bits.view(np.float32), near])


def ulps(actual: Any, exact: Any) -> Any:
    """The distance in float32 ULPs; 0 if both are the same special value."""
    rounded = exact.astype(np.float32)
    unit = np.maximum(np.spacing(np.abs(np.where(np.isfinite(rounded), rounded, 1)).astype(np.float32)), 2.0**-149)
    same = (actual == rounded) | (np.isnan(actual) & np.isnan(rounded))
    return np.where(same, 0, np.abs(actual.astype(np.float64) - exact) / unit)


@each_target
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_bound(name: str, target: Target) -> None:
    exact, bound = FUNCTIONS[name]
    x = every_magnitude(20_000 if target.lanes < 16 else 200_000)
    with np.errstate(all="ignore"):
        error = ulps(apply(name, [x], target), exact(x.astype(np.float64)))
    worst = int(np.nanargmax(np.where(np.isnan(error), np.inf, error)))
    assert error[worst] <= bound, f"{name}({x[worst]!r}) is off by {error[worst]} ulp"


@each_target
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_depends_on_its_own_element_alone(name: str, target: Target) -> None:
    """Other elements of its vector may belong to another request."""
    x = np.random.default_rng(0).uniform(-50, 50, 4001).astype(np.float32)
    other = x.copy()
    other[::2] = np.resize(np.array([1e9, np.nan, -3e38, np.inf, 0.0], np.float32), other[::2].shape)
    np.testing.assert_array_equal(apply(name, [other], target)[1::2], apply(name, [x], target)[1::2])


@each_target
def test_exp_of_nonpositive(target: Target) -> None:
    x = np.concatenate([-np.logspace(-40, 2.2, 5000), [0.0, -0.0, -87.6, -88.0, -np.inf, np.nan]]).astype(np.float32)
    y, exact = np.empty_like(x), np.exp(x.astype(np.float64))

    def write(k: Kernel) -> None:
        source, out = k.operand(0, F32), k.operand(1, F32)
        k.strip(k.n, lambda i, mask: out.store(exp_of_nonpositive(k.ops, source.load(i, k.lanes, mask)), i, mask))

    run(write, [x, y], n=y.size, target=target)
    kept = ~(x < -87.6)
    assert ulps(y[kept], exact[kept]).max() <= 1.5
    assert (y[~kept] < 1e-37).all()
    assert (y[x < -87.7] == 0).all()


@each_target
def test_sigmoid(target: Target) -> None:
    x = every_magnitude(20_000)
    with np.errstate(all="ignore"):
        exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    y = apply("sigmoid", [x], target)
    assert ulps(y, exact)[~(x < -87.6)].max() <= 3
    assert (y[x < -87.6] < 1e-37).all()
    assert (y[x < -87.7] == 0).all()


def test_pow_like_numpy_at_every_pair_of_specials() -> None:
    values = np.concatenate([SPECIAL, np.array([2, 3, -2, -3, 0.5, -0.5, 1.5, 2.5, 1e10, 16777217], np.float32)])
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        error = ulps(apply("pow", [x, y], host()), np.power(x.astype(np.float64), y.astype(np.float64)))
    worst = int(np.nanargmax(np.where(np.isnan(error), np.inf, error)))
    assert error[worst] <= 1, f"{x[worst]!r} ** {y[worst]!r} is off by {error[worst]} ulp"


def test_pow_error_bound() -> None:
    rng = np.random.default_rng(1)
    x = np.exp(rng.uniform(-30, 30, 50_000)).astype(np.float32)
    y = rng.uniform(-3, 3, x.size).astype(np.float32)
    exact = np.power(x.astype(np.float64), y.astype(np.float64))
    with np.errstate(over="ignore"):
        assert ulps(apply("pow", [x, y], host()), exact).max() <= 1


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sin", "floor", "rint"])
def test_float64(name: str) -> None:
    x = np.random.default_rng(0).uniform(0.1, 20, 37)
    np.testing.assert_allclose(apply(name, [x], host(), DType.FLOAT64), getattr(np, name)(x), rtol=1e-15)


@pytest.mark.parametrize(("name", "reference"), [("max", np.maximum), ("min", np.minimum), ("rem", np.fmod)])
def test_two_operands_propagate_nan(name: str, reference: Callable[[Any, Any], Any]) -> None:
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(apply(name, [x, y], host()), reference(x, y))


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT32, DType.INT64, DType.UINT8, DType.UINT32])
def test_integers(dtype: DType) -> None:
    rng, limits = np.random.default_rng(0), np.iinfo(dtype.numpy)
    x = np.concatenate([rng.integers(limits.min, limits.max, 50, dtype.numpy), [limits.min, limits.max, 0]])
    y = np.concatenate([rng.integers(1, 9, 50), [limits.max, 3, 5]])
    x, y = x.astype(dtype.numpy), y.astype(dtype.numpy)
    wide, divisor = x.astype(object), y.astype(object)
    quotient = [int(abs(a) // b) * (1 if a >= 0 else -1) for a, b in zip(wide, divisor, strict=True)]
    np.testing.assert_array_equal(apply("div", [x, y], host(), dtype), np.array(quotient).astype(dtype.numpy))
    np.testing.assert_array_equal(apply("rem", [x, y], host(), dtype), np.fmod(x, y))
    shift = (y % (dtype.itemsize * 8)).astype(dtype.numpy)
    np.testing.assert_array_equal(apply("shift_left", [x, shift], host(), dtype), np.left_shift(x, shift))
    np.testing.assert_array_equal(apply("shift_right", [x, shift], host(), dtype), np.right_shift(x, shift))
    np.testing.assert_array_equal(apply("pow", [x, shift], host(), dtype), np.power(x, shift))


def test_integer_division_never_traps() -> None:
    x = np.array([5, -5, -(2**31), 0], np.int32)
    np.testing.assert_array_equal(
        apply("div", [x, np.array([0, 0, -1, 0], np.int32)], host(), DType.INT32), [0, 0, x[2], 0]
    )
    np.testing.assert_array_equal(
        apply("rem", [x, np.array([0, 0, -1, 0], np.int32)], host(), DType.INT32), [0, 0, 0, 0]
    )


@pytest.mark.parametrize("to", [DType.INT8, DType.INT32, DType.INT64, DType.UINT8])
def test_float_to_integer_saturates(to: DType) -> None:
    x = np.array([0.9, -0.9, 100.7, -128.9, 300, -1e30, 1e30, np.nan], np.float32)
    y = np.empty(x.size, to.numpy)

    def write(k: Kernel) -> None:
        k.operand(1, to).store(k.operand(0, F32).load(0, 8).cast(to))

    run(write, [x, y])
    limits = np.iinfo(to.numpy)
    np.testing.assert_array_equal(
        y, [int(np.clip(np.trunc(v), limits.min, limits.max)) if v == v else 0 for v in x.tolist()]
    )
