"""`Arithmetic`: the scalar algebra of `lathe.core.ops.opdef.scalar` on registers, used by all elementwise code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np

from lathe.core.codegen import llvm_ir, vmath
from lathe.core.codegen.llvm_ir import Builder, Constant, Type, Value
from lathe.core.codegen.registers import Val, is_signed, register_type
from lathe.core.codegen.target import has_bfloat16_dot, has_float16_conversion, has_fma
from lathe.core.ir.types import DType

if TYPE_CHECKING:
    from lathe.core.codegen.lang import Kernel

Operand: TypeAlias = "Val | int | float"


class Arithmetic:
    """Implements `lathe.core.ops.opdef.scalar.ScalarOps` for one kernel, and further operations that kernels need."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fused = has_fma(kernel.target)

    @property
    def b(self) -> Builder:
        return self.kernel.builder

    # Operands

    def dtype(self, x: Operand) -> DType:
        if isinstance(x, Val):
            return x.dtype
        return DType.INT64 if isinstance(x, int) else DType.FLOAT32

    def const(self, value: float | int | bool, dtype: DType) -> Val:
        return self.kernel.constant(value, dtype)

    def splat(self, x: Val, lanes: int) -> Val:
        """A scalar in every lane."""
        if x.lanes == lanes:
            return x
        type_ = register_type(x.dtype, lanes)
        if x.constant is not None:
            return Val(self.kernel, llvm_ir.numbers(type_, [x.constant] * lanes), x.dtype, lanes)
        undefined = llvm_ir.undefined(type_)
        first = self.b.insert(undefined, x.ir, 0)
        return Val(self.kernel, self.b.shuffle(first, undefined, [0] * lanes), x.dtype, lanes)

    def lane(self, x: Val, index: int) -> Val:
        return Val(self.kernel, self.b.extract(x.ir, index), x.dtype)

    def match(self, *operands: Operand) -> tuple[Val, ...]:
        """All operands as registers of one type: Python numbers become constants, scalars are broadcast.

        At least one operand must be a register: the constants get its element type. TypeError if registers have
        different element types.
        """
        if _have_one_type(operands):
            return operands  # the common case, and this runs once per instruction
        first = next(x for x in operands if isinstance(x, Val))
        values = [x if isinstance(x, Val) else self.const(x, first.dtype) for x in operands]
        lanes = max(value.lanes for value in values)
        if any(value.dtype is not first.dtype for value in values):
            raise TypeError(f"operands of types {', '.join(str(value.dtype) for value in values)} do not mix")
        return tuple(self.splat(value, lanes) for value in values)

    def cast(self, x: Operand, dtype: DType) -> Val:
        """`x` converted to `dtype`.

        Float to integer truncates towards zero and saturates (NaN gives 0). Integer to narrower integer drops the upper
        bits. A conversion to bool is `!= 0`. Conversions from or to bfloat16, and between float16 and types other than
        float32, go through float32.
        """
        value = self._operand(x)
        source, type_ = value.dtype, register_type(dtype, value.lanes)
        if source is dtype:
            return value
        if DType.BFLOAT16 in (source, dtype):
            return self._cast_bfloat16(value, dtype)
        if DType.FLOAT16 in (source, dtype) and DType.FLOAT32 not in (source, dtype):
            return self.cast(self.cast(value, DType.FLOAT32), dtype)
        if (
            DType.FLOAT16 in (source, dtype)
            and value.constant is None
            and not has_float16_conversion(self.kernel.target)
        ):
            return self._to_float16(value) if dtype is DType.FLOAT16 else self._from_float16(value)
        if value.constant is not None and dtype is not DType.BOOL and not (source.is_float and dtype.is_integer):
            return self.const(_converted(value.constant, source, dtype), dtype)
        if dtype is DType.BOOL:
            return self.bit_not(self.eq(value, 0))
        if source.is_float and dtype.is_float:
            wider = dtype.itemsize > source.itemsize
            return self._wrap(self.b.convert("fpext" if wider else "fptrunc", value.ir, type_), value, dtype)
        if source is DType.FLOAT32 and dtype.itemsize < 4:
            return self._to_small_integer(value, dtype)
        if source.is_float:
            verb = "fptosi" if is_signed(dtype) else "fptoui"
            name = f"llvm.{verb}.sat.{type_.suffix}.{value.ir.type.suffix}"
            return self._wrap(self.kernel.call(name, type_, [value.ir]), value, dtype)
        if dtype.is_float:
            verb = "sitofp" if is_signed(source) else "uitofp"
            return self._wrap(self.b.convert(verb, value.ir, type_), value, dtype)
        return self._wrap(self._resize(value, type_, dtype), value, dtype)

    def _cast_bfloat16(self, x: Val, dtype: DType) -> Val:
        """A conversion from or to bfloat16, by way of float32."""
        if dtype is DType.BFLOAT16:
            return self._to_bfloat16(self.cast(x, DType.FLOAT32))
        wide = self.cast(self.bitcast(x, DType.UINT16), DType.UINT32)
        return self.cast(self.bitcast(self.shift_left(wide, 16), DType.FLOAT32), dtype)

    def _to_small_integer(self, x: Val, dtype: DType) -> Val:
        """float32 to an integer of 8 or 16 bits: saturated as float32, converted to int32, then truncated.

        LLVM's saturating conversion would handle one element at a time.
        """
        bits = 8 * dtype.itemsize
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed(dtype) else (0, (1 << bits) - 1)
        number = self.select(self.is_nan(x), 0.0, x) if is_signed(dtype) else x
        above = self.select(self.lt(float(low), number), number, float(low))  # NaN becomes `low`: 0 for unsigned types
        within = self.select(self.lt(above, float(high)), above, float(high))
        whole = self._wrap(self.b.convert("fptosi", within.ir, register_type(DType.INT32, x.lanes)), x, DType.INT32)
        return self.cast(whole, dtype)

    def _to_bfloat16(self, x: Val) -> Val:
        """float32 rounded to bfloat16, ties to even. With AVX512-BF16 subnormal numbers become zero."""
        if has_bfloat16_dot(self.kernel.target):
            type_ = llvm_ir.vector(llvm_ir.BFLOAT, x.lanes) if x.lanes > 1 else llvm_ir.BFLOAT
            rounded = self.b.convert("fptrunc", x.ir, type_)
            bits_of = self.b.convert("bitcast", rounded, register_type(DType.BFLOAT16, x.lanes))
            return self._wrap(bits_of, x, DType.BFLOAT16)
        bits = self.bitcast(x, DType.UINT32)
        upper = self.shift_right(bits, 16)
        nearest = self.shift_right(bits + (self.bit_and(upper, 1) + 0x7FFF), 16)
        kept = self.select(self.is_nan(x), self.bit_or(upper, 0x40), nearest)
        return self.bitcast(self.cast(kept, DType.UINT16), DType.BFLOAT16)

    def _from_float16(self, x: Val) -> Val:
        """float16 to float32 by integer instructions; exact, for subnormal numbers too.

        The bits, shifted into the places of float32, are those of a number 2^112 times too small.
        """
        bits = self.cast(self.bitcast(x, DType.UINT16), DType.UINT32)
        size = self.bitcast(self.shift_left(self.bit_and(bits, 0x7FFF), 13), DType.FLOAT32) * 2.0**112
        found = self.bitcast(size, DType.UINT32)
        found = self.select(self.lt(size, 2.0**16), found, self.bit_or(found, 0xFF << 23))  # infinity or NaN
        return self.bitcast(self.bit_or(found, self.shift_left(self.bit_and(bits, 0x8000), 16)), DType.FLOAT32)

    def _to_float16(self, x: Val) -> Val:
        """float32 to float16 by plain instructions, ties to even (F. Giesen's float_to_half_fast3_rtne).

        Normal results are rounded as integers. Subnormal ones are rounded by adding a float whose last place is theirs.
        """
        bits = self.bitcast(x, DType.UINT32)
        size = self.bit_and(bits, 0x7FFFFFFF)
        sign = self.shift_right(self.bit_and(bits, 1 << 31), 16)
        small = self.bitcast(self.bitcast(size, DType.FLOAT32) + 0.5, DType.UINT32) - 0x3F000000
        odd = self.bit_and(self.shift_right(size, 13), 1)
        normal = self.shift_right(size + (odd + ((0x0FFF - (112 << 23)) & 0xFFFFFFFF)), 13)
        beyond = self.select(self.is_nan(x), 0x7E00, self.const(0x7C00, DType.UINT32))
        found = self.select(self.lt(size, 113 << 23), small, self.select(self.lt(size, 143 << 23), normal, beyond))
        return self.bitcast(self.cast(self.bit_or(found, sign), DType.UINT16), DType.FLOAT16)

    def bitcast(self, x: Val, dtype: DType) -> Val:
        """The bits of `x` as elements of type `dtype`, which has the same width."""
        return self._wrap(self.b.convert("bitcast", x.ir, register_type(dtype, x.lanes)), x, dtype)

    # Arithmetic

    def add(self, x: Operand, y: Operand) -> Val:
        return self._arithmetic(x, y, "fadd", "add", lambda a, c: a + c, identity=0)

    def sub(self, x: Operand, y: Operand) -> Val:
        return self._arithmetic(x, y, "fsub", "sub", lambda a, c: a - c, right_identity=0)

    def mul(self, x: Operand, y: Operand) -> Val:
        return self._arithmetic(x, y, "fmul", "mul", lambda a, c: a * c, identity=1, absorbing=0)

    def div(self, x: Operand, y: Operand) -> Val:
        """IEEE division for floats; integers truncate towards zero.

        An integer divided by zero gives 0; the least integer divided by -1 gives itself.
        """
        a, c = self.match(x, y)
        if a.dtype.is_float:
            return self._wrap(self.b.binary("fdiv", a.ir, c.ir), a)
        if is_signed(a.dtype):
            return self._divide(a, c, "sdiv", self.neg(a))
        return self.select(self.eq(c, 0), 0, self.unsigned_div(a, self.select(self.eq(c, 0), 1, c)))

    def rem(self, x: Operand, y: Operand) -> Val:
        """The remainder of `div`: that of C's % for integers (0 for a divisor of 0), fmod for floats."""
        a, c = self.match(x, y)
        if a.dtype.is_float:
            return vmath.fmod(self, a, c)
        if is_signed(a.dtype):
            return self._divide(a, c, "srem", self.const(0, a.dtype))
        return self.select(self.eq(c, 0), 0, self.unsigned_rem(a, self.select(self.eq(c, 0), 1, c)))

    def unsigned_div(self, x: Operand, y: Operand) -> Val:
        """Quotient of non-negative integers by a positive one."""
        a, c = self.match(x, y)
        if c.constant == 1:
            return a
        if a.constant is not None and c.constant is not None:
            return self.const(int(a.constant) // int(c.constant), a.dtype)
        return self._wrap(self.b.binary("udiv", a.ir, c.ir), a)

    def unsigned_rem(self, x: Operand, y: Operand) -> Val:
        """Remainder of non-negative integers by a positive one."""
        a, c = self.match(x, y)
        if c.constant == 1:
            return self.const(0, a.dtype)
        if a.constant is not None and c.constant is not None:
            return self.const(int(a.constant) % int(c.constant), a.dtype)
        return self._wrap(self.b.binary("urem", a.ir, c.ir), a)

    def fma(self, x: Operand, y: Operand, z: Operand) -> Val:
        """x * y + z: fused for floats where the target has the instruction, otherwise rounded twice."""
        a, c, d = self.match(x, y, z)
        if not a.dtype.is_float or not self.fused:
            return self.add(self.mul(a, c), d)
        return self._intrinsic("llvm.fma", a, c, d)

    def neg(self, x: Operand) -> Val:
        value = self._operand(x)
        return self._wrap(self.b.negate(value.ir), value) if value.dtype.is_float else self.sub(0, value)

    def abs(self, x: Operand) -> Val:
        value = self._operand(x)
        if value.dtype.is_float:
            return self._intrinsic("llvm.fabs", value)
        return self.select(self.lt(value, 0), self.neg(value), value) if is_signed(value.dtype) else value

    def max(self, x: Operand, y: Operand) -> Val:
        """The maximum; NaN if an operand is NaN."""
        return self._extremum(x, y, ">")

    def min(self, x: Operand, y: Operand) -> Val:
        """The minimum; NaN if an operand is NaN."""
        return self._extremum(x, y, "<")

    # Functions

    def sqrt(self, x: Operand) -> Val:
        return self._intrinsic("llvm.sqrt", self._operand(x))

    def exp(self, x: Operand) -> Val:
        return vmath.exp(self, self._operand(x))

    def log(self, x: Operand) -> Val:
        return vmath.log(self, self._operand(x))

    def tanh(self, x: Operand) -> Val:
        return vmath.tanh(self, self._operand(x))

    def sigmoid(self, x: Operand) -> Val:
        return vmath.sigmoid(self, self._operand(x))

    def erf(self, x: Operand) -> Val:
        return vmath.erf(self, self._operand(x))

    def sin(self, x: Operand) -> Val:
        return vmath.sin(self, self._operand(x))

    def cos(self, x: Operand) -> Val:
        return vmath.cos(self, self._operand(x))

    def pow(self, x: Operand, y: Operand) -> Val:
        return vmath.pow(self, *self.match(x, y))

    def floor(self, x: Operand) -> Val:
        return vmath.rounded(self, self._operand(x), "floor")

    def ceil(self, x: Operand) -> Val:
        return vmath.rounded(self, self._operand(x), "ceil")

    def rint(self, x: Operand) -> Val:
        """`x` rounded to the nearest integer, ties to even, in the type of `x`; integers are unchanged."""
        return vmath.rounded(self, self._operand(x), "roundeven")

    def quantized(self, x: Operand, zero: int, dtype: DType) -> Val:
        """`rint(x)` + `zero`, saturated to `dtype` (int8 or uint8); NaN gives 0. `x` is float32.

        The number is bounded first: then the conversion to int32 may round, and nothing is left to saturate.
        """
        value = self._operand(x)
        if is_signed(dtype):
            return self.cast(self.rint(value) + float(zero), dtype)
        low, high = float(-zero), float(255 - zero)
        above = self.select(self.lt(low, value), value, low)  # NaN becomes `low`, the integer 0
        within = self.select(self.lt(above, high), above, high)
        type_ = register_type(DType.INT32, within.lanes)
        name = f"llvm.lrint.{type_.suffix}.{within.ir.type.suffix}"
        nearest = self._wrap(self.kernel.call(name, type_, [within.ir]), within, DType.INT32)
        return self.cast(nearest + zero, dtype)

    # Comparison and choice

    def lt(self, x: Operand, y: Operand) -> Val:
        return self._compare("<", x, y)

    def le(self, x: Operand, y: Operand) -> Val:
        return self._compare("<=", x, y)

    def eq(self, x: Operand, y: Operand) -> Val:
        return self._compare("==", x, y)

    def is_nan(self, x: Val) -> Val:
        return self._wrap(self.b.is_unordered(x.ir, x.ir), x, DType.BOOL)

    def select(self, condition: Operand, x: Operand, y: Operand) -> Val:
        """`x` where the condition is true, otherwise `y`, lane by lane."""
        chosen = self._operand(condition)
        a, c = self.match(x, y)
        lanes = max(chosen.lanes, a.lanes)
        chosen, a, c = (self.splat(value, lanes) for value in (chosen, a, c))
        return self._wrap(self.b.select(chosen.ir, a.ir, c.ir), a)

    # Bits

    def bit_and(self, x: Operand, y: Operand) -> Val:
        return self._bits("and", x, y)

    def bit_or(self, x: Operand, y: Operand) -> Val:
        return self._bits("or", x, y)

    def bit_xor(self, x: Operand, y: Operand) -> Val:
        return self._bits("xor", x, y)

    def bit_not(self, x: Operand) -> Val:
        value = self._operand(x)
        ones = self.splat(self.const(value.dtype is DType.BOOL or -1, value.dtype), value.lanes)
        return self._wrap(self.b.binary("xor", value.ir, ones.ir), value)

    def shift_left(self, x: Operand, y: Operand) -> Val:
        """`x << y`: bits shifted out of the type are lost; shifting by its width or more gives 0."""
        a, c = self.match(x, y)
        return self._shift("shl", a, c)

    def shift_right(self, x: Operand, y: Operand) -> Val:
        """`x >> y`: arithmetic for signed integers, logical for unsigned ones.

        Shifting by the width of the type or more gives 0, or -1 for a negative `x`.
        """
        a, c = self.match(x, y)
        return self._shift("ashr" if is_signed(a.dtype) else "lshr", a, c)

    # Across lanes

    def reduce(self, x: Val, combine: Callable[[Val, Val], Val]) -> Val:
        """All lanes of a vector combined into a scalar by halving, in an order that depends on the width only.

        The number of lanes is a power of 2.
        """
        while x.lanes > 1:
            half = x.lanes // 2
            low, high = (self._part(x, range(start, start + half)) for start in (0, half))
            x = combine(low, high)
        return x

    def sum(self, x: Val) -> Val:
        return self.reduce(x, self.add)

    def any(self, condition: Val) -> Val:
        return self.reduce(condition, self.bit_or)

    # Internals

    def _operand(self, x: Operand) -> Val:
        return x if isinstance(x, Val) else self.const(x, self.dtype(x))

    def _wrap(self, raw: Value, like: Val, dtype: DType | None = None) -> Val:
        return Val(self.kernel, raw, dtype or like.dtype, like.lanes)

    def _arithmetic(
        self, x: Operand, y: Operand, float_verb: str, int_verb: str, fold: Callable[[int, int], int],
        identity: int | None = None, right_identity: int | None = None, absorbing: int | None = None,
    ) -> Val:  # fmt: skip
        a, c = self.match(x, y)
        if a.dtype.is_float:
            return self._wrap(self.b.binary(float_verb, a.ir, c.ir), a)
        known_a, known_c = a.constant, c.constant
        if isinstance(known_a, int) and isinstance(known_c, int):
            return self.const(fold(known_a, known_c), a.dtype)
        if known_c is not None and known_c in (identity, right_identity):
            return a
        if known_a is not None and known_a == identity:
            return c
        if absorbing is not None and absorbing in (known_a, known_c):
            return self.splat(self.const(absorbing, a.dtype), a.lanes)
        return self._wrap(self.b.binary(int_verb, a.ir, c.ir), a)

    def _divide(self, a: Val, c: Val, verb: str, by_minus_one: Val) -> Val:
        """Signed division or remainder by LLVM's `verb` (`sdiv`, `srem`): 0 for a divisor of 0, `by_minus_one` for -1.

        LLVM leaves both undefined: division by zero, and the least integer divided by -1.
        """
        zero, minus_one = self.eq(c, 0), self.eq(c, -1)
        safe = self.select(self.bit_or(zero, minus_one), 1, c)
        result = self._wrap(self.b.binary(verb, a.ir, safe.ir), a)
        return self.select(zero, 0, self.select(minus_one, by_minus_one, result))

    def _extremum(self, x: Operand, y: Operand, relation: str) -> Val:
        a, c = self.match(x, y)
        if not a.dtype.is_float:
            return self._integer_extremum(a, c, relation)
        if _is_number(a):
            a, c = c, a
        if _is_number(c):  # c if it wins, otherwise a, which may be NaN: one machine instruction
            return self._wrap(self.b.select(self.b.compare_floats(relation, c.ir, a.ir), c.ir, a.ir), a)
        better = self._wrap(self.b.select(self.b.compare_floats(relation, a.ir, c.ir), a.ir, c.ir), a)
        return self.select(self.is_nan(a), a, better)

    def _integer_extremum(self, a: Val, c: Val, relation: str) -> Val:
        if a.constant is not None and c.constant is not None:
            return self.const((max if relation == ">" else min)(a.constant, c.constant), a.dtype)
        compare = self.b.compare_signed if is_signed(a.dtype) else self.b.compare_unsigned
        return self._wrap(self.b.select(compare(relation, a.ir, c.ir), a.ir, c.ir), a)

    def _compare(self, relation: str, x: Operand, y: Operand) -> Val:
        a, c = self.match(x, y)
        if a.dtype.is_float:
            return self._wrap(self.b.compare_floats(relation, a.ir, c.ir), a, DType.BOOL)
        compare = self.b.compare_signed if is_signed(a.dtype) else self.b.compare_unsigned
        return self._wrap(compare(relation, a.ir, c.ir), a, DType.BOOL)

    def _bits(self, verb: str, x: Operand, y: Operand) -> Val:
        a, c = self.match(x, y)
        return self._wrap(self.b.binary(verb, a.ir, c.ir), a)

    def _shift(self, verb: str, a: Val, c: Val) -> Val:
        width = a.dtype.itemsize * 8
        if c.constant is not None and 0 <= c.constant < width:
            return self._wrap(self.b.binary(verb, a.ir, c.ir), a)
        limit = self.splat(self.const(width, c.dtype), c.lanes)
        within = self._wrap(self.b.compare_unsigned("<", c.ir, limit.ir), c, DType.BOOL)
        shifted = self._wrap(self.b.binary(verb, a.ir, self.select(within, c, 0).ir), a)
        beyond = self.select(self.lt(a, 0), a - a - 1, a - a) if verb == "ashr" else a - a
        return self.select(within, shifted, beyond)

    def _resize(self, value: Val, type_: Type, dtype: DType) -> Value:
        bits = 1 if value.dtype is DType.BOOL else value.dtype.itemsize * 8
        if dtype.itemsize * 8 < bits:
            return self.b.convert("trunc", value.ir, type_)
        if dtype.itemsize * 8 == bits:
            return value.ir
        return self.b.convert("sext" if is_signed(value.dtype) else "zext", value.ir, type_)

    def _part(self, x: Val, lanes: range) -> Val:
        if len(lanes) == 1:
            return self.lane(x, lanes[0])
        raw = self.b.shuffle(x.ir, llvm_ir.undefined(x.ir.type), lanes)
        return Val(self.kernel, raw, x.dtype, len(lanes))

    def _intrinsic(self, name: str, *operands: Val) -> Val:
        first = operands[0]
        raw = self.kernel.call(f"{name}.{first.ir.type.suffix}", first.ir.type, [x.ir for x in operands])
        return self._wrap(raw, first)


def _have_one_type(operands: tuple[Operand, ...]) -> TypeGuard[tuple[Val, ...]]:
    """Whether all operands are registers of one type and width."""
    first = operands[0]
    if not isinstance(first, Val):
        return False
    dtype, lanes = first.dtype, first.lanes
    for operand in operands:  # a loop is twice as fast as all() over two or three operands
        if not isinstance(operand, Val) or operand.dtype is not dtype or operand.lanes != lanes:
            return False
    return True


def _is_number(x: Val) -> bool:
    """Whether `x` is a constant without NaN: False for registers whose value is not known at compile time."""
    known = x.ir.known if isinstance(x.ir, Constant) else None
    parts = known if isinstance(known, tuple) else (known,)
    return all(isinstance(part, int | float) and part == part for part in parts)


def _converted(number: float | int | bool, source: DType, dtype: DType) -> float | int | bool:
    """A constant of type `source` as one of type `dtype`: rounded to both types, or wrapped, as at run time."""
    with np.errstate(over="ignore"):  # too large for a narrower float: an infinity
        array = np.asarray(number).astype(source.numpy).astype(dtype.numpy)
    return float(array) if dtype.is_float else int(array)
