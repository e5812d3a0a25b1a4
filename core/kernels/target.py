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
    features: str  # LLVM feature string, sorted
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
        features = (name for name in self.features.split(",") if not name.startswith("+amx"))
        return replace(self, features=",".join(features))

    @property
    def key(self) -> str:
        """Text that identifies the code generated for this target."""
        return f"{self.triple}/{self.cpu}/{self.features}/{self.vector_bytes}"


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
