"""Writes, compiles and runs a small kernel in a test."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lathe.core.codegen.jit import Library, compile_kernel
from lathe.core.codegen.lang import Kernel
from lathe.core.codegen.target import host
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.target import Target

_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@dataclass(frozen=True)
class DemoSpec(KernelSpec):
    family: ClassVar[str] = "demo"
    name: str = "demo"


def run(
    write: Callable[[Kernel], None], arrays: list[Any], n: int = 1, threads: int = 1, target: Target | None = None
) -> int:
    """Compile the kernel that `write` writes and run it on `threads` threads. Returns the status word."""
    kernel = Kernel(DemoSpec(), target or host())
    write(kernel)
    counter = np.zeros(8, np.int64)
    addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
    with Library({kernel.symbol: compile_kernel(kernel)}) as library:
        native = _NATIVE(library.address(kernel.symbol))
        team = [
            threading.Thread(target=native, args=(addresses.ctypes.data, n, tid, threads, counter.ctypes.data))
            for tid in range(threads)
        ]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
    return int(counter[1])
