"""Elementary functions on vectors of float32, correct for NaN, infinities and denormals, without library calls.

Greatest error over all float32 arguments, in units in the last place (measured by tests/core/codegen/test_vmath.py):
exp 1.5, log 1, tanh 6, sigmoid 3 (it is 0 below -87.7), erf 5, sin and cos 2 (beyond |x| = 2**20 the C library computes
them), pow 1.

Coefficients are minimax fits (Lawson's iteration on Chebyshev nodes, rounded to float32 from the largest down). float16
computes in float32; float64 calls the C library lane by lane.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from lathe.core.codegen import erf_polynomial, llvm_ir
from lathe.core.codegen.llvm_ir import Constant, Value
from lathe.core.codegen.registers import Val, register_type
from lathe.core.ir.types import DType

if TYPE_CHECKING:
    from lathe.core.codegen.arithmetic import Arithmetic

F32, F64, I32_ = DType.FLOAT32, DType.FLOAT64, DType.INT32
Unary: TypeAlias = "Callable[[Arithmetic, Val], Val]"

_LOG2E = math.log2(math.e)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4  # the high part has 9 bits: k * high is exact
_PI_2_HIGH = float.fromhex("0x1.921fb544p+0")  # 33 bits of pi/2: k * high is exact in float64 up to k = 2**20
_PI_2_LOW = float.fromhex("0x1.0b4611a626331p-34")
_TO_INTEGER = 1.5 * 2**23  # adding it leaves a small float rounded to an integer in the low bits
_TO_INTEGER_64 = 1.5 * 2**52  # the same for float64
_TRIG_LIMIT = 2.0**20


def _float32_only(library: str) -> Callable[[Unary], Unary]:
    """Decorator for a function of float32 vectors, which makes it accept float16 and float64 too.

    float16 is computed in float32; float64 calls the C function `library` for each lane.
    """

    def decorate(function: Unary) -> Unary:
        @functools.wraps(function)
        def dispatch(e: Arithmetic, x: Val) -> Val:
            if x.dtype is DType.FLOAT16:
                return e.cast(function(e, e.cast(x, F32)), DType.FLOAT16)
            return function(e, x) if x.dtype is F32 else c_library(e, library, x)

        return dispatch

    return decorate


@_float32_only("exp")
def exp(e: Arithmetic, x: Val) -> Val:
    """exp(x) as 2^k * exp(r) with |r| <= ln(2)/2. Clamping x changes no result: infinite or zero there. NaN stays."""
    x = e.min(e.max(x, -105.0), 89.0)
    k, bits = _nearest_integer(e, x * _LOG2E)
    r = e.fma(k, -_LN2_LOW, e.fma(k, -_LN2_HIGH, x))
    p = polynomial(e, r, _EXP)
    return _scale_by_power_of_two(e, e.fma(e.mul(r, r), p, r) + 1.0, bits)


def exp_of_nonpositive(e: Arithmetic, x: Val) -> Val:
    """exp of float32 values <= 0, in fewer steps than `exp`: below -87.68 it is zero, not denormal. NaN stays."""
    x = e.select(e.lt(x, -88.0), -88.0, x)
    k, bits = _nearest_integer(e, x * _LOG2E)
    r = e.fma(k, -_LN2_LOW, e.fma(k, -_LN2_HIGH, x))
    p = polynomial(e, r, _EXP)
    power = e.bitcast(e.shift_left(bits + 127, 23), F32)  # zero for the least exponent, -127
    return (e.fma(e.mul(r, r), p, r) + 1.0) * power


@_float32_only("log")
def log(e: Arithmetic, x: Val) -> Val:
    """The natural logarithm k*ln(2) + ln(m) of x = 2^k * m, with m between sqrt(1/2) and sqrt(2).

    Minus infinity at 0, NaN below.
    """
    tiny = e.lt(x, 2.0**-126)
    scaled = e.select(tiny, x * 2.0**23, x)
    bits = e.bitcast(scaled, I32_)
    exponent = e.shift_right(bits - 0x3F3504F3, 23)  # 0x3F3504F3 is sqrt(1/2)
    mantissa = e.bitcast(bits - e.shift_left(exponent, 23), F32)
    k = e.cast(exponent, F32) + e.select(tiny, e.const(-23.0, F32), 0.0)
    f = mantissa - 1.0
    square = f * f
    tail = e.fma(square * f, polynomial(e, f, _LOG), e.fma(k, _LN2_LOW, square * -0.5))
    result = e.fma(k, _LN2_HIGH, f + tail)
    result = e.select(e.eq(x, 0.0), -math.inf, e.select(e.lt(x, 0.0), math.nan, result))
    return e.select(e.bit_or(e.is_nan(x), e.eq(x, math.inf)), x, result)


@_float32_only("tanh")
def tanh(e: Arithmetic, x: Val) -> Val:
    """x * p(x^2) / q(x^2), clamped to [-1, 1]: the quotient exceeds 1 from |x| = 8.3 on, where tanh rounds to 1."""
    x = e.min(e.max(x, -_TANH_END), _TANH_END)
    square = x * x
    ratio = quotient(e, x * polynomial(e, square, _TANH_UPPER), polynomial(e, square, _TANH_LOWER))
    return e.min(e.max(ratio, -1.0), 1.0)


def sigmoid(e: Arithmetic, x: Val) -> Val:
    """1 / (1 + exp(-x)): for float32 and float16 from the exponential of -|x|, which cannot overflow."""
    if x.dtype is DType.FLOAT16:
        return e.cast(sigmoid(e, e.cast(x, F32)), DType.FLOAT16)
    if x.dtype is not F32:
        return 1.0 / (e.exp(-x) + 1.0)
    power = exp_of_nonpositive(e, -e.abs(x))
    return quotient(e, e.select(e.lt(x, 0.0), power, 1.0), power + 1.0)


def quotient(e: Arithmetic, x: Val, y: Val) -> Val:
    """x / y within 1 unit in the last place, for y that is neither zero, infinite nor denormal.

    AVX-512 divides a vector in the time of a dozen products, but estimates a reciprocal to 14 bits in the time of two.
    One Newton step on the quotient is then enough.
    """
    if e.kernel.target.name != "avx512" or x.lanes != 16 or y.lanes != 16 or x.dtype is not F32:
        return x / y
    type_ = register_type(F32, 16)
    every = llvm_ir.number(llvm_ir.integer(16), -1)
    arguments = [y.ir, llvm_ir.zero(type_), every]
    estimate = Val(e.kernel, e.kernel.call("llvm.x86.avx512.rcp14.ps.512", type_, arguments), F32, 16)
    first = x * estimate
    return e.fma(e.fma(-first, y, x), estimate, first)


@_float32_only("erf")
def erf(e: Arithmetic, x: Val) -> Val:
    """x * p(s), where s maps x^2 from [0, 3.75^2] to [-1, 1], so that powers of s and rounding errors stay small.

    Larger |x| give 1 or -1. There is no division and no exponential, since nothing hides their latency in an epilogue.
    """
    s = e.min(e.fma(x * x, 2 / erf_polynomial.END**2, -1.0), 1.0)
    return e.min(e.max(x * polynomial(e, s, erf_polynomial.COEFFICIENTS), -1.0), 1.0)


@_float32_only("sin")
def sin(e: Arithmetic, x: Val) -> Val:
    return _circular(e, x, 0, "sin")


@_float32_only("cos")
def cos(e: Arithmetic, x: Val) -> Val:
    return _circular(e, x, 1, "cos")


def pow(e: Arithmetic, x: Val, y: Val) -> Val:
    """C's pow; integers multiply repeatedly. float32 computes exp2(y * log2|x|) in float64, float64 calls C's pow.

    float16 computes in float32. Exponents that are constants of 1, 2, 3, 0.5 or -1 take products, a root or a quotient.
    """
    if x.dtype is DType.FLOAT16:
        return e.cast(pow(e, e.cast(x, F32), e.cast(y, F32)), DType.FLOAT16)
    if x.dtype.is_integer:
        return _integer_power(e, x, y)
    exponent = _constant_value(y)
    if exponent in (1.0, 2.0, 3.0, 0.5, -1.0):
        return _simple_power(e, x, exponent)
    return _power(e, x, y) if x.dtype is F32 else c_library(e, "pow", x, y)


def fmod(e: Arithmetic, x: Val, y: Val) -> Val:
    """C's fmod: the remainder of x / y with the sign of x, by a C library call per lane."""
    if x.dtype is DType.FLOAT16:
        return e.cast(fmod(e, e.cast(x, F32), e.cast(y, F32)), DType.FLOAT16)
    return c_library(e, "fmodf" if x.dtype is F32 else "fmod", x, y)


