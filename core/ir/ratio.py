"""Fractions of dimensions, in float32: what models compute when they divide a length as a floating-point number.

A `Ratio` stands for a number that every run computes exactly, or near enough to be rounded up, down or towards zero to
the same integer. So it takes few operations: sums and products with integers, quotients by integers, and halves,
quarters and so on. All others raise TypeError, as does whatever a run alone can answer.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TypeAlias, Union

from core.ir.dim import Dim, SymDim, floor_div, is_never_negative, symbols
from core.ir.graph import Array

# float32 has 24 bits. A quotient x / k that is no integer is at least 1/k away from one; with 22 bits of x, two
# roundings of half a unit in the last place are at most a quarter of that.
MOST = 1 << 22
_SMALL = 1 << 10  # the largest summand, and the largest denominator: every intermediate result has 24 bits then


Number: TypeAlias = Union["Ratio", Dim, float]


class Ratio:
    """`top / bottom`, whose terms have no common factor taken out: `top` is as large as any number on the way to it."""

    __slots__ = ("bottom", "top")

    def __init__(self, top: Dim, bottom: int = 1) -> None:
        if bottom > _SMALL:
            raise TypeError(f"{top} / {bottom} may be rounded on the way")
        self.top, self.bottom = top, bottom

    def __repr__(self) -> str:
        return f"Ratio({self.top}, {self.bottom})"

    @property
    def is_exact(self) -> bool:
        """Whether float32 holds the number itself: its denominator is a power of two."""
        return self.bottom & (self.bottom - 1) == 0

    @property
    def names(self) -> frozenset[str]:
        """The names of all symbols that the number depends on."""
        return symbols(self.top)

    @property
    def supposed(self) -> tuple[Dim, ...]:
        """Dimensions that must not be negative: float32 then rounds this number as `floor`, `ceil` and `whole` do."""
        return MOST - self.top, MOST + self.top

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"only a run shows whether {self} equals {other}")

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
        """The integer that Cast makes of it, rounding towards zero. TypeError where its sign is not known."""
        if self.bottom > 1 and not is_never_negative(self.top):
            raise TypeError(f"only a run shows whether {self} is rounded up or down")
        return floor_div(self.top, self.bottom)


def ratio_of(number: object) -> object:
    """A dimension as float32; any other number as it is."""
    return Ratio(number) if isinstance(number, SymDim) else number


def whole_of(number: Ratio | float) -> Dim:
    """A number of float32 as the integer that Cast makes of it."""
    return number.whole if isinstance(number, Ratio) else int(number)


def has_ratios(array: Array) -> bool:
    """Whether any element is a ratio."""
    return array.dtype == object and any(isinstance(item, Ratio) for item in array.ravel().tolist())


def rounding_suppositions(array: Array | None) -> list[Dim]:
    """The suppositions of all ratios among the elements, see `Ratio.supposed`; none for values that are not known."""
    items = [] if array is None or array.dtype != object else array.ravel().tolist()
    return [dim for item in items if isinstance(item, Ratio) for dim in item.supposed]


def _exact(number: Number) -> Ratio:
    """A number that float32 holds, as a ratio. TypeError for one that may have been rounded."""
    if isinstance(number, Ratio):
        found = number
    elif isinstance(number, int | SymDim):
        found = Ratio(number)
    else:
        fraction = Fraction(float(number))
        if abs(fraction.numerator) > MOST:
            raise TypeError(f"{number} may have been rounded")
        found = Ratio(fraction.numerator, fraction.denominator)
    if not found.is_exact:
        raise TypeError(f"only a run shows how {found} is rounded")
    return found
