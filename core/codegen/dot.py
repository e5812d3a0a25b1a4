"""Dot products of words: 32 bits hold one float32, two bfloat16 or four bytes, whose products each lane adds up.

Words of float16 arrive as float32. The code uses the CPU's dot-product instructions VDPBF16PS (AVX512-BF16) and
VPDPBUSD (AVX512-VNNI, AVX-VNNI). On other CPUs it computes the same sums by plain products. Integer sums are exact
either way and never saturate.
"""

from __future__ import annotations

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.llvm_ir import Builder, Constant, Type, Value, Vector
from lathe.core.codegen.target import has_bfloat16_dot, has_int8_dot
from lathe.core.ir.types import DType
from lathe.core.kernels.target import Target

F32, I32 = DType.FLOAT32, DType.INT32
_HALF_BITS = 16
# Products of uint8 by int8, adjacent pairs added up as int16 (PMADDUBSW); the key is the number of 32-bit lanes.
_PMADDUBSW = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_PSIGN = {8: "llvm.x86.avx2.psign.b"}  # the first operand with the sign of the second; 0 where that is 0
# Products of int16, adjacent pairs added up (PMADDWD); the key is the number of lanes of the result.
_PMADDWD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def multiply_add(k: Kernel, element: DType, factor: Val, vector: Val, total: Val) -> Val:
    """`total` plus, lane by lane, the dot product of the elements in the words `factor` and `vector`.

    `element` is the type in `factor`: float32 or float16 (the words are float32 values), bfloat16, uint8 (with int8 in
    `vector`), or a type of 32 or 64 bits. Words of several elements are int32 values. Bytes accumulate in int32, narrow
    floats in float32, types of 32 or 64 bits in their own type. TypeError for other types.
    """
    match element:
        case DType.FLOAT32 | DType.FLOAT16:
            return k.ops.fma(factor, vector, total)
        case DType.BFLOAT16:
            return _bfloat16(k, factor, vector, total)
        case DType.UINT8:
            return _bytes(k, factor, vector, total)
        case DType.FLOAT64:
            return k.ops.fma(factor, vector, total)
        case DType.INT32 | DType.INT64 | DType.UINT32 | DType.UINT64:
            return factor * vector + total
    raise TypeError(f"no product of words that hold {element}")


