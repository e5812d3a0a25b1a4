"""Generators for CPUs: `core.kernels.cpu.<family>.generate(spec, target)` writes the kernel of one spec."""

from __future__ import annotations

import importlib

from core.codegen.cache import ObjectCache
from core.codegen.jit import compile_kernel, object_key
from core.codegen.lang import Kernel
from core.kernels.catalog.base import KernelSpec
from core.kernels.target import Target


def generate(spec: KernelSpec, target: Target) -> Kernel:
    """The kernel of `spec`, by the generator of its family."""
    module = importlib.import_module(f"core.kernels.cpu.{spec.family}")
    kernel: Kernel = module.generate(spec, target)
    return kernel


def object_for(spec: KernelSpec, target: Target, cache: ObjectCache | None = None) -> bytes:
    """The object file of `spec`, from the cache when it holds one."""
    key = object_key(spec, target)
    found = cache.get(key) if cache is not None else None
    if found is not None:
        return found
    data = compile_kernel(generate(spec, target))
    if cache is not None:
        cache.put(key, data)
    return data
