"""Generators for CUDA GPUs: `core.kernels.cuda.<family>.generate(spec, target)` writes the kernel of one spec.

Writing needs nothing; compiling and interpreting need Triton (the extra `cuda`), which is imported when they begin.
A cached binary is used whichever version of Triton is installed, or without any: its key names the version that
compiled it, and `cached` looks for those of all versions that the tests compile with.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence

from core.codegen.cache import ObjectCache
from core.codegen.jit import generator_version
from core.ir.graph import Array
from core.kernels.catalog.base import KernelSpec
from core.kernels.cuda.binary import Binary
from core.kernels.cuda.source import Source
from core.kernels.cuda.toolchain import TESTED, triton_version
from core.kernels.target import GpuTarget

__all__ = ["Binary", "Source", "binary_for", "binary_key", "cached", "generate", "interpret", "triton_version"]


def generate(spec: KernelSpec, target: GpuTarget) -> Source:
    """The kernel of `spec`, by the generator of its family."""
    module = importlib.import_module(f"core.kernels.cuda.{spec.family}")
    source: Source = module.generate(spec, target)
    return source


def binary_for(spec: KernelSpec, target: GpuTarget, cache: ObjectCache | None = None) -> Binary:
    """The binary of `spec`, from the cache when it holds one. UnsupportedError when it has to be compiled and Triton is
    not installed."""
    found = cached(spec, target, cache) if cache is not None else None
    if found is not None:
        return found
    from core.kernels.cuda.compiler import compile_source

    binary = compile_source(generate(spec, target), target)
    if cache is not None:
        cache.put(binary_key(spec, target), binary.to_bytes())
    return binary


def cached(spec: KernelSpec, target: GpuTarget, cache: ObjectCache) -> Binary | None:
    """The binary of `spec` in the cache: what the installed Triton compiled, else what another tested version did."""
    for version in dict.fromkeys((triton_version(), *TESTED)):
        data = cache.get(binary_key(spec, target, version))
        if data is not None:
            return Binary.from_bytes(data)
    return None


def binary_key(spec: KernelSpec, target: GpuTarget, version: str | None = None) -> str:
    """Everything that the binary of `spec` depends on, as one digest. `version`: of the Triton that compiles it, by
    default the installed one."""
    text = "\n".join((spec.key, target.key, generator_version(), triton_version() if version is None else version))
    return hashlib.sha256(text.encode()).hexdigest()


def interpret(source: Source, grid: Sequence[int], arrays: Sequence[Array | int], n: int) -> None:
    """Run all programs of a kernel on this CPU, one after the other: slow, for tests. `arrays` are the operands, dense
    NumPy arrays or addresses."""
    from core.kernels.cuda.interpreter import run

    run(source, grid, arrays, n)
