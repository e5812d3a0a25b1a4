"""`Algebra`: the scalar algebra of `lathe.core.ops.opdef.scalar` as lines of a Triton function, on blocks of any shape.

Narrow floats (float16, bfloat16) are float32 in registers. They are rounded by casts in a body, and by stores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lathe.core.codegen import erf_polynomial
from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.source import Writer

NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})
F32, F64 = DType.FLOAT32, DType.FLOAT64

# (tanh(x) - x) / x^3 for |x| < 0.625, in powers of x^2: a polynomial for float32, a quotient of polynomials for float64
_TANH = (-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3)
_TANH_UPPER_64 = (-1.61468768441708447952e3, -9.92877231001918586564e1, -9.64399179425052238628e-1)
_TANH_LOWER_64 = (4.84406305325125486048e3, 2.23548839060100448583e3, 1.12811678491631932402e2, 1.0)


@dataclass(frozen=True, slots=True)
class Reg:
    """A variable of a kernel: a block or scalar of elements of `dtype`."""

    name: str
    dtype: DType


Operand: TypeAlias = Reg | float | int | bool


def type_name(dtype: DType) -> str:
    """Triton's name of an element type in memory."""
    return "tl.int8" if dtype is DType.BOOL else f"tl.{dtype}"


def register_name(dtype: DType) -> str:
    """Triton's name of an element type in registers."""
    return "tl.int1" if dtype is DType.BOOL else "tl.float32" if dtype in NARROW else f"tl.{dtype}"


def literal(value: float | int | bool) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return str(int(value)) if isinstance(value, bool) else repr(value)


