"""A way to write, compile and run a small kernel in a test."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from core.codegen.jit import Library, compile_kernel
from core.codegen.lang import Kernel
from core.codegen.target import host
from core.kernels.catalog.base import KernelSpec
from core.kernels.target import Target

_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@dataclass(frozen=True)
class DemoSpec(KernelSpec):
    family: ClassVar[str] = "demo"
    name: str = "demo"


def run(
    write: Callable[[Kernel], None], arrays: list[Any], n: int = 1, threads: int = 1, target: Target | None = None
) -> int:
    """Compile what `write` makes, run it on `threads` threads; returns the status word."""
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