def rounded(e: Arithmetic, x: Val, how: str) -> Val:
    """`floor`, `ceil` or `roundeven` of a float; integers are returned unchanged."""
    if not x.dtype.is_float:
        return x
    type_ = x.ir.type
    return Val(e.kernel, e.kernel.call(f"llvm.{how}.{type_.suffix}", type_, [x.ir]), x.dtype, x.lanes)


def c_library(e: Arithmetic, name: str, *operands: Val) -> Val:
    """The results of the C function `name` of float32 or float64, called for each lane of the operands."""
    first = operands[0]
    scalar = register_type(first.dtype, 1)
    if first.lanes == 1:
        return Val(e.kernel, e.kernel.call(name, scalar, [x.ir for x in operands]), first.dtype)
    result: Value = llvm_ir.undefined(first.ir.type)
    for lane in range(first.lanes):
        value = e.kernel.call(name, scalar, [e.lane(x, lane).ir for x in operands])
        result = e.b.insert(result, value, lane)
    return Val(e.kernel, result, first.dtype, first.lanes)


def polynomial(e: Arithmetic, x: Val, coefficients: Sequence[float]) -> Val:
    """The sum of `coefficients[i] * x**i`, by Horner's rule."""
    total: Val = e.splat(e.const(coefficients[-1], x.dtype), x.lanes)
    for coefficient in reversed(coefficients[:-1]):
        total = e.fma(total, x, coefficient)
    return total


