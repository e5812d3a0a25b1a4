"""A writer of LLVM assembly: types, values, and a `Builder` with a method per instruction.

A value holds its type and its text, so that an instruction is one line of text made from those of its operands. There
is no tree to traverse or print afterwards: kernels are unrolled into tens of thousands of instructions, and writing
their text once is most of the cost of generating them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TypeAlias

Number: TypeAlias = "int | float | bool"


class Type:
    """An LLVM type; equal types are the same object. `suffix` is its spelling in the names of intrinsics."""

    __slots__ = ("suffix", "text")

    def __init__(self, text: str, suffix: str = "") -> None:
        self.text = text
        self.suffix = suffix or text

    def literal(self, value: Number) -> str:
        """The text of a number of this type. TypeError if it is neither an integer nor a floating-point type."""
        raise TypeError(f"{self.text} has no literals")

    def __str__(self) -> str:
        return self.text


class Integer(Type):
    """An integer type; booleans are integers of one bit."""

    def literal(self, value: Number) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)


class Float(Type):
    """A floating-point type; `code` is its format character of `struct`.

    Literals are written as the bits of a double, which LLVM accepts for every type but `bfloat`.
    """

    __slots__ = ("code",)

    def __init__(self, text: str, suffix: str, code: str) -> None:
        super().__init__(text, suffix)
        self.code = code

    def literal(self, value: Number) -> str:
        rounded = struct.unpack(self.code, struct.pack(self.code, value))[0]
        return f"0x{struct.unpack('Q', struct.pack('d', rounded))[0]:016x}"


class Vector(Type):
    """`count` elements of one type."""

    __slots__ = ("count", "element")

    def __init__(self, element: Type, count: int) -> None:
        super().__init__(f"<{count} x {element.text}>", f"v{count}{element.suffix}")
        self.element = element
        self.count = count


VOID, POINTER, BFLOAT = Type("void"), Type("ptr", "p0"), Type("bfloat", "bf16")
HALF, FLOAT, DOUBLE = Float("half", "f16", "e"), Float("float", "f32", "f"), Float("double", "f64", "d")


@cache
def integer(bits: int) -> Integer:
    return Integer(f"i{bits}")


@cache
def vector(element: Type, count: int) -> Vector:
    return Vector(element, count)


I1, I32, I64 = integer(1), integer(32), integer(64)


class Value:
    """The result of an instruction, an argument, or a constant. `typed` is the text with the type before it."""

    __slots__ = ("text", "type", "typed")

    def __init__(self, type_: Type, text: str) -> None:
        self.type = type_
        self.text = text
        self.typed = f"{type_.text} {text}"


class Constant(Value):
    """A constant. `known` is its number, or one number per lane; None for `zeroinitializer` and `undef`."""

    __slots__ = ("known",)

    def __init__(self, type_: Type, text: str, known: Number | tuple[Number, ...] | None = None) -> None:
        super().__init__(type_, text)
        self.known = known


def number(type_: Type, value: Number) -> Constant:
    return Constant(type_, type_.literal(value), value)


def numbers(type_: Type, values: Sequence[Number]) -> Constant:
    """The constant vector of type `type_` with these values. TypeError if it is no vector of as many lanes."""
    if not isinstance(type_, Vector) or type_.count != len(values):
        raise TypeError(f"expected numbers for {type_}, got {len(values)}")
    element = type_.element
    if all(value is values[0] for value in values):  # the most frequent case; not `==`, since 0.0 == -0.0
        part = f"{element.text} {element.literal(values[0])}"
        return Constant(type_, f"<{', '.join([part] * len(values))}>", tuple(values))
    parts = ", ".join(f"{element.text} {element.literal(value)}" for value in values)
    return Constant(type_, f"<{parts}>", tuple(values))


def zero(type_: Type) -> Constant:
    return Constant(type_, "zeroinitializer")


def undefined(type_: Type) -> Constant:
    return Constant(type_, "undef")


class Block:
    """A basic block: its label and its lines."""

    __slots__ = ("label", "lines")

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: list[str | Phi] = []


class Phi(Value):
    """A phi instruction: its value depends on the preceding block.

    `add_incoming` may be called until the module is printed.
    """

    __slots__ = ("incoming",)

    def __init__(self, type_: Type, text: str) -> None:
        super().__init__(type_, text)
        self.incoming: list[tuple[Value, Block]] = []

    def add_incoming(self, value: Value, block: Block) -> None:
        self.incoming.append((value, block))

    def __str__(self) -> str:
        sources = ", ".join(f"[{value.text}, %{block.label}]" for value, block in self.incoming)
        return f"{self.text} = phi {self.type.text} {sources}"


class Module:
    """An LLVM module with one function, declarations and constants. `arguments` are those of the function."""

    def __init__(self, symbol: str, arguments: Sequence[Type]) -> None:
        self.symbol = symbol
        self.arguments = [Value(type_, f"%a{index}") for index, type_ in enumerate(arguments)]
        self.blocks: list[Block] = []
        self._declared: dict[str, str] = {}
        self._constants: list[str] = []

    def declare(self, name: str, result: Type, arguments: Sequence[Type]) -> None:
        """Declare an external function, unless it is declared already."""
        if name not in self._declared:
            parameters = ", ".join(type_.text for type_ in arguments)
            self._declared[name] = f'declare {result.text} @"{name}"({parameters})'

    def constants(self, name: str, element: Type, values: Sequence[Number]) -> Value:
        """Add a read-only array of numbers and return its address. `name` must be new in the module."""
        parts = ", ".join(f"{element.text} {element.literal(value)}" for value in values)
        self._constants.append(f'@"{name}" = internal constant [{len(values)} x {element.text}] [{parts}]')
        return Value(POINTER, f'@"{name}"')

    def __str__(self) -> str:
        parameters = ", ".join(argument.typed for argument in self.arguments)
        lines = [*self._constants, *self._declared.values(), f'define void @"{self.symbol}"({parameters}) {{']
        for block in self.blocks:
            lines.append(f"{block.label}:")
            lines += [f"  {line}" for line in block.lines]
        return "\n".join([*lines, "}", ""])


_ORDERED = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "one"}
_SIGNED = {"<": "slt", "<=": "sle", ">": "sgt", ">=": "sge", "==": "eq", "!=": "ne"}
_UNSIGNED = {"<": "ult", "<=": "ule", ">": "ugt", ">=": "uge", "==": "eq", "!=": "ne"}


class Builder:
    """Appends instructions to `block`."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._values = 0
        self.block = self.append_block("entry")

    # Blocks and jumps

    def append_block(self, label: str) -> Block:
        """A new block at the end of the function, with a unique label that begins with `label`."""
        block = Block(f"{label}{len(self.module.blocks)}")
        self.module.blocks.append(block)
        return block

    def branch(self, target: Block) -> None:
        self.block.lines.append(f"br label %{target.label}")

    def branch_if(self, condition: Value, then: Block, other: Block) -> None:
        self.block.lines.append(f"br i1 {condition.text}, label %{then.label}, label %{other.label}")

    def return_void(self) -> None:
        self.block.lines.append("ret void")

    @contextmanager
    def if_then(self, condition: Value) -> Iterator[None]:
        """Code written inside runs if the condition holds."""
        then, after = self.append_block("if"), self.append_block("endif")
        self.branch_if(condition, then, after)
        with self._inside(then, after):
            yield
        self.block = after

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
        """Two contexts to write code in: the first runs if the condition holds, otherwise the second."""
        then, other, after = (self.append_block(label) for label in ("if", "else", "endif"))
        self.branch_if(condition, then, other)
        yield self._inside(then, after), self._inside(other, after)
        self.block = after

    @contextmanager
    def _inside(self, block: Block, after: Block) -> Iterator[None]:
        self.block = block
        yield
        self.branch(after)

    # Instructions

    def _put(self, type_: Type, text: str) -> Value:
        self._values += 1
        value = Value(type_, f"%v{self._values}")
        self.block.lines.append(f"{value.text} = {text}")
        return value

    def binary(self, verb: str, a: Value, b: Value) -> Value:
        """An instruction of two operands of one type: `fadd`, `mul`, `and`, `lshr` ..."""
        return self._put(a.type, f"{verb} {a.typed}, {b.text}")

    def convert(self, verb: str, a: Value, type_: Type) -> Value:
        """A conversion such as `bitcast`, `sext` or `fptrunc`; `a` itself if it has the type already."""
        return a if a.type is type_ else self._put(type_, f"{verb} {a.typed} to {type_.text}")

    def negate(self, a: Value) -> Value:
        """The negation of floats."""
        return self._put(a.type, f"fneg {a.typed}")

    def compare_floats(self, relation: str, a: Value, b: Value) -> Value:
        """Whether `a relation b` holds, for a relation such as "<": an ordered comparison, false if one is NaN."""
        return self._put(_truth(a.type), f"fcmp {_ORDERED[relation]} {a.typed}, {b.text}")

    def is_unordered(self, a: Value, b: Value) -> Value:
        """Whether at least one of two floats is NaN."""
        return self._put(_truth(a.type), f"fcmp uno {a.typed}, {b.text}")

    def compare_signed(self, relation: str, a: Value, b: Value) -> Value:
        return self._put(_truth(a.type), f"icmp {_SIGNED[relation]} {a.typed}, {b.text}")

    def compare_unsigned(self, relation: str, a: Value, b: Value) -> Value:
        return self._put(_truth(a.type), f"icmp {_UNSIGNED[relation]} {a.typed}, {b.text}")

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self._put(a.type, f"select {condition.typed}, {a.typed}, {b.typed}")

    def extract(self, a: Value, lane: int) -> Value:
        """One element of a vector."""
        return self._put(_element(a.type), f"extractelement {a.typed}, i32 {lane}")

    def insert(self, a: Value, element: Value, lane: int) -> Value:
        """The vector with `element` in this lane."""
        return self._put(a.type, f"insertelement {a.typed}, {element.typed}, i32 {lane}")

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """The vector of the elements at positions `lanes` of the concatenation of `a` and `b`."""
        mask = numbers(vector(I32, len(lanes)), lanes) if any(lanes) else zero(vector(I32, len(lanes)))
        return self._put(vector(_element(a.type), len(lanes)), f"shufflevector {a.typed}, {b.typed}, {mask.typed}")

    def offset(self, address: Value, element: Type, index: Value) -> Value:
        """The address `index` elements further on; a vector of addresses for a vector of indices."""
        type_ = vector(POINTER, index.type.count) if isinstance(index.type, Vector) else POINTER
        return self._put(type_, f"getelementptr {element.text}, {address.typed}, {index.typed}")

    def load(self, type_: Type, address: Value, align: int) -> Value:
        return self._put(type_, f"load {type_.text}, {address.typed}, align {align}")

    def store(self, value: Value, address: Value, align: int) -> None:
        self.block.lines.append(f"store {value.typed}, {address.typed}, align {align}")

    def atomic(self, verb: str, address: Value, value: Value) -> Value:
        """Update the number at `address` atomically by `verb` (`add`, `max`, ...) and `value`; returns the old number.

        The ordering is monotonic (relaxed).
        """
        return self._put(value.type, f"atomicrmw {verb} {address.typed}, {value.typed} monotonic")

    def phi(self, type_: Type) -> Phi:
        self._values += 1
        phi = Phi(type_, f"%v{self._values}")
        self.block.lines.append(phi)
        return phi

    def hidden(self, a: Value) -> Value:
        """The same integer, whose origin LLVM cannot see: the result of an empty inline assembly."""
        return self._put(a.type, f'call {a.type.text} asm "", "=r,0"({a.typed})')

    def call(self, name: str, result: Type, arguments: Sequence[Value]) -> Value:
        """Call a function, and declare it at its first use. The value of a void call must not be used."""
        self.module.declare(name, result, [argument.type for argument in arguments])
        text = f'call {result.text} @"{name}"({", ".join(argument.typed for argument in arguments)})'
        if result is not VOID:
            return self._put(result, text)
        self.block.lines.append(text)
        return Value(VOID, "")


def _truth(type_: Type) -> Type:
    return vector(I1, type_.count) if isinstance(type_, Vector) else I1


def _element(type_: Type) -> Type:
    if not isinstance(type_, Vector):
        raise TypeError(f"{type_} is not a vector")
    return type_.element
