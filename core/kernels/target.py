"""Descriptions of the machines that code is generated for: plain data that needs neither LLVM nor a GPU driver."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lathe.core.ir.types import DType

_TILES = {DType.BFLOAT16: "+amx-bf16", DType.FLOAT16: "+amx-fp16", DType.UINT8: "+amx-int8"}

GPU_ALIGNMENT = 16  # bytes; of every operand of a GPU kernel: the widest load of one thread


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU to generate code for. Equal targets get byte-equal code."""

    name: str  # "avx512", "avx2", "neon", "plain"
    triple: str  # LLVM target triple
    cpu: str  # LLVM CPU name
    features: str  # LLVM feature string: "+" before each instruction set that code may use, "-" before all others
    vector_bytes: int  # width of one vector register
    registers: int  # number of vector registers
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 1024 * 1024
    tf32: bool = False  # whether float32 factors may be rounded to 10 mantissa bits; not part of `key`, see GpuTarget

    @property
    def device(self) -> str:
        """The name of the device whose table of kernels is used: "cpu"."""
        return "cpu"

    @property
    def lanes(self) -> int:
        """float32 elements in one vector."""
        return self.vector_bytes // 4

    def has_tiles(self, element: DType) -> bool:
        """Whether the CPU has tile instructions (Intel AMX) that multiply matrices of elements of this type."""
        return _TILES.get(element) in self.features.split(",")

    @property
    def has_byte_dot(self) -> bool:
        """Whether one instruction adds up four products of bytes (AVX512-VNNI, or AVX-VNNI with AVX2)."""
        features = self.features.split(",")
        return "+avx512vnni" in features or (self.lanes == 8 and "+avxvnni" in features)

    @property
    def has_small_byte_dot(self) -> bool:
        """Whether one or two instructions add up four products of bytes, of which the unsigned ones are at most 127.

        Two are PMADDUBSW and PMADDWD of AVX2 and AVX-512; one is that of `has_byte_dot`.
        """
        return self.has_byte_dot or self.name in ("avx2", "avx512")

    @property
    def without_tiles(self) -> Target:
        """The same CPU without its AMX features."""
        features = self.features.split(",")
        return replace(
            self, features=",".join(f"-{each[1:]}" if each.startswith("+amx") else each for each in features)
        )

    @property
    def needs(self) -> frozenset[str]:
        """LLVM's names of the instruction sets that code for this target may use."""
        return frozenset(each[1:] for each in self.features.split(",") if each.startswith("+"))

    @property
    def key(self) -> str:
        """Text that identifies the code generated for this target: code of one key runs on all targets of that key."""
        return f"{self.triple}/{self.cpu}/{self.features}/{self.vector_bytes}"

    def difference_from(self, key: str) -> str:
        """One line for messages: how the target with this key differs from this one.

        It names the instruction sets that only one of both has, since a key lists every feature of a CPU.
        """
        try:
            _, cpu, features, _ = key.split("/")
        except ValueError:
            return f"target {key!r}, this is {self.cpu!r}"
        stated = {each[1:] for each in features.split(",") if each.startswith("+")}
        more, fewer = ", ".join(sorted(stated - self.needs)), ", ".join(sorted(self.needs - stated))
        added = " ".join([f"with {more}"] * bool(more) + [f"without {fewer}"] * bool(fewer))
        return f"target {cpu!r}{added and ' '}{added}, this is {self.cpu!r}"


GPU_PREFIX = "sm_"  # begins the name of every GPU target


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """A CUDA device to generate code for. Equal targets get equal code.

    `key` leaves out figures that only the choice of tiles depends on, because tiles are part of a kernel's spec. The
    defaults are the figures of an A100.
    """

    arch: int = 80  # compute capability, major * 10 + minor
    multiprocessors: int = 108
    shared_bytes: int = 163 * 1024  # shared memory that one thread block may use
    device: str = "cuda"  # the device whose table of kernels is used
    tf32: bool = False  # whether float32 products may round their factors to 10 mantissa bits
    l2_bytes: int = 40 << 20  # the cache that all multiprocessors share
    cublaslt: int = 0  # version of the cuBLASLt library that is installed; 0: none

    @property
    def name(self) -> str:
        return f"sm_{self.arch}"

    @property
    def key(self) -> str:
        """Text that identifies the code generated for this target."""
        return self.name

    @property
    def tuning_key(self) -> str:
        """Text that identifies GPUs on which the same kernels are fastest: those of one architecture differ in size."""
        return f"{self.name}/{self.multiprocessors}/{self.shared_bytes}/{self.l2_bytes}/{self.cublaslt}"
