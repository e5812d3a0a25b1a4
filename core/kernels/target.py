"""What a machine offers to generated code: plain facts, known without LLVM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU to generate for. Two equal targets get byte-equal code."""

    name: str  # "avx512", "avx2", "neon", "plain"
    triple: str  # LLVM target triple
    cpu: str  # LLVM CPU name
    features: str  # LLVM feature string, sorted
    vector_bytes: int  # width of one vector register
    registers: int  # number of vector registers
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 1024 * 1024

    @property
    def lanes(self) -> int:
        """float32 elements in one vector."""
        return self.vector_bytes // 4

    @property
    def key(self) -> str:
        """Text that identifies the code generated for this target."""
        return f"{self.triple}/{self.cpu}/{self.features}/{self.vector_bytes}"
