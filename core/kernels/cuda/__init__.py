"""Entry points to the CUDA generators: `generate`, `binary_for`, `interpret`.

`spec.generator` names the module whose `generate(spec, target)` writes the kernel of a spec. Generating text needs no
further package. Compiling and interpreting need Triton (the extra `cuda`), which is imported on first use.

A cached binary works with any installed version of Triton, or with none. Its key names the version that compiled it,
and `cached` looks for binaries of all versions with which the tests compile.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence

from lathe.core.codegen.jit import generator_version
from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.ir.graph import Array
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.cuda.binary import Binary
from lathe.core.kernels.cuda.source import Source
from lathe.core.kernels.cuda.toolchain import TESTED, triton_version
from lathe.core.kernels.target import GpuTarget

__all__ = ["Binary", "Source", "binary_for", "binary_key", "cached", "generate", "interpret", "triton_version"]


def generate(spec: KernelSpec, target: GpuTarget) -> Source:
    """The source of the kernel of `spec`, written by the generator that the spec names."""
    module = importlib.import_module(f"lathe.core.kernels.{spec.cuda_generator or spec.generator}")
    source: Source = module.generate(spec, target)
    return source


def binary_for(spec: KernelSpec, target: GpuTarget, cache: ObjectCache | None = None) -> Binary:
    """The binary of `spec`: from the cache, or compiled and then stored there if that is possible.

    UnsupportedError if it must be compiled and Triton is not installed, RuntimeError if it does not compile,
    ArtifactError if the cached bytes are no binary.
    """
    found = cached(spec, target, cache) if cache is not None else None
    if found is not None:
        return found
    from lathe.core.kernels.cuda.compiler import compile_source

    binary = compile_source(generate(spec, target), target)
    if cache is not None:
        cache.put_if_possible(binary_key(spec, target), binary.to_bytes())
    return binary


def cached(spec: KernelSpec, target: GpuTarget, cache: ObjectCache) -> Binary | None:
    """The cached binary of `spec`: that of the installed Triton, otherwise that of another tested version, or None.

    ArtifactError if the cached bytes are no binary.
    """
    for version in dict.fromkeys((triton_version(), *TESTED)):
        data = cache.get(binary_key(spec, target, version))
        if data is not None:
            return Binary.from_bytes(data)
    return None


def binary_key(spec: KernelSpec, target: GpuTarget, version: str | None = None) -> str:
    """The cache's key of the binary of `spec`: a SHA-256 digest of the spec, target, generators and Triton's version.

    `version` is that of the Triton that compiles it, by default the installed version.
    """
    text = "\n".join((spec.key, target.key, generator_version(), triton_version() if version is None else version))
    return hashlib.sha256(text.encode()).hexdigest()


def interpret(source: Source, grid: Sequence[int], arrays: Sequence[Array | int], n: int) -> None:
    """Run all programs of a kernel on this CPU, one after the other; slow, for tests.

    `grid` is the number of programs along each axis. `arrays` are the operands: C-contiguous NumPy arrays, which
    kernels write in place, or addresses. Errors are those of `lathe.core.kernels.cuda.interpreter.run`.
    """
    from lathe.core.kernels.cuda.interpreter import run

    run(source, grid, arrays, n)
