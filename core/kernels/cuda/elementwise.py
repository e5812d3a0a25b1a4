"""Elementwise bodies: every input is read once, every output written once."""

from __future__ import annotations

from core.kernels.catalog.cuda.elementwise import ElementwiseSpec
from core.kernels.cuda.algebra import Algebra
from core.kernels.cuda.nest import place
from core.kernels.cuda.source import Source, Writer
from core.kernels.target import GpuTarget
from core.ops.fused import scalar_body


def generate(spec: ElementwiseSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    e = Algebra(w)
    inputs = [w.operand(f"x{i}", value.dtype) for i, value in enumerate(spec.body.inputs)]
    outputs = [w.operand(f"y{i}", value.dtype) for i, value in enumerate(spec.body.outputs)]
    here = place(w, spec.nest, spec.tiling, "tl.program_id(0)")
    registers = [
        e.load(pointer, here.offset(strides), value.dtype, here.mask(strides))
        for pointer, strides, value in zip(inputs, spec.nest.strides, spec.body.inputs, strict=False)
    ]
    results = scalar_body(e, spec.body, registers)
    to = spec.nest.strides[-1]
    for pointer, value in zip(outputs, results, strict=True):
        e.store(pointer, here.offset(to), value, here.mask(to))
    return w.source(spec.tiling.warps)
