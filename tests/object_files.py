"""Equal LLVM assembly is compiled once by all test processes, and not again by later runs.

LLVM takes a quarter of the processor time of `make test`. In the compiler's own cache, the key is made of a kernel's
spec and the source of all generators. So each change of a generator empties it; and tests of kernels use no cache. Here
the key is made of the assembly. So the generators still write every kernel, and LLVM compiles those that changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from lathe.core.codegen import jit
from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.kernels.target import Target

_MAX_BYTES = 1 << 30  # a run of all tests writes a tenth of it


def install(folder: Path) -> Callable[[], None]:
    """Keep the object files of all assembly that this process compiles. Returns a function that ends this."""
    compile_text = jit.compile_text
    cache = ObjectCache(folder, _MAX_BYTES)
    passes = hashlib.sha256(Path(jit.__file__).read_bytes()).hexdigest()

    def cached(text: str, target: Target) -> bytes:
        parts = (text, repr(target), jit.llvm_version(), passes)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        if (found := cache.get(key)) is not None:
            jit._generated.set()
            return found
        data = compile_text(text, target)
        cache.put_if_possible(key, data)
        return data

    jit.compile_text = cached

    def uninstall() -> None:
        jit.compile_text = compile_text

    return uninstall
