"""Entry points to the CPU generators: `generate` and `object_for`.

`spec.generator` names the module whose `generate(spec, target)` writes the kernel of a spec. The other modules of this
package are helpers that several generators share.
"""

from __future__ import annotations

import importlib

from lathe.core.codegen.jit import compile_kernel, object_key
from lathe.core.codegen.lang import Kernel
from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.target import Target


def generate(spec: KernelSpec, target: Target) -> Kernel:
    """The kernel of `spec`, written by the generator that the spec names."""
    module = importlib.import_module(f"lathe.core.kernels.{spec.generator}")
    kernel: Kernel = module.generate(spec, target)
    return kernel


def object_for(spec: KernelSpec, target: Target, cache: ObjectCache | None = None) -> bytes:
    """The object file of `spec`: from the cache, or compiled and then stored there if that is possible."""
    key = object_key(spec, target)
    found = cache.get(key) if cache is not None else None
    if found is not None:
        return found
    data = compile_kernel(generate(spec, target))
    if cache is not None:
        cache.put_if_possible(key, data)
    return data
