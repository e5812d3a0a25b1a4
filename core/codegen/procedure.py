"""`Procedure`: a native function over 64-bit integers and bytes of memory, written as Python statements.

    p = Procedure("skip_spaces", 2)          # i64 arguments, no result
    at = p.local(p.arguments[0])
    with p.loop() as loop:
        with p.when(p.byte(at.value).differs(0x20)):
            p.leave(loop)
        at.value += 1
    p.store(p.arguments[1], at.value)
    text = p.finish()

`lathe.core.codegen.lang` is for kernels over vectors; this module is for control flow that depends on data. Python's
own `if` and `for` run while code is generated. Local variables become registers (LLVM's `sroa`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from lathe.core.codegen.llvm_ir import (
    DOUBLE,
    FLOAT,
    I1,
    I64,
    POINTER,
    Block,
    Builder,
    Module,
    Type,
    Value,
    integer,
    number,
    numbers,
    vector,
)

Number: TypeAlias = "Word | int"
Choice: TypeAlias = AbstractContextManager[tuple[AbstractContextManager[None], AbstractContextManager[None]]]

I8, I128 = integer(8), integer(128)
_RARE = "!prof !0"  # branch weights for a condition that rarely holds
_METADATA = '!0 = !{!"branch_weights", i32 1, i32 2000}\n'


class Condition:
    """A boolean value of the generated code; `&`, `|` and `~` combine conditions."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: Procedure, value: Value) -> None:
        self.owner, self.value = owner, value

    def __and__(self, other: Condition) -> Condition:
        return Condition(self.owner, self.owner.builder.binary("and", self.value, other.value))

    def __or__(self, other: Condition) -> Condition:
        return Condition(self.owner, self.owner.builder.binary("or", self.value, other.value))

    def __invert__(self) -> Condition:
        return Condition(self.owner, self.owner.builder.binary("xor", self.value, number(I1, True)))

    @property
    def word(self) -> Word:
        """1 or 0."""
        return Word(self.owner, self.owner.builder.convert("zext", self.value, I64))


