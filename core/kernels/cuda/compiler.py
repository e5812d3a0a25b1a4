"""From the text of a kernel to machine code, by Triton; needs no GPU."""

from __future__ import annotations

import tempfile

from core.kernels.cuda.binary import Binary
from core.kernels.cuda.source import Source
from core.kernels.cuda.toolchain import LOCK, function_of, module
from core.kernels.target import GPU_ALIGNMENT, GpuTarget

_WARP = 32


def compile_source(source: Source, target: GpuTarget) -> Binary:
    """Machine code for `target`. UnsupportedError without Triton; RuntimeError when Triton does not take the text."""
    triton = module()
    with LOCK, tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # what is kept lies in Lathe's own cache
        try:
            kernel = triton.compile(_ast_source(triton, source), target=_target(target), options=_options(source))
        except Exception as error:  # Triton has no common class of its errors
            raise RuntimeError(f"kernel {source.symbol} does not compile for {target.name}: {error}") from error
    facts = kernel.metadata
    if facts.global_scratch_size or facts.profile_scratch_size:
        raise RuntimeError(f"kernel {source.symbol} needs scratch of Triton's own, which nobody provides")
    return Binary(source.symbol, target.arch, source.warps, facts.shared, kernel.asm["cubin"], kernel.asm["ptx"])


def _ast_source(triton: object, source: Source) -> object:
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    function = JITFunction(function_of(source))
    signature = {name: f"*{element}" for name, element in zip(function.arg_names, source.operands, strict=False)}
    aligned = {(i,): [["tt.divisibility", GPU_ALIGNMENT]] for i in range(len(source.operands))}
    return ASTSource(function, {**signature, "n": "i32"}, {}, aligned)


def _target(target: GpuTarget) -> object:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", target.arch, _WARP)


def _options(source: Source) -> dict[str, object]:
    return {"num_warps": source.warps, "num_stages": source.stages, "enable_fp_fusion": True}