class Algebra:
    """Implements `lathe.core.ops.opdef.scalar.ScalarOps`; each method writes lines of code."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    # Memory

    def load(self, pointer: str, offset: str, dtype: DType, mask: str | None = None, other: str | None = None) -> Reg:
        """The elements at `pointer + offset` where `mask` is true, `other` elsewhere, in their register type.

        Elsewhere they are undefined if `other` is None.
        """
        arguments = [
            f"{pointer} + {offset}",
            *([mask] if mask else []),
            *([f"other={other}"] if mask and other else []),
        ]
        return Reg(self.writer.let(self.register_expression(f"tl.load({', '.join(arguments)})", dtype), "x"), dtype)

    def register_expression(self, expression: str, dtype: DType) -> str:
        """The expression of a loaded value of type `dtype`, converted to its register type."""
        if dtype is DType.BOOL:
            return f"{expression} != 0"
        return f"{expression}.to(tl.float32)" if dtype in NARROW else expression

    def store(self, pointer: str, offset: str, value: Reg, mask: str | None = None) -> None:
        stored = f"{value.name}.to({type_name(value.dtype)})"
        self.writer.line(f"tl.store({', '.join([f'{pointer} + {offset}', stored, *([mask] if mask else [])])})")

    # Operands

    def dtype(self, x: Operand) -> DType:
        if isinstance(x, Reg):
            return x.dtype
        return DType.BOOL if isinstance(x, bool) else DType.INT64 if isinstance(x, int) else F32

    def const(self, value: float | int | bool, dtype: DType) -> Reg:
        number = float(value) if dtype.is_float else int(value)
        return self._new(f"tl.full((), {literal(number)}, {register_name(dtype)})", dtype)

    def cast(self, x: Operand, dtype: DType) -> Reg:
        value = self._reg(x)
        source = value.dtype
        if source is dtype:
            return value
        if dtype is DType.BOOL:
            return self._new(f"{value.name} != 0", dtype)
        if dtype in NARROW:
            return self._new(f"{value.name}.to({type_name(dtype)}).to(tl.float32)", dtype)
        if source.is_float and not dtype.is_float:
            return self._saturating_cast(value, dtype)
        return self._new(f"{value.name}.to({register_name(dtype)})", dtype)

    def _saturating_cast(self, x: Reg, dtype: DType) -> Reg:
        """A float truncated towards zero and saturated to the range of an integer type; NaN gives 0."""
        bits, signed = 8 * dtype.itemsize, dtype.label.startswith("int")
        low, end = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
        above, below = f"{x.name} >= {float(end)!r}", f"{x.name} <= {float(low)!r}"
        inside = f"({x.name} > {float(low)!r}) & ({x.name} < {float(end)!r})"
        safe = self.writer.let(f"tl.where({inside}, {x.name}, 0.0).to({type_name(dtype)})")
        most, least = self.const(end - 1, dtype), self.const(low, dtype)
        return self._new(f"tl.where({above}, {most.name}, tl.where({below}, {least.name}, {safe}))", dtype)

    # Arithmetic

    def add(self, x: Operand, y: Operand) -> Reg:
        return self._binary("{} + {}", x, y)

    def sub(self, x: Operand, y: Operand) -> Reg:
        return self._binary("{} - {}", x, y)

    def mul(self, x: Operand, y: Operand) -> Reg:
        return self._binary("{} * {}", x, y)

    def div(self, x: Operand, y: Operand) -> Reg:
        """The quotient; an integer divided by zero gives 0, as on a CPU."""
        a, c = self._match(x, y)
        if a.dtype is F64:
            return self._new(f"{a.name} / {c.name}", a.dtype)
        if a.dtype.is_float:
            return self._new(f"tl.div_rn({a.name}, {c.name})", a.dtype)
        return self._integer_division(a, c, "//")

    def rem(self, x: Operand, y: Operand) -> Reg:
        a, c = self._match(x, y)
        if a.dtype.is_float:
            return self._new(f"{a.name} % {c.name}", a.dtype)
        return self._integer_division(a, c, "%")

    def _integer_division(self, a: Reg, c: Reg, symbol: str) -> Reg:
        one, zero = self.const(1, a.dtype), self.const(0, a.dtype)
        safe = self.writer.let(f"tl.where({c.name} == 0, {one.name}, {c.name})")
        return self._new(f"tl.where({c.name} == 0, {zero.name}, {a.name} {symbol} {safe})", a.dtype)

    def fma(self, x: Operand, y: Operand, z: Operand) -> Reg:
        a, c, d = self._match(x, y, z)
        form = "tl.fma({}, {}, {})" if a.dtype.is_float else "{} * {} + {}"
        return self._new(form.format(a.name, c.name, d.name), a.dtype)

    def neg(self, x: Operand) -> Reg:
        """The negation. Floats are multiplied by -1: Triton's minus subtracts from 0, which loses the sign of zero."""
        value = self._reg(x)
        return self.mul(value, -1.0) if value.dtype.is_float else self.sub(0, value)

    def abs(self, x: Operand) -> Reg:
        return self._unary("tl.abs({})", x)

    def max(self, x: Operand, y: Operand) -> Reg:
        return self._extremum("maximum", "|", x, y)

    def min(self, x: Operand, y: Operand) -> Reg:
        return self._extremum("minimum", "&", x, y)

    def _extremum(self, name: str, logical: str, x: Operand, y: Operand) -> Reg:
        a, c = self._match(x, y)
        if a.dtype is DType.BOOL:
            return self._new(f"{a.name} {logical} {c.name}", a.dtype)
        nan = ", propagate_nan=tl.PropagateNan.ALL" if a.dtype.is_float else ""
        return self._new(f"tl.{name}({a.name}, {c.name}{nan})", a.dtype)

    # Functions

    def sqrt(self, x: Operand) -> Reg:
        value = self._reg(x)
        return self._unary("tl.sqrt({})" if value.dtype is F64 else "tl.sqrt_rn({})", value)

    def exp(self, x: Operand) -> Reg:
        return self._unary("tl.exp({})", x)

    def log(self, x: Operand) -> Reg:
        return self._unary("tl.log({})", x)

    def tanh(self, x: Operand) -> Reg:
        """1 - 2 / (exp(2 |x|) + 1), and an odd polynomial or quotient for small |x|, where that would cancel.

        Coefficients are those of S. Moshier, Cephes: tanhf and tanh.
        """
        value = self._reg(x)
        size = self.abs(value)
        power = self.exp(self.add(size, size))
        large = self.sub(1.0, self.div(2.0, self.add(power, 1.0)))
        square = self.mul(value, value)
        if value.dtype is F64:
            odd = self.div(self._polynomial(square, _TANH_UPPER_64), self._polynomial(square, _TANH_LOWER_64))
        else:
            odd = self._polynomial(square, _TANH)
        small = self.fma(self.mul(odd, square), value, value)
        signed = self.select(self.lt(value, 0.0), self.neg(large), large)
        return self.select(self.lt(size, 0.625), small, signed)

    def sigmoid(self, x: Operand) -> Reg:
        value = self._reg(x)
        return self.div(1.0, self.add(self.exp(self.neg(value)), 1.0))

    def erf(self, x: Operand) -> Reg:
        """In float32 a polynomial (`erf_polynomial`), which is shorter than the function of CUDA's library."""
        value = self._reg(x)
        if value.dtype is F64:
            return self._unary("tl.erf({})", value)
        s = self.min(self.fma(self.mul(value, value), 2 / erf_polynomial.END**2, -1.0), 1.0)
        inside = self.mul(value, self._polynomial(s, erf_polynomial.COEFFICIENTS))
        return self.min(self.max(inside, -1.0), 1.0)

    def sin(self, x: Operand) -> Reg:
        return self._unary("tl.sin({})", x)

    def cos(self, x: Operand) -> Reg:
        return self._unary("tl.cos({})", x)

    def pow(self, x: Operand, y: Operand) -> Reg:
        """exp2(y * log2|x|) in double precision, with the signs and the special cases of C's pow."""
        a, c = self._match(x, y)
        base, exponent = self.cast(a, F64), self.cast(c, F64)
        size = self._new(f"tl.exp2({exponent.name} * tl.log2(tl.abs({base.name})))", F64)
        whole = self.eq(self.floor(exponent), exponent)
        half = self.mul(exponent, 0.5)
        odd = self.bit_and(whole, self.bit_not(self.eq(self.floor(half), half)))
        signed = self.select(odd, self.neg(size), size)
        of_negative = self.select(whole, signed, math.nan)
        result = self.select(self.lt(base, 0.0), of_negative, size)
        one = self.bit_or(self.eq(base, 1.0), self.eq(exponent, 0.0))
        return self.cast(self.select(one, 1.0, result), a.dtype)

    def floor(self, x: Operand) -> Reg:
        return self._unary("tl.floor({})", x)

    def ceil(self, x: Operand) -> Reg:
        return self._unary("tl.ceil({})", x)

    def rint(self, x: Operand) -> Reg:
        """The nearest integer, ties to even: adds and subtracts a number so large that no fraction fits beside it."""
        value = self._reg(x)
        size, large = self.abs(value), 2.0**52 if value.dtype is F64 else 2.0**23
        whole = self.sub(self.add(size, large), large)
        signed = self.select(self.lt(value, 0.0), self.neg(whole), whole)
        return self.select(self.lt(size, large), signed, value)

    # Comparison and choice

    def quantized(self, x: Operand, zero: int, dtype: DType) -> Reg:
        return self.cast(self.add(self.rint(x), float(zero)), dtype)

    def lt(self, x: Operand, y: Operand) -> Reg:
        return self._compare("<", x, y)

    def le(self, x: Operand, y: Operand) -> Reg:
        return self._compare("<=", x, y)

    def eq(self, x: Operand, y: Operand) -> Reg:
        return self._compare("==", x, y)

    def select(self, condition: Operand, x: Operand, y: Operand) -> Reg:
        chosen = self._reg(condition)
        a, c = self._match(x, y)
        return self._new(f"tl.where({chosen.name}, {a.name}, {c.name})", a.dtype)

    # Bits

    def bit_and(self, x: Operand, y: Operand) -> Reg:
        return self._binary("{} & {}", x, y)

    def bit_or(self, x: Operand, y: Operand) -> Reg:
        return self._binary("{} | {}", x, y)

    def bit_xor(self, x: Operand, y: Operand) -> Reg:
        return self._binary("{} ^ {}", x, y)

    def bit_not(self, x: Operand) -> Reg:
        return self._unary("~{}", x)

    def shift_left(self, x: Operand, y: Operand) -> Reg:
        """Left shift; a count of at least the width of the type gives 0."""
        a, c = self._match(x, y)
        most, zero = self.const(8 * a.dtype.itemsize - 1, a.dtype), self.const(0, a.dtype)
        within = f"tl.minimum({c.name}, {most.name})"
        return self._new(f"tl.where({c.name} > {most.name}, {zero.name}, {a.name} << {within})", a.dtype)

    def shift_right(self, x: Operand, y: Operand) -> Reg:
        """Right shift: arithmetic for signed integers, logical for unsigned ones.

        A count of at least the width of the type gives 0, or -1 for negative integers.
        """
        a, c = self._match(x, y)
        most = self.const(8 * a.dtype.itemsize - 1, a.dtype)
        shifted = self._new(f"{a.name} >> tl.minimum({c.name}, {most.name})", a.dtype)
        if a.dtype.label.startswith("int"):
            return shifted
        return self._new(f"tl.where({c.name} > {most.name}, {self.const(0, a.dtype).name}, {shifted.name})", a.dtype)

    # Internals

    def _polynomial(self, x: Reg, coefficients: Sequence[float]) -> Reg:
        """The sum of `coefficients[i] * x**i`, by Horner's rule."""
        total = self.const(coefficients[-1], x.dtype)
        for coefficient in reversed(coefficients[:-1]):
            total = self.fma(total, x, coefficient)
        return total

    def _new(self, expression: str, dtype: DType) -> Reg:
        return Reg(self.writer.let(expression), dtype)

    def _reg(self, x: Operand) -> Reg:
        return x if isinstance(x, Reg) else self.const(x, self.dtype(x))

    def _match(self, *operands: Operand) -> tuple[Reg, ...]:
        """All operands as registers of one type: Python numbers become constants of the first register's type.

        That is float32 if all operands are numbers. TypeError for registers of different types.
        """
        dtype = next((x.dtype for x in operands if isinstance(x, Reg)), F32)
        values = tuple(x if isinstance(x, Reg) else self.const(x, dtype) for x in operands)
        if any(value.dtype is not dtype for value in values):
            raise TypeError(f"operands of types {', '.join(str(value.dtype) for value in values)} do not mix")
        return values

    def _unary(self, form: str, x: Operand) -> Reg:
        value = self._reg(x)
        return self._new(form.format(value.name), value.dtype)

    def _binary(self, form: str, x: Operand, y: Operand) -> Reg:
        a, c = self._match(x, y)
        return self._new(form.format(a.name, c.name), a.dtype)

    def _compare(self, symbol: str, x: Operand, y: Operand) -> Reg:
        a, c = self._match(x, y)
        return self._new(f"{a.name} {symbol} {c.name}", DType.BOOL)