def _bfloat16(k: Kernel, factor: Val, vector: Val, total: Val) -> Val:
    lanes = total.lanes
    if has_bfloat16_dot(k.target):
        pairs = llvm_ir.vector(llvm_ir.BFLOAT, 2 * lanes)
        operands = [k.builder.convert("bitcast", word.ir, pairs) for word in (factor, vector)]
        return _call(k, f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", total, [total.ir, *operands])
    for half in (_lower, _upper):
        total = k.ops.fma(half(k, factor), half(k, vector), total)
    return total


def _lower(k: Kernel, word: Val) -> Val:
    """The bfloat16 in the lower half of every 32-bit element of `word`, as float32."""
    moved = k.builder.binary("shl", word.ir, _all(word.ir.type, _HALF_BITS))
    return k.ops.bitcast(Val(k, moved, I32, word.lanes), F32)


def _upper(k: Kernel, word: Val) -> Val:
    """The bfloat16 in the upper half of every 32-bit element of `word`, as float32."""
    return k.ops.bitcast(k.ops.bit_and(word, -1 << _HALF_BITS), F32)


def _bytes(k: Kernel, factor: Val, vector: Val, total: Val) -> Val:
    lanes = total.lanes
    if has_int8_dot(k.target):
        quads = llvm_ir.vector(llvm_ir.integer(8), 4 * lanes)
        operands = [k.builder.convert("bitcast", word.ir, quads) for word in (factor, vector)]
        return _call(k, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", total, [total.ir, *operands])
    b, halves = k.builder, llvm_ir.vector(llvm_ir.integer(16), 2 * lanes)
    byte = _all(halves, 8)
    unsigned, signed = (b.convert("bitcast", word.ir, halves) for word in (factor, vector))
    even = _half_products(k, b.binary("and", unsigned, _all(halves, 255)), _lower_half(b, signed, byte), total)
    odd = _half_products(k, b.binary("lshr", unsigned, byte), b.binary("ashr", signed, byte), total)
    return total + (even + odd)


def multiply_add_small(k: Kernel, factor: Val, vector: Val, total: Val) -> Val:
    """As `multiply_add` of bytes, for a `factor` whose bytes are at most 127.

    Two of its products fit int16. So CPUs without VNNI need two instructions, PMADDUBSW and PMADDWD.
    """
    if not multiplies_pairs(k.target, total.lanes):
        return _bytes(k, factor, vector, total)
    return add_pairs(k, pair_products(k, factor, vector), total)


def multiply_add_signed(k: Kernel, factor: Val, vector: Val, total: Val) -> Val:
    """`total` plus, lane by lane, the dot products of the int8 in the words `factor` and `vector`, by PMADDUBSW.

    No byte of `vector` is -128. The products are those of magnitudes of `factor` by `vector` with the signs of
    `factor`: a sum of two is at most 2 * 128 * 127, which fits int16. For targets of `multiplies_pairs`.
    """
    b, lanes = k.builder, total.lanes
    bytes_ = llvm_ir.vector(llvm_ir.integer(8), 4 * lanes)
    first, second = (b.convert("bitcast", word.ir, bytes_) for word in (factor, vector))
    magnitude = k.call(f"llvm.abs.v{4 * lanes}i8", bytes_, [first, llvm_ir.number(llvm_ir.I1, 0)])
    if lanes in _PSIGN:
        signed = k.call(_PSIGN[lanes], bytes_, [second, first])
    else:
        zero = llvm_ir.zero(bytes_)
        signed = b.select(b.compare_signed("<", first, zero), b.binary("sub", zero, second), second)
    words = total.ir.type
    operands = (Val(k, b.convert("bitcast", x, words), I32, lanes) for x in (magnitude, signed))
    return add_pairs(k, pair_products(k, *operands), total)


def multiplies_pairs(target: Target, lanes: int) -> bool:
    """Whether products of bytes are best added up in pairs of int16 (`pair_products`): with AVX2, without VNNI."""
    return target.has_small_byte_dot and not has_int8_dot(target) and lanes in _PMADDUBSW


def pair_products(k: Kernel, factor: Val, vector: Val) -> Val:
    """The products of the uint8 in the words `factor` and the int8 in `vector`, added up in pairs: int16, saturated."""
    lanes = factor.lanes
    bytes_, halves = (llvm_ir.vector(llvm_ir.integer(bits), 32 * lanes // bits) for bits in (8, 16))
    operands = [k.builder.convert("bitcast", word.ir, bytes_) for word in (factor, vector)]
    return Val(k, k.call(_PMADDUBSW[lanes], halves, operands), DType.INT16, 2 * lanes)


def add_pairs(k: Kernel, pairs: Val, total: Val) -> Val:
    """`total` plus the sums of adjacent int16 of `pairs` (`pair_products`), int32."""
    return total + _call(k, _PMADDWD[total.lanes], total, [pairs.ir, _all(pairs.ir.type, 1)])


def _half_products(k: Kernel, a: Value, c: Value, like: Val) -> Val:
    """For each 32-bit word of `a` and `c`, two int16 each, the sum of both products as int32; `like` gives the type."""
    name = _PMADDWD.get(like.lanes)
    if name is not None and k.target.triple.startswith("x86_64"):
        return _call(k, name, like, [a, c])
    b, words = k.builder, like.ir.type
    wide, half = [b.convert("bitcast", value, words) for value in (a, c)], _all(words, _HALF_BITS)
    upper = b.binary("mul", *(b.binary("ashr", word, half) for word in wide))
    lower = b.binary("mul", *(_lower_half(b, word, half) for word in wide))
    return Val(k, b.binary("add", upper, lower), like.dtype, like.lanes)


def _lower_half(b: Builder, words: Value, half: Value) -> Value:
    """The lower half of each integer, sign-extended; `half` is the number of its bits."""
    return b.binary("ashr", b.binary("shl", words, half), half)


def _all(type_: Type, value: int) -> Constant:
    if not isinstance(type_, Vector):
        raise TypeError(f"{type_} is not a vector")
    return llvm_ir.numbers(type_, [value] * type_.count)


def _call(k: Kernel, name: str, like: Val, operands: list[Value]) -> Val:
    return Val(k, k.call(name, like.ir.type, operands), like.dtype, like.lanes)
