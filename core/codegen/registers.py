"""Values of a kernel: `Val`, a scalar or vector in registers, and `Pointer`, the address of typed elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.llvm_ir import I1, I32, I64, VOID, Constant, Type, Value
from lathe.core.ir.types import DType

if TYPE_CHECKING:
    from lathe.core.codegen.lang import Kernel

Number: TypeAlias = "Val | int | float"

_READ, _SECOND_LEVEL, _DATA = 0, 2, 1  # arguments of llvm.prefetch
_FLOATS = {DType.FLOAT16: llvm_ir.HALF, DType.FLOAT32: llvm_ir.FLOAT, DType.FLOAT64: llvm_ir.DOUBLE}
_SIGNED = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})


@cache  # these three run for each instruction
def element_type(dtype: DType) -> Type:
    """The LLVM type of one element in a register: i1 for booleans, i16 for the bits of bfloat16.

    TypeError if kernels cannot compute with the type.
    """
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    if dtype is DType.BOOL:
        return I1
    if dtype is DType.BFLOAT16:
        return llvm_ir.integer(16)
    if dtype.is_integer and dtype.numpy.kind in "iu":
        return llvm_ir.integer(8 * dtype.itemsize)
    raise TypeError(f"kernels cannot compute with {dtype}")


@cache
def register_type(dtype: DType, lanes: int) -> Type:
    element = element_type(dtype)
    return element if lanes == 1 else llvm_ir.vector(element, lanes)


@cache
def memory_type(dtype: DType, lanes: int = 1) -> Type:
    """The LLVM type of elements in memory: that in registers, but i8 for booleans and i16 for float16.

    Some targets can convert float16 but have no instructions that move parts of its vectors.
    """
    plain = {DType.BOOL: DType.UINT8, DType.FLOAT16: DType.UINT16}
    return register_type(plain.get(dtype, dtype), lanes)


def is_signed(dtype: DType) -> bool:
    return dtype in _SIGNED


@dataclass(frozen=True, eq=False, slots=True)
class Val:
    """A scalar (`lanes == 1`) or a vector of `lanes` elements.

    Arithmetic with a Python number or a scalar broadcasts it to all lanes. `<`, `<=`, `>`, `>=` and `equals` give
    booleans, to which `&`, `|` and `~` apply.
    """

    kernel: Kernel
    ir: Value
    dtype: DType
    lanes: int = 1

    @property
    def constant(self) -> int | float | None:
        """The value of a scalar that is known at compile time, otherwise None."""
        known = self.ir.known if isinstance(self.ir, Constant) else None
        return known if isinstance(known, int | float) else None

    def __add__(self, other: Number) -> Val:
        return self.kernel.ops.add(self, other)

    def __radd__(self, other: Number) -> Val:
        return self.kernel.ops.add(other, self)

    def __sub__(self, other: Number) -> Val:
        return self.kernel.ops.sub(self, other)

    def __rsub__(self, other: Number) -> Val:
        return self.kernel.ops.sub(other, self)

    def __mul__(self, other: Number) -> Val:
        return self.kernel.ops.mul(self, other)

    def __rmul__(self, other: Number) -> Val:
        return self.kernel.ops.mul(other, self)

    def __truediv__(self, other: Number) -> Val:
        return self.kernel.ops.div(self, other)

    def __rtruediv__(self, other: Number) -> Val:
        return self.kernel.ops.div(other, self)

    def __floordiv__(self, other: Number) -> Val:
        """Quotient of non-negative integers."""
        return self.kernel.ops.unsigned_div(self, other)

    def __mod__(self, other: Number) -> Val:
        """Remainder of non-negative integers."""
        return self.kernel.ops.unsigned_rem(self, other)

    def __neg__(self) -> Val:
        return self.kernel.ops.neg(self)

    def __and__(self, other: Number) -> Val:
        return self.kernel.ops.bit_and(self, other)

    def __or__(self, other: Number) -> Val:
        return self.kernel.ops.bit_or(self, other)

    def __xor__(self, other: Number) -> Val:
        return self.kernel.ops.bit_xor(self, other)

    def __invert__(self) -> Val:
        return self.kernel.ops.bit_not(self)

    def __lt__(self, other: Number) -> Val:
        return self.kernel.ops.lt(self, other)

    def __le__(self, other: Number) -> Val:
        return self.kernel.ops.le(self, other)

    def __gt__(self, other: Number) -> Val:
        return self.kernel.ops.lt(other, self)

    def __ge__(self, other: Number) -> Val:
        return self.kernel.ops.le(other, self)

    def equals(self, other: Number) -> Val:
        return self.kernel.ops.eq(self, other)

    def cast(self, dtype: DType) -> Val:
        return self.kernel.ops.cast(self, dtype)

    def splat(self, lanes: int) -> Val:
        """This scalar in every lane of a vector."""
        return self.kernel.ops.splat(self, lanes)

    def lane(self, index: int) -> Val:
        """One element of a vector."""
        return self.kernel.ops.lane(self, index)


@dataclass(frozen=True, eq=False, slots=True)
class Pointer:
    """The address of elements of type `dtype` in memory. Offsets count elements.

    `computed` is their type in registers, or None if it is `dtype` too: loads convert to it, stores convert from it.
    """

    kernel: Kernel
    ir: Value
    dtype: DType
    computed: DType | None = None

    def at(self, offset: Val | int) -> Pointer:
        """The address `offset` elements further on."""
        index = self.kernel.index(offset)
        if index.constant == 0:
            return self
        address = self.kernel.builder.offset(self.ir, memory_type(self.dtype), index.ir)
        return Pointer(self.kernel, address, self.dtype, self.computed)

    def view(self, dtype: DType) -> Pointer:
        """The same address, reinterpreted as elements of `dtype`."""
        return Pointer(self.kernel, self.ir, dtype)

    def converting(self, dtype: DType) -> Pointer:
        """The same elements, converted to `dtype` by loads and from it by stores."""
        return Pointer(self.kernel, self.ir, self.dtype, None if dtype is self.dtype else dtype)

    def distance_from(self, origin: Pointer) -> Val:
        """The distance from `origin` to this address in elements; it must be a whole number of elements."""
        b = self.kernel.builder
        apart = b.binary("sub", b.convert("ptrtoint", self.ir, I64), b.convert("ptrtoint", origin.ir, I64))
        return Val(self.kernel, b.binary("sdiv", apart, llvm_ir.number(I64, self.dtype.itemsize)), DType.INT64)

    def load(self, offset: Val | int = 0, lanes: int = 1, mask: Val | None = None) -> Val:
        """`lanes` consecutive elements; where `mask` is false nothing is read and the lane is zero."""
        address = self.at(offset).ir
        type_ = memory_type(self.dtype, lanes)
        if mask is None:
            raw = self.kernel.builder.load(type_, address, self.dtype.itemsize)
        else:
            raw = self._masked("load", type_, [address], mask, [llvm_ir.zero(type_)], type_)
        return self._from_memory(raw, lanes)

    def store(self, value: Val, offset: Val | int = 0, mask: Val | None = None) -> None:
        """Write all lanes of `value`, or those where `mask` is true.

        TypeError if the type of `value` is neither `dtype` nor `computed`.
        """
        if mask is not None and (lane := _only_lane(mask)) is not None:
            # LLVM 22 merges narrowing with such a store, and writes the wide number, over the neighbours.
            self.at(offset).store(value.lane(lane), lane)
            return
        address = self.at(offset).ir
        raw = self._to_memory(value)
        if mask is None:
            self.kernel.builder.store(raw, address, self.dtype.itemsize)
        else:
            self._masked("store", raw.type, [raw, address], mask, [], VOID)

    def prefetch(self, offset: Val | int = 0) -> None:
        """Prefetch the cache line of an element into the second-level cache. The address may be invalid."""
        address = self.at(offset).ir
        hints = [llvm_ir.number(I32, hint) for hint in (_READ, _SECOND_LEVEL, _DATA)]
        self.kernel.call("llvm.prefetch.p0", VOID, [address, *hints])

    def gather(self, offsets: Val, mask: Val | None = None) -> Val:
        """The elements at a vector of int64 `offsets`; where `mask` is false nothing is read and the lane is zero."""
        lanes = offsets.lanes
        addresses = self.kernel.builder.offset(self.ir, memory_type(self.dtype), offsets.ir)
        type_ = memory_type(self.dtype, lanes)
        active = mask.ir if mask is not None else _all_true(lanes)
        name = f"llvm.masked.gather.{type_.suffix}.v{lanes}p0"
        align = llvm_ir.number(I32, self.dtype.itemsize)
        raw = self.kernel.call(name, type_, [addresses, align, active, llvm_ir.zero(type_)])
        return self._from_memory(raw, lanes)

    def scatter(self, value: Val, offsets: Val, mask: Val | None = None) -> None:
        """Write the lanes of `value` (where `mask` is true) at a vector of int64 `offsets`."""
        lanes, raw = value.lanes, self._to_memory(value)
        addresses = self.kernel.builder.offset(self.ir, memory_type(self.dtype), offsets.ir)
        active = mask.ir if mask is not None else _all_true(lanes)
        name = f"llvm.masked.scatter.{raw.type.suffix}.v{lanes}p0"
        self.kernel.call(name, VOID, [raw, addresses, llvm_ir.number(I32, self.dtype.itemsize), active])

    def _masked(self, verb: str, type_: Type, first: list[Value], mask: Val, last: list[Value], result: Type) -> Value:
        name = f"llvm.masked.{verb}.{type_.suffix}.p0"
        return self.kernel.call(name, result, [*first, llvm_ir.number(I32, self.dtype.itemsize), mask.ir, *last])

    def _from_memory(self, raw: Value, lanes: int) -> Val:
        if self.dtype is DType.BOOL:
            raw = self.kernel.builder.compare_unsigned("!=", raw, _zero(raw.type, lanes))
        elif self.dtype is DType.FLOAT16:
            raw = self.kernel.builder.convert("bitcast", raw, register_type(DType.FLOAT16, lanes))
        value = Val(self.kernel, raw, self.dtype, lanes)
        return value if self.computed is None else value.cast(self.computed)

    def _to_memory(self, value: Val) -> Value:
        if self.computed is value.dtype:
            value = value.cast(self.dtype)
        if value.dtype is not self.dtype:
            raise TypeError(f"store: expected {self.dtype}, got {value.dtype}")
        if self.dtype is DType.BOOL:
            return self.kernel.builder.convert("zext", value.ir, memory_type(self.dtype, value.lanes))
        if self.dtype is DType.FLOAT16:
            return self.kernel.builder.convert("bitcast", value.ir, memory_type(self.dtype, value.lanes))
        return value.ir


def _only_lane(mask: Val) -> int | None:
    """The only true lane of a constant vector mask; None if several lanes or none are true, or it is not constant."""
    known = mask.ir.known if isinstance(mask.ir, Constant) else None
    return known.index(True) if isinstance(known, tuple) and sum(known) == 1 else None


def _all_true(lanes: int) -> Constant:
    return llvm_ir.numbers(llvm_ir.vector(I1, lanes), [True] * lanes)


def _zero(type_: Type, lanes: int) -> Constant:
    return llvm_ir.zero(type_) if lanes > 1 else llvm_ir.number(type_, 0)