class Word:
    """An integer of 64 bits that wraps around. `<`, `<=`, `>` and `>=` compare signed; `>>` fills with zeros."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: Procedure, value: Value) -> None:
        self.owner, self.value = owner, value

    def _binary(self, verb: str, other: Number) -> Word:
        return Word(self.owner, self.owner.builder.binary(verb, self.value, self.owner.word(other).value))

    def _signed(self, relation: str, other: Number) -> Condition:
        right = self.owner.word(other).value
        return Condition(self.owner, self.owner.builder.compare_signed(relation, self.value, right))

    def __add__(self, other: Number) -> Word:
        return self._binary("add", other)

    def __sub__(self, other: Number) -> Word:
        return self._binary("sub", other)

    def __mul__(self, other: Number) -> Word:
        return self._binary("mul", other)

    def __floordiv__(self, other: Number) -> Word:
        """The quotient of unsigned numbers."""
        return self._binary("udiv", other)

    def __mod__(self, other: Number) -> Word:
        """The remainder of unsigned numbers."""
        return self._binary("urem", other)

    def __and__(self, other: Number) -> Word:
        return self._binary("and", other)

    def __or__(self, other: Number) -> Word:
        return self._binary("or", other)

    def __xor__(self, other: Number) -> Word:
        return self._binary("xor", other)

    def __invert__(self) -> Word:
        return self ^ -1

    def __lshift__(self, other: Number) -> Word:
        return self._binary("shl", other)

    def __rshift__(self, other: Number) -> Word:
        return self._binary("lshr", other)

    def __lt__(self, other: Number) -> Condition:
        return self._signed("<", other)

    def __le__(self, other: Number) -> Condition:
        return self._signed("<=", other)

    def __gt__(self, other: Number) -> Condition:
        return self._signed(">", other)

    def __ge__(self, other: Number) -> Condition:
        return self._signed(">=", other)

    def equals(self, other: Number) -> Condition:
        return self._signed("==", other)

    def differs(self, other: Number) -> Condition:
        return self._signed("!=", other)

    def below(self, other: Number) -> Condition:
        """Unsigned comparison `<`."""
        right = self.owner.word(other).value
        return Condition(self.owner, self.owner.builder.compare_unsigned("<", self.value, right))

    def negated(self) -> Word:
        return self.owner.word(0) - self

    def shift_right_arithmetic(self, count: Number) -> Word:
        """Arithmetic shift to the right: filled with copies of the sign bit."""
        return self._binary("ashr", count)


class Local:
    """A local variable: read and assign its `value`."""

    __slots__ = ("address", "owner")

    def __init__(self, owner: Procedure, address: Value) -> None:
        self.owner, self.address = owner, address

    @property
    def value(self) -> Word:
        return Word(self.owner, self.owner.builder.load(I64, self.address, 8))

    @value.setter
    def value(self, value: Number) -> None:
        self.owner.builder.store(self.owner.word(value).value, self.address, 8)


class Procedure:
    """Builds the function `symbol` with `arguments` 64-bit arguments and no result."""

    def __init__(self, symbol: str, arguments: int) -> None:
        self.symbol = symbol
        self.module = Module(symbol, [I64] * arguments)
        self.builder = Builder(self.module)
        self.arguments = [Word(self, value) for value in self.module.arguments]
        self._locals = 0

    def finish(self) -> str:
        """The LLVM assembly of the module. No code can be added afterwards."""
        self.builder.return_void()
        return str(self.module) + _METADATA

    # Numbers

    def word(self, value: Number) -> Word:
        """`value` as a word: an int becomes a constant, a word is returned unchanged."""
        if isinstance(value, Word):
            return value
        return Word(self, number(I64, value - (1 << 64) if value >> 63 == 1 else value))

    def local(self, value: Number = 0) -> Local:
        """A new local variable with this initial value."""
        self._locals += 1
        address = Value(POINTER, f"%local{self._locals}")
        self.module.blocks[0].lines.insert(0, f"{address.text} = alloca i64, align 8")
        local = Local(self, address)
        local.value = value
        return local

    def choose(self, condition: Condition, one: Number, other: Number) -> Word:
        """`one` if the condition holds, otherwise `other`; both are computed."""
        chosen = self.builder.select(condition.value, self.word(one).value, self.word(other).value)
        return Word(self, chosen)

    def trailing_zeros(self, word: Word) -> Word:
        """The number of trailing zero bits; 64 for 0."""
        return self._count_bits("llvm.cttz.i64", word)

    def leading_zeros(self, word: Word) -> Word:
        """The number of leading zero bits; 64 for 0."""
        return self._count_bits("llvm.ctlz.i64", word)

    def _count_bits(self, name: str, word: Word) -> Word:
        return Word(self, self.builder.call(name, I64, [word.value, number(I1, False)]))

    def product(self, a: Number, b: Number) -> tuple[Word, Word]:
        """The lower and the upper 64 bits of a product of unsigned numbers."""
        builder = self.builder
        wide = [builder.convert("zext", self.word(factor).value, I128) for factor in (a, b)]
        whole = builder.binary("mul", *wide)
        upper = builder.binary("lshr", whole, number(I128, 64))
        low, high = (Word(self, builder.convert("trunc", half, I64)) for half in (whole, upper))
        return low, high

    # Memory

    def byte(self, address: Number) -> Word:
        """The byte at an address, zero-extended."""
        return Word(self, self.builder.convert("zext", self._load(I8, address, 1), I64))

    def load(self, address: Number, align: int = 8) -> Word:
        """The 64-bit word at an address, which is a multiple of `align` bytes."""
        return Word(self, self._load(I64, address, align))

    def bytes_within(self, address: Number, first: str, last: str = "") -> Word:
        """A bit set: bit i is 1 if byte i of the 64 bytes at `address` is a character from `first` to `last`.

        Without `last`, only `first` itself counts.
        """
        type_, low, high = vector(I8, 64), ord(first), ord(last or first)
        shifted = self.builder.binary("sub", self._load(type_, address, 1), numbers(type_, [low] * 64))
        within = self.builder.compare_unsigned("<", shifted, numbers(type_, [high - low + 1] * 64))
        return Word(self, self.builder.convert("bitcast", within, I64))

    def store(self, address: Number, value: Number, bits: int = 64, align: int = 1) -> None:
        """Store the lower `bits` bits of a number at `address`, which is a multiple of `align` bytes."""
        narrow = self.builder.convert("trunc", self.word(value).value, integer(bits))
        self.builder.store(narrow, self._pointer(address), align)

    def table(self, name: str, values: Sequence[int]) -> Word:
        """Add a constant table of 64-bit words to the module, under a new `name`; returns its address."""
        signed = [value - (1 << 64) if value >> 63 else value for value in values]
        return Word(self, self.builder.convert("ptrtoint", self.module.constants(name, I64, signed), I64))

    def _load(self, type_: Type, address: Number, align: int) -> Value:
        return self.builder.load(type_, self._pointer(address), align)

    def _pointer(self, address: Number) -> Value:
        return self.builder.convert("inttoptr", self.word(address).value, POINTER)

    # Floats

    def double_of(self, word: Word) -> Value:
        """The float64 nearest to an unsigned integer."""
        return self.builder.convert("uitofp", word.value, DOUBLE)

    def double_at(self, address: Number) -> Value:
        """The float64 at an address, which is a multiple of 8."""
        return self._load(DOUBLE, address, 8)

    def bits_of(self, double: Value) -> Word:
        """The bits of a float64 as a word."""
        return Word(self, self.builder.convert("bitcast", double, I64))

    def bits_as_float32(self, bits: Word) -> Word:
        """The bits of the float32 nearest to the float64 with these bits."""
        double = self.builder.convert("bitcast", bits.value, DOUBLE)
        narrow = self.builder.convert("bitcast", self.builder.convert("fptrunc", double, FLOAT), integer(32))
        return Word(self, self.builder.convert("zext", narrow, I64))

    # Control

    @contextmanager
    def when(self, condition: Condition, rare: bool = False) -> Iterator[None]:
        """Code written inside runs if the condition holds. `rare` marks a condition that rarely holds."""
        then, after = self.builder.append_block("if"), self.builder.append_block("endif")
        self._branch(condition, then, after, rare)
        self.builder.block = then
        yield
        self.builder.branch(after)
        self.builder.block = after

    def if_else(self, condition: Condition) -> Choice:
        """Two contexts to write code in: the first runs if the condition holds, otherwise the second."""
        return self.builder.if_else(condition.value)

    @contextmanager
    def loop(self) -> Iterator[Block]:
        """Code written inside repeats until `leave` is called with the yielded block."""
        head, after = self.builder.append_block("loop"), self.builder.append_block("done")
        self.builder.branch(head)
        self.builder.block = head
        yield after
        self.builder.branch(head)
        self.builder.block = after

    def leave(self, loop: Block) -> None:
        """Leave a loop: jump to the code after it."""
        self.builder.branch(loop)
        self._begin_unreachable()

    def stop(self) -> None:
        """Return to the caller."""
        self.builder.return_void()
        self._begin_unreachable()

    def _begin_unreachable(self) -> None:
        """Put code that follows a jump into an unreachable block, since a basic block ends with its first jump."""
        self.builder.block = self.builder.append_block("never")

    def _branch(self, condition: Condition, then: Block, other: Block, rare: bool) -> None:
        if rare:
            line = f"br i1 {condition.value.text}, label %{then.label}, label %{other.label}, {_RARE}"
            self.builder.block.lines.append(line)
        else:
            self.builder.branch_if(condition.value, then, other)
