"""PackImage on a GPU: a program reads a block of pixels by channels, and writes it without gaps."""

from __future__ import annotations

from lathe.core.ir.dim import product
from lathe.core.kernels.copy.pack_image_cuda_spec import PackImageSpec
from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.source import Source, Writer, text_of
from lathe.core.kernels.target import GpuTarget


def generate(spec: PackImageSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    e = Algebra(w)
    w.operand("x", spec.source)
    w.operand("y", spec.target)
    *loops, channels = spec.nest.extents
    assert isinstance(channels, int)
    width = 1 << (channels - 1).bit_length()
    pixel = w.let(f"tl.program_id(0) * {spec.pixels} + tl.arange(0, {spec.pixels})[:, None]", "i")
    channel = w.let(f"tl.arange(0, {width})[None, :]", "channel")
    inside = w.let(f"{pixel} < {text_of(product(loops))}", "inside")
    here = Place((*split(w, pixel, loops), channel), (None,) * spec.nest.rank)
    source, to = spec.nest.strides
    value = e.load("x", here.offset(source), spec.source, f"{inside} & ({channel} < {spec.channels})", "0.0")
    mask = inside if width == channels else f"{inside} & ({channel} < {channels})"
    e.store("y", here.offset(to), Reg(value.name, spec.target), mask)
    return w.source()
