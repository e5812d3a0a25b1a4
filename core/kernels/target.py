"""What a machine offers to generated code: plain facts, known without LLVM or a driver."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.ir.types import DType

_TILES = {DType.BFLOAT16: "+amx-bf16", DType.FLOAT16: "+amx-fp16", DType.UINT8: "+amx-int8"}

GPU_ALIGNMENT = 16  # of every operand of a GPU's kernel, in bytes: the widest load of a thread


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU to generate for. Two equal targets get byte-equal code."""

    name: str  # "avx512", "avx2", "neon", "plain"
    triple: str  # LLVM target triple
    cpu: str  # LLVM CPU name
    features: str  # LLVM feature string: every instruction set that code may use with "+", every other one with "-"
    vector_bytes: int  # width of one vector register
    registers: int  # number of vector registers
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 1024 * 1024
    tf32: bool = False  # whether factors of float32 may be rounded to 10 bits of mantissa; no part of `key`, as below

    @property
    def device(self) -> str:
        """Whose kernels the catalog offers."""
        return "cpu"

    @property
    def lanes(self) -> int:
        """float32 elements in one vector."""
        return self.vector_bytes // 4

    def has_tiles(self, element: DType) -> bool:
        """Whether instructions multiply whole matrices of such elements (Intel AMX)."""
        return _TILES.get(element) in self.features.split(",")

    @property
    def without_tiles(self) -> Target:
        """The same machine as if it had vectors only."""
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
        """Text that identifies the code generated for this target."""
        return f"{self.triple}/{self.cpu}/{self.features}/{self.vector_bytes}"

    def differs_from(self, key: str) -> str:
        """How the target with this key differs, in short: a key lists every feature of a CPU."""
        try:
            _, cpu, features, _ = key.split("/")
        except ValueError:
            return f"target {key!r}, this is {self.cpu!r}"
        stated = {each[1:] for each in features.split(",") if each.startswith("+")}
        more, fewer = ", ".join(sorted(stated - self.needs)), ", ".join(sorted(self.needs - stated))
        added = " ".join([f"with {more}"] * bool(more) + [f"without {fewer}"] * bool(fewer))
        return f"target {cpu!r}{added and ' '}{added}, this is {self.cpu!r}"


GPU_PREFIX = "sm_"  # of the description of a GPU


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """A CUDA device to generate for. Two equal targets get equal code; what only the choice of tiles looks at does not
    stand in `key`, since tiles are part of a kernel's spec. The figures that are not given are those of an A100."""

    arch: int = 80  # compute capability, major * 10 + minor
    multiprocessors: int = 108
    shared_bytes: int = 163 * 1024  # that one block of threads may have
    device: str = "cuda"  # whose kernels the catalog offers
    tf32: bool = False  # whether products of float32 may round their factors to 10 bits of mantissa
    l2_bytes: int = 40 << 20  # the cache that all multiprocessors share
    cublaslt: int = 0  # the version of the vendor's library of products that is at hand; 0: none

    @property
    def name(self) -> str:
        return f"sm_{self.arch}"

    @property
    def key(self) -> str:
        """Text that identifies the code generated for this target."""
        return self.name

    @property
    def likeness(self) -> str:
        """Text that identifies where the same kernels are fastest: GPUs of one architecture differ in size."""
        return f"{self.name}/{self.multiprocessors}/{self.shared_bytes}/{self.l2_bytes}/{self.cublaslt}"
