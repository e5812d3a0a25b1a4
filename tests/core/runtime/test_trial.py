"""Trials of kernels: what a call finds in its memory."""

from __future__ import annotations

import ctypes

import numpy as np

from core.codegen.target import host
from core.ir.build import Builder
from core.ir.graph import Graph
from core.ir.types import DType, TensorType
from core.kernels.catalog import Packed, Request, select
from core.runtime import trial


def test_every_call_meets_weights_that_have_left_the_cache() -> None:
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
