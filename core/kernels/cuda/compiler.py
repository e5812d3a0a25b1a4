"""Compilation of a kernel's text to machine code by Triton; needs no GPU."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from typing import Any

from lathe.core.kernels.cuda.binary import Binary
from lathe.core.kernels.cuda.source import Source
from lathe.core.kernels.cuda.toolchain import LOCK, function_of, import_triton, triton_version
from lathe.core.kernels.target import GPU_ALIGNMENT, GpuTarget

_CACHED = 4  # compiled kernels in the cache
_WARP = 32
_ARCH_SPECIFIC = 90  # from this architecture on, Triton writes PTX with instructions of one architecture only


def compile_source(source: Source, target: GpuTarget) -> Binary:
    """Machine code for `target`, with PTX if later architectures can run it.

    UnsupportedError without Triton; RuntimeError if Triton cannot compile the text, or the kernel needs scratch memory
    of Triton's own.
    """
    kernel = _compile(source, target.arch)
    ptx = kernel.asm["ptx"] if target.arch < _ARCH_SPECIFIC else ""
    facts = (source.symbol, target.arch, source.warps, kernel.metadata.shared)
    return Binary(*facts, kernel.asm["cubin"], ptx, f"triton {triton_version()}")


@lru_cache(_CACHED)
def _compile(source: Source, arch: int) -> Any:
    """Triton's compiled kernel of `source` for the architecture sm_`arch`.

    RuntimeError if Triton cannot compile the text, or the kernel needs scratch memory of Triton's own.
    """
    triton = import_triton()
    with LOCK, tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # Lathe has a cache of its own
        try:
            kernel = triton.compile(_ast_source(source), target=_target(arch), options=_options(source))
        except Exception as error:  # Triton's errors have no common class
            raise RuntimeError(f"kernel {source.symbol} does not compile for sm_{arch}: {error}") from error
    if kernel.metadata.global_scratch_size or kernel.metadata.profile_scratch_size:
        raise RuntimeError(f"kernel {source.symbol} needs Triton's own scratch memory, which is not supported")
    return kernel


def _ast_source(source: Source) -> object:
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    function = JITFunction(function_of(source))
    signature = {name: f"*{element}" for name, element in zip(function.arg_names, source.operands, strict=False)}
    aligned = {(i,): [["tt.divisibility", GPU_ALIGNMENT]] for i in range(len(source.operands))}
    return ASTSource(function, {**signature, "n": "i32"}, {}, aligned)


def _target(arch: int) -> object:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, _WARP)


def _options(source: Source) -> dict[str, object]:
    return {"num_warps": source.warps, "num_stages": source.stages, "enable_fp_fusion": True}