def _nearest_integer(e: Arithmetic, x: Val) -> tuple[Val, Val]:
    """`x` (|x| < 2^22) rounded to the nearest integer, as a float and as int32. NaN gives NaN and some integer."""
    shifted = x + _TO_INTEGER
    return shifted - _TO_INTEGER, e.bitcast(shifted, I32_) - 0x4B400000


def _scale_by_power_of_two(e: Arithmetic, x: Val, k: Val) -> Val:
    """x * 2^k for |k| <= 252, in two steps so that denormal results are rounded once and large ones overflow."""
    half = e.shift_right(k, 1)
    for part in (half, k - half):
        x = x * e.bitcast(e.shift_left(part + 127, 23), F32)
    return x


def _circular(e: Arithmetic, x: Val, quarter: int, library: str) -> Val:
    """sin(x + quarter*pi/2): reduced to |r| <= pi/4; the quadrant selects a sine or cosine polynomial."""
    beyond = e.bit_not(e.le(e.abs(x), _TRIG_LIMIT))
    r, integer = _reduced_angle(e, x)
    square = r * r
    sine = e.fma(r * square, polynomial(e, square, _SIN), r)
    cosine = e.fma(square * square, polynomial(e, square, _COS), e.fma(square, -0.5, 1.0))
    quadrant = integer + quarter
    value = e.select(e.eq(e.bit_and(quadrant, 1), 0), sine, cosine)
    signed = e.bitcast(e.bit_xor(e.bitcast(value, I32_), e.shift_left(e.bit_and(quadrant, 2), 30)), F32)

    def far() -> list[Val]:
        """The results where at least one lane is beyond the limit: those lanes take the C library's result.

        The other lanes keep the polynomial's, so that no result depends on other lanes.
        """
        return [e.select(beyond, c_library(e, f"{library}f", x), signed)]

    return e.kernel.choose(e.any(beyond), far, lambda: [signed])[0]


def _reduced_angle(e: Arithmetic, x: Val) -> tuple[Val, Val]:
    """x - k*pi/2 for the nearest integer k as float32, and k as int32. Computed in float64 to avoid cancellation."""
    wide = e.cast(x, F64)
    shifted = wide * (2 / math.pi) + _TO_INTEGER_64
    k = shifted - _TO_INTEGER_64
    r = e.fma(k, -_PI_2_LOW, e.fma(k, -_PI_2_HIGH, wide))
    return e.cast(r, F32), e.cast(e.bitcast(shifted, DType.INT64), I32_)


def _power(e: Arithmetic, x: Val, y: Val) -> Val:
    wide, wide_y = e.cast(e.abs(x), F64), e.cast(y, F64)
    magnitude = e.cast(_exp2(e, wide_y * _log2(e, wide)), F32)
    whole = e.eq(rounded(e, y, "floor"), y)
    half = y * 0.5
    odd = e.bit_and(whole, e.bit_not(e.eq(rounded(e, half, "floor"), half)))
    negative = e.lt(e.bitcast(x, I32_), 0)
    result = e.select(e.bit_and(negative, odd), -magnitude, magnitude)
    finite_negative = e.bit_and(e.lt(x, 0.0), e.bit_not(e.eq(x, -math.inf)))
    result = e.select(e.bit_and(finite_negative, e.bit_not(whole)), math.nan, result)
    result = e.select(e.bit_or(e.is_nan(x), e.is_nan(y)), math.nan, result)
    ones = e.bit_and(e.eq(e.abs(x), 1.0), e.eq(e.abs(y), math.inf))
    return e.select(e.bit_or(e.bit_or(e.eq(y, 0.0), e.eq(x, 1.0)), ones), 1.0, result)


