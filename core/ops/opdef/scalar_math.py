"""Functions composed of the primitives of `ScalarOps`, accurate to a few ulp in float32 and float64."""

from __future__ import annotations

from math import factorial, log, pi

from lathe.core.ir.types import DType
from lathe.core.ops.opdef.scalar import Operand, ScalarOps

# Rational approximations for float64, highest power first (S. Moshier, Cephes: asin.c, atan.c).
_ASIN_UPPER = (
    4.253011369004428248960e-3, -6.019598008014123785661e-1, 5.444622390564711410273, -1.626247967210700244449e1,
    1.956261983317594739197e1, -8.198089802484824371615,
)  # fmt: skip
_ASIN_LOWER = (
    1.0, -1.474091372988853791896e1, 7.049610280856842141659e1, -1.471791292232726029859e2, 1.395105614657485689735e2,
    -4.918853881490881290097e1,
)  # fmt: skip
_ATAN_UPPER = (
    -8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1, -1.228866684490136173410e2,
    -6.485021904942025371773e1,
)  # fmt: skip
_ATAN_LOWER = (
    1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2, 4.853903996359136964868e2,
    1.945506571482613964425e2,
)  # fmt: skip
# The terms of the Taylor series of sinh that matter for |x| < 1, highest power first.
_SINH_32 = tuple(1 / factorial(power) for power in (9, 7, 5, 3, 1))
_SINH_64 = tuple(1 / factorial(power) for power in (17, 15, 13, 11, 9, 7, 5, 3, 1))


def polynomial(e: ScalarOps, x: Operand, *coefficients: float) -> Operand:
    """A polynomial in x by Horner's scheme; the coefficient of the highest power comes first."""
    dtype = e.dtype(x)
    total = e.const(coefficients[0], dtype)
    for coefficient in coefficients[1:]:
        total = e.fma(total, x, e.const(coefficient, dtype))
    return total


def with_sign_of(e: ScalarOps, size: Operand, x: Operand) -> Operand:
    """`size`, which is not negative, with the sign of `x`; if `x` is a zero, `x` itself."""
    return e.select(e.eq(x, 0.0), x, e.select(e.lt(x, 0.0), e.neg(size), size))


def log1p(e: ScalarOps, x: Operand) -> Operand:
    """log(1 + x), accurate for small x too: the rounding error of 1 + x cancels (W. Kahan)."""
    one_plus = e.add(x, 1.0)
    rounded = e.sub(one_plus, 1.0)
    tiny = e.eq(rounded, 0.0)
    infinite = e.eq(one_plus, x)  # x is so large that 1 + x == x: the quotient below would be inf/inf or 1
    ratio = e.div(x, e.select(tiny, e.const(1.0, e.dtype(x)), rounded))
    return e.select(tiny, x, e.mul(e.log(one_plus), e.select(infinite, e.const(1.0, e.dtype(x)), ratio)))


def softplus(e: ScalarOps, x: Operand) -> Operand:
    """log(1 + exp(x)) without overflow."""
    return e.add(e.max(x, 0.0), log1p(e, e.exp(e.neg(e.abs(x)))))


def sinh(e: ScalarOps, x: Operand) -> Operand:
    """sinh(x) from exponentials; for |x| < 1, where their difference would cancel, by a Taylor polynomial."""
    half = e.exp(e.sub(e.abs(x), log(2.0)))  # exp(|x|)/2, which overflows only where sinh does
    large = with_sign_of(e, e.sub(half, e.div(e.const(0.25, e.dtype(x)), half)), x)
    square = e.mul(x, x)
    small = e.mul(x, polynomial(e, square, *(_SINH_64 if e.dtype(x) is DType.FLOAT64 else _SINH_32)))
    return e.select(e.lt(e.abs(x), 1.0), small, large)


def cosh(e: ScalarOps, x: Operand) -> Operand:
    half = e.exp(e.sub(e.abs(x), log(2.0)))
    return e.add(half, e.div(e.const(0.25, e.dtype(x)), half))


