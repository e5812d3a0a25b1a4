"""Elementwise bodies as one pass over memory: each input is read once, each output is written once."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.kernels.cpu.nest import for_each_row, for_each_vector, grain, has_masks
from lathe.core.kernels.elementwise.spec import ElementwiseSpec
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.fused import scalar_body


def generate(spec: ElementwiseSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    body, nest = spec.body, spec.nest
    inputs = [k.operand(i, value.dtype) for i, value in enumerate(body.inputs)]
    outputs = [k.operand(len(inputs) + i, value.dtype) for i, value in enumerate(body.outputs)]
    k.read_numbers(len(inputs) + len(outputs), nest.dims)
    spread = [stride == 0 for stride in nest.loop(nest.rank - 1)]
    sizes = [dtype.itemsize for dtype in bodies.dtypes(body)]
    lanes = max(1, target.vector_bytes // max(sizes))

    def row(offsets: list[Val], length: Val) -> None:
        sources = [pointer.at(offset) for pointer, offset in zip(inputs, offsets, strict=False)]
        targets = [pointer.at(offsets[-1]) for pointer in outputs]
        fixed = [source.load() if same else None for source, same in zip(sources, spread, strict=False)]

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            x = [
                source.load(i, lanes, mask) if value is None else value
                for source, value in zip(sources, fixed, strict=True)
            ]
            for pointer, y in zip(targets, scalar_body(k.ops, body, x), strict=True):
                pointer.store(k.ops.splat(y, lanes), i, mask)

        unroll = 1 if bodies.cost(body) > 8 else 4
        for_each_vector(k, length, step, lanes, has_masks(target, sizes), unroll)

    moved = sum(pointer.dtype.itemsize for pointer in (*inputs, *outputs))
    for_each_row(k, nest, grain(moved, bodies.cost(body)), row)
    return k