def _log2(e: Arithmetic, x: Val) -> Val:
    """log2 of positive float64 that came from float32 (so normal), to 1e-13 relative; -inf at 0, inf at inf."""
    bits = e.bitcast(x, DType.INT64)
    exponent = e.shift_right(bits - 0x3FE6A09E667F3BCD, 52)
    mantissa = e.bitcast(bits - e.shift_left(exponent, 52), F64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = polynomial(e, ratio * ratio, [2 * _LOG2E / (2 * i + 1) for i in range(9)])
    result = e.fma(ratio, series, e.cast(exponent, F64))
    result = e.select(e.eq(x, 0.0), -math.inf, result)
    return e.select(e.eq(x, math.inf), math.inf, result)


def _exp2(e: Arithmetic, x: Val) -> Val:
    """2^x in float64 to 1e-11 relative; its range suffices to overflow and underflow float32."""
    clamped = e.min(e.max(x, -300.0), 300.0)
    shifted = clamped + _TO_INTEGER_64
    fraction = clamped - (shifted - _TO_INTEGER_64)
    p = polynomial(e, fraction, [math.log(2) ** i / math.factorial(i) for i in range(11)])
    power = e.shift_left(e.bitcast(shifted, DType.INT64) - 0x4338000000000000 + 1023, 52)
    return p * e.bitcast(power, F64)


def _simple_power(e: Arithmetic, x: Val, exponent: float) -> Val:
    if exponent == 0.5:  # pow(-0, 0.5) is +0 and pow(-inf, 0.5) is +inf, unlike sqrt
        return e.select(e.eq(x, -math.inf), math.inf, e.abs(e.sqrt(x + 0.0)))
    if exponent == -1.0:
        return 1.0 / x
    return {1.0: x, 2.0: x * x, 3.0: x * x * x}[exponent]


def _integer_power(e: Arithmetic, x: Val, y: Val) -> Val:
    """x ** y of integers by repeated squaring; a negative exponent gives 0, except for the bases 1 and -1."""
    k = e.kernel
    one = e.splat(e.const(1, x.dtype), x.lanes)
    with k.fold(0, x.dtype.itemsize * 8, [one, x, y]) as fold:
        result, square, rest = fold.values
        odd = e.eq(e.bit_and(rest, 1), 1)
        fold.values = [e.select(odd, result * square, result), square * square, e.shift_right(rest, 1)]
    result = fold.values[0]
    if x.dtype.label.startswith("uint"):
        return result
    units = e.select(e.eq(x, 1), one, e.select(e.eq(x, -1), e.select(e.eq(e.bit_and(y, 1), 1), -1, one), 0))
    return e.select(e.lt(y, 0), units, result)


def _constant_value(x: Val) -> float | None:
    """The value of a float constant that is the same in all lanes, otherwise None."""
    known = x.ir.known if isinstance(x.ir, Constant) else None
    parts = known if isinstance(known, tuple) else (known,)
    first = parts[0]
    return first if isinstance(first, float) and all(part == first for part in parts) else None


_EXP = (0.5, 0.1666666567325592, 0.041666463017463684, 0.008333571255207062, 0.0013935116585344076,
        1.9739725394174457e-4)  # fmt: skip
_LOG = (0.3333331346511841, -0.25000008940696716, 0.2000207155942917, -0.16667988896369934, 0.14220358431339264,
        -0.12406233698129654, 0.11883548647165298, -0.11670098453760147, 0.06749269366264343)  # fmt: skip
_TANH_END = 9.0  # where the quotient is 1 + 3.6e-6
_TANH_UPPER = (1.0, 0.1297922432422638, 0.002985862549394369, 9.878664059215225e-06, -1.4704231610096485e-08,
               2.3508634275359874e-11)  # fmt: skip
_TANH_LOWER = (1.0, 0.46312540769577026, 0.024027926847338676, 0.0002372033050050959)
_SIN = (-0.1666666716337204, 0.008333379402756691, -1.9853068806696683e-4, 2.832629434124101e-06)
_COS = (0.0416666679084301, -0.0013888980029150844, 2.482200761733111e-05, -2.8878451985292486e-07)