def asinh(e: ScalarOps, x: Operand) -> Operand:
    """asinh(x), with the sign of x: log1p(a + a*a/(1 + sqrt(a*a + 1))) for a = |x|; log(2a) for a of at least 1e9."""
    size = e.abs(x)
    capped = e.min(size, 1e9)
    square = e.mul(capped, capped)
    inner = e.add(capped, e.div(square, e.add(e.sqrt(e.add(square, 1.0)), 1.0)))
    large = e.add(e.log(size), log(2.0))
    return with_sign_of(e, e.select(e.lt(size, 1e9), log1p(e, inner), large), x)


def acosh(e: ScalarOps, x: Operand) -> Operand:
    """acosh(x): log1p(t + sqrt(t) sqrt(t + 2)) for t = x - 1; log(2x) for x of at least 1e9. NaN for x below 1."""
    t = e.sub(e.min(x, 1e9), 1.0)
    near = log1p(e, e.add(t, e.mul(e.sqrt(t), e.sqrt(e.add(t, 2.0)))))
    return e.select(e.lt(x, 1e9), near, e.add(e.log(x), log(2.0)))


def atanh(e: ScalarOps, x: Operand) -> Operand:
    size = e.abs(x)
    ratio = e.div(e.add(size, size), e.sub(e.const(1.0, e.dtype(x)), size))
    return with_sign_of(e, e.mul(log1p(e, ratio), 0.5), x)


def atan(e: ScalarOps, x: Operand) -> Operand:
    """atan(x): |x| is reduced to at most tan(pi/8), then an odd polynomial, or a quotient of two for float64.

    S. Moshier, Cephes: atanf, atan.
    """
    size = e.abs(x)
    one = e.const(1.0, e.dtype(x))
    steep, middle = e.lt(2.414213562373095, size), e.lt(0.4142135623730950, size)
    halfway = e.div(e.sub(size, 1.0), e.add(size, 1.0))
    reduced = e.select(steep, e.neg(e.div(one, size)), e.select(middle, halfway, size))
    zero = e.const(0.0, e.dtype(x))
    offset = e.select(steep, e.const(pi / 2, e.dtype(x)), e.select(middle, e.const(pi / 4, e.dtype(x)), zero))
    z = e.mul(reduced, reduced)
    if e.dtype(x) is DType.FLOAT64:
        odd = e.div(polynomial(e, z, *_ATAN_UPPER), polynomial(e, z, *_ATAN_LOWER))
    else:
        odd = polynomial(e, z, 8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
    return with_sign_of(e, e.add(offset, e.fma(e.mul(odd, z), reduced, reduced)), x)


def asin(e: ScalarOps, x: Operand) -> Operand:
    """asin(x); for a = |x| above 1/2 from the half angle: asin(a) = pi/2 - 2*asin(sqrt((1 - a)/2)).

    S. Moshier, Cephes: asinf, asin.
    """
    size = e.abs(x)
    large = e.lt(0.5, size)
    inner = _asin_core(e, large, size)
    return with_sign_of(e, e.select(large, e.sub(e.const(pi / 2, e.dtype(x)), e.add(inner, inner)), inner), x)


def acos(e: ScalarOps, x: Operand) -> Operand:
    """acos(x); for |x| above 1/2 from the half angle, so that the result stays accurate near 1."""
    size = e.abs(x)
    large = e.lt(0.5, size)
    inner = _asin_core(e, large, size)
    twice = e.add(inner, inner)
    far = e.select(e.lt(x, 0.0), e.sub(e.const(pi, e.dtype(x)), twice), twice)
    near = e.sub(e.const(pi / 2, e.dtype(x)), with_sign_of(e, inner, x))
    return e.select(large, far, near)


def _asin_core(e: ScalarOps, large: Operand, size: Operand) -> Operand:
    """asin(size), or asin(sqrt((1 - size)/2)) where `large` (size is above 1/2): angles of at most asin(1/2)."""
    half_angle = e.mul(e.sub(e.const(1.0, e.dtype(size)), size), 0.5)
    z = e.select(large, half_angle, e.mul(size, size))
    root = e.select(large, e.sqrt(half_angle), size)
    if e.dtype(size) is DType.FLOAT64:
        odd = e.div(polynomial(e, z, *_ASIN_UPPER), polynomial(e, z, *_ASIN_LOWER))
    else:
        odd = polynomial(e, z, 4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
    return e.fma(e.mul(odd, z), root, root)
