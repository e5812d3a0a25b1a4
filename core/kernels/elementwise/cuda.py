"""Elementwise bodies on a GPU: each input is read once, each output is written once."""

from __future__ import annotations

from lathe.core.kernels.cuda.algebra import Algebra
from lathe.core.kernels.cuda.nest import place
from lathe.core.kernels.cuda.source import Source, Writer
from lathe.core.kernels.elementwise.cuda_spec import ElementwiseSpec
from lathe.core.kernels.target import GpuTarget
from lathe.core.ops.nn.fused import scalar_body


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
