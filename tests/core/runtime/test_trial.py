"""Kernel trials of the tuner: the state of caches and memory at a call."""

from __future__ import annotations

import ctypes

import numpy as np

from lathe.core.codegen.target import host
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Packed, Request
from lathe.core.kernels.choose import select
from lathe.core.runtime.host import trial


def test_every_trial_call_finds_weights_out_of_the_cache() -> None:
    graph = Graph("product")
    b = Builder(graph)
    weights = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
    b("MatMul", b.input("x", TensorType(DType.FLOAT32, (2, 64))), b.constant(weights, "w"))
    request = Request(graph.nodes[-1], graph.constants, host())
    call = select(request)
    assert call is not None
    index, packed = next((i, o.pack(weights)) for i, o in enumerate(call.operands) if isinstance(o, Packed))
    content = packed.tobytes()
    seen: list[int] = []

    def kernel(operands: int, *_: int) -> None:
        place = ctypes.cast(operands, ctypes.POINTER(ctypes.c_int64))[index]
        assert ctypes.string_at(place, len(content)) == content
        seen.append(place)

    function = trial._KERNEL(kernel)
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    timed = trial.Trial(call, request, address, 1, {})
    copies = 4 * host().l2_bytes // len(content)
    while len(seen) < 2 * copies:
        timed.seconds()
    assert len(set(seen[:copies])) == copies
