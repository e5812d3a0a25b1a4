"""The text of a kernel as one Triton function. Text needs no Triton, so generators run everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lathe.core.ir.types import Dim, DType

_POINTERS = {
    DType.FLOAT64: "fp64", DType.FLOAT32: "fp32", DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.BOOL: "i8",
    DType.INT64: "i64", DType.INT32: "i32", DType.INT16: "i16", DType.INT8: "i8",
    DType.UINT64: "u64", DType.UINT32: "u32", DType.UINT16: "u16", DType.UINT8: "u8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """A module that defines the function `symbol` of pointers to elements of the types `operands`, and of n (int32).

    `warps` of 32 threads run a program; `stages` is the number of loop iterations whose loads are in flight.
    """

    symbol: str
    text: str
    operands: tuple[str, ...]  # element types as Triton names them
    warps: int = 4
    stages: int = 1

    def to_bytes(self) -> bytes:
        return json.dumps([self.symbol, self.text, self.operands, self.warps, self.stages]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Source:
        symbol, text, operands, warps, stages = json.loads(data)
        return Source(symbol, text, tuple(operands), warps, stages)


class Writer:
    """Collects the lines of one kernel. Each name is assigned once, except for variables that loops carry."""

    def __init__(self, symbol: str) -> None:
        self.symbol = symbol
        self._lines: list[str] = []
        self._depth = 1
        self._operands: list[tuple[str, DType]] = []
        self._count = 0

    def operand(self, name: str, dtype: DType) -> str:
        """Declare the next pointer argument; returns its name."""
        self._operands.append((name, dtype))
        return name

    def line(self, text: str) -> None:
        """Add a line at the current indentation."""
        self._lines.append("    " * self._depth + text)

    def let(self, expression: str, hint: str = "v") -> str:
        """Assign an expression to a new variable, whose name begins with `hint`; returns the name."""
        taken = {operand for operand, _ in self._operands}
        while (name := f"{hint}{self._count}") in taken:
            self._count += 1
        self._count += 1
        self.line(f"{name} = {expression}")
        return name

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Code written inside is indented under `head`, such as "for k in range(0, 64, 16)"."""
        self.line(head + ":")
        self._depth += 1
        yield
        self._depth -= 1

    def source(self, warps: int = 4, stages: int = 1) -> Source:
        """The source of the kernel with the lines written so far."""
        arguments = ", ".join([*(name for name, _ in self._operands), "n"])
        head = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
        text = "\n".join([*head, f"def {self.symbol}({arguments}):", *self._lines, ""])
        return Source(self.symbol, text, tuple(_POINTERS[dtype] for _, dtype in self._operands), warps, stages)


def text_of(dim: Dim) -> str:
    """The dimension as the text of an expression over `n`, in parentheses where needed."""
    text = str(dim)
    return text if text.isalnum() else f"({text})"


def scaled(index: str, stride: Dim) -> str | None:
    """The text of `index * stride`; None if the product is 0."""
    if stride == 0 or index == "0":
        return None
    return index if stride == 1 else f"{index} * {text_of(stride)}"


def total(terms: list[str | None]) -> str:
    """The text of the sum of all terms that are not None; "0" if there are none."""
    return " + ".join(term for term in terms if term is not None) or "0"
