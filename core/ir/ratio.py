"""Fractions of dimensions in float32, for models that convert a length to floating point and divide it.

A `Ratio` stands for a number that every run computes exactly, or closely enough that rounding it up, down or towards
zero gives the right integer, if the assumptions of `Ratio.supposed` hold. Therefore it supports few operations: sums
with numbers, products, and quotients by numbers, where the operands that float32 would round are excluded. All other
arithmetic raises TypeError, and so do every comparison, `==` included, and `bool`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TypeAlias, Union

from lathe.core.ir.dim import Dim, SymDim, floor_div, is_never_negative, symbols
from lathe.core.ir.graph import Array

# float32 has a 24-bit mantissa. A quotient x / k that is no integer is at least 1/k away from the nearest one. If x has
# at most 22 bits, two roundings of half a unit in the last place add up to at most a quarter of that.
MOST = 1 << 22
_SMALL = 1 << 10  # bound of summands and denominators: with it, every intermediate result fits in 24 bits


Number: TypeAlias = Union["Ratio", Dim, float]


class Ratio:
    """The number `top / bottom`, with `bottom` positive. TypeError if `bottom` is more than 1024.

    Common factors are not cancelled, so the bounds of `top` (`supposed`) also hold for the numbers that a run computes
    before it divides.
    """

    __slots__ = ("bottom", "top")

    def __init__(self, top: Dim, bottom: int = 1) -> None:
        if bottom > _SMALL:
            raise TypeError(f"{top} / {bottom} may be rounded on the way")
        self.top, self.bottom = top, bottom

    def __repr__(self) -> str:
        return f"Ratio({self.top}, {self.bottom})"

    @property
    def is_exact(self) -> bool:
        """Whether float32 represents the number exactly: `bottom` is a power of two. This assumes `supposed`."""
        return self.bottom & (self.bottom - 1) == 0

    @property
    def names(self) -> frozenset[str]:
        """The names of all symbols that the number depends on."""
        return symbols(self.top)

    @property
    def supposed(self) -> tuple[Dim, ...]:
        """Two dimensions that must not be negative for `floor`, `ceil` and `whole` to give what a run in float32 gives.

        They say that `top` lies between -MOST and MOST.
        """
        return MOST - self.top, MOST + self.top

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"only a run shows whether {self} equals {other}")

    def __bool__(self) -> bool:
        raise TypeError(f"only a run shows whether {self} is 0")

    def __add__(self, other: Number) -> Ratio:
        addend = _exact(other)
        if not isinstance(addend.top, int) or abs(addend.top) > _SMALL or (addend.bottom > 1 and not self.is_exact):
            raise TypeError(f"only a run shows how {self} and {other} are rounded")
        return Ratio(self.top * addend.bottom + addend.top * self.bottom, self.bottom * addend.bottom)

    __radd__ = __add__

    def __neg__(self) -> Ratio:
        return Ratio(-self.top, self.bottom)

    def __sub__(self, other: Number) -> Ratio:
        return self + -_exact(other)

    def __rsub__(self, other: Number) -> Ratio:
        return -self + other

    def __mul__(self, other: Number) -> Ratio:
        factor = _exact(other)
        if not self.is_exact:
            raise TypeError(f"only a run shows how {self} times {other} is rounded")
        return Ratio(self.top * factor.top, self.bottom * factor.bottom)

    __rmul__ = __mul__

    def __truediv__(self, other: Number) -> Ratio:
        divisor = _exact(other)
        if not isinstance(divisor.top, int) or divisor.top == 0 or not self.is_exact:
            raise TypeError(f"only a run shows what {self} / {other} is")
        sign = 1 if divisor.top > 0 else -1
        return Ratio(self.top * (divisor.bottom * sign), self.bottom * abs(divisor.top))

    def __floor__(self) -> Ratio:
        return Ratio(floor_div(self.top, self.bottom))

    def __ceil__(self) -> Ratio:
        return Ratio(floor_div(self.top + (self.bottom - 1), self.bottom))

    @property
    def whole(self) -> Dim:
        """The number rounded towards zero, as Cast does. TypeError if `bottom` is not 1 and `top` may be negative."""
        if self.bottom > 1 and not is_never_negative(self.top):
            raise TypeError(f"only a run shows whether {self} is rounded up or down")
        return floor_div(self.top, self.bottom)


def ratio_of(number: object) -> object:
    """A symbolic dimension as a Ratio; any other object unchanged."""
    return Ratio(number) if isinstance(number, SymDim) else number


def truncate(number: Ratio | float) -> Dim:
    """A float32 number rounded towards zero, as Cast does. TypeError as in `Ratio.whole`. A float must be finite."""
    return number.whole if isinstance(number, Ratio) else int(number)


def has_ratios(array: Array) -> bool:
    """Whether any element is a ratio."""
    return array.dtype == object and any(isinstance(item, Ratio) for item in array.ravel().tolist())


def rounding_assumptions(array: Array | None) -> list[Dim]:
    """The assumptions (`Ratio.supposed`: dimensions that must not be negative) of all ratios in `array`.

    Empty if the array is None or has no ratios.
    """
    items = [] if array is None or array.dtype != object else array.ravel().tolist()
    return [dim for item in items if isinstance(item, Ratio) for dim in item.supposed]


def _exact(number: Number) -> Ratio:
    """A number as a Ratio that float32 represents exactly. TypeError for a number that may have been rounded."""
    if isinstance(number, Ratio):
        found = number
    elif isinstance(number, int | SymDim):
        found = Ratio(number)
    else:
        try:
            fraction = Fraction(float(number))
        except (OverflowError, ValueError):  # infinity, NaN
            raise TypeError(f"{number} is no fraction") from None
        if abs(fraction.numerator) > MOST:
            raise TypeError(f"{number} may have been rounded")
        found = Ratio(fraction.numerator, fraction.denominator)
    if not found.is_exact:
        raise TypeError(f"only a run shows how {found} is rounded")
    return found
