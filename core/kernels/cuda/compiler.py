"""From the text of a kernel to machine code, by Triton; needs no GPU."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from typing import Any

from core.kernels.cuda.binary import Binary
from core.kernels.cuda.source import Source
from core.kernels.cuda.toolchain import LOCK, function_of, module, triton_version
from core.kernels.target import GPU_ALIGNMENT, GpuTarget

_KEPT = 4  # kernels as Triton gives them
_WARP = 32
_OWN = 90  # from here on Triton writes PTX with instructions that only one architecture has


def compile_source(source: Source, target: GpuTarget) -> Binary:
    """Machine code for `target`, with the PTX where later architectures can run that. UnsupportedError without Triton;
    RuntimeError when Triton refuses the text."""
    kernel = _compiled(source, target.arch)
    ptx = kernel.asm["ptx"] if target.arch < _OWN else ""
    facts = (source.symbol, target.arch, source.warps, kernel.metadata.shared)
    return Binary(*facts, kernel.asm["cubin"], ptx, f"triton {triton_version()}")


@lru_cache(_KEPT)
def _compiled(source: Source, arch: int) -> Any:
    """What Triton makes of the text."""
    triton = module()
    with LOCK, tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # what is kept lies in Lathe's own cache
        try:
            kernel = triton.compile(_ast_source(source), target=_target(arch), options=_options(source))
        except Exception as error:  # Triton has no common class of its errors
            raise RuntimeError(f"kernel {source.symbol} does not compile for sm_{arch}: {error}") from error
    if kernel.metadata.global_scratch_size or kernel.metadata.profile_scratch_size:
        raise RuntimeError(f"kernel {source.symbol} needs scratch of Triton's own, which nobody provides")
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
