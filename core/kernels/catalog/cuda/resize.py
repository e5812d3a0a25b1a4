"""Resize of images on a GPU: weighted sums of a few rows times a few columns, known at compile time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from core.ir.dim import product
from core.ir.types import Dim
from core.kernels.catalog import resize as on_cpu
from core.kernels.catalog.base import Block, KernelCall, KernelSpec, Request, covers, offers
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.resize import Taps

_SIZES = ((256, 4), (1024, 4), (512, 4))  # results, warps


@dataclass(frozen=True)
class ResizeSpec(KernelSpec):
    """Float32 images [batch, height, width, channels]. Pairs go along rows and columns: places of the image, results,
    and taps that make a result.

    Operands: x, y, and for rows and then for columns where the taps are (int32) and their weights, [results, taps].
    """

    family: ClassVar[str] = "resize"
    batch: Dim
    sizes: tuple[int, int]
    counts: tuple[int, int]
    taps: tuple[int, int]
    channels: int
    size: int
    warps: int

    @property
    def results(self) -> Dim:
        return product((self.batch, *self.counts, self.channels))

    @property
    def summary(self) -> str:
        return f"resize({self.taps[0]}x{self.taps[1]} taps, {self.size} a program)"


@covers("Resize", device="cuda")
def resize(request: Request) -> KernelCall | None:
    return next(_calls(request), None)


@offers("Resize", device="cuda")
def other_sizes(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.resize(request)
    if call is None or not isinstance(call.spec, on_cpu.ResizeSpec):
        return
    old = call.spec
    axes = (old.rows, old.columns)
    tables = [block for name, taps in zip(("rows", "columns"), axes, strict=True) for block in _tables(name, taps)]
    sizes, (high, deep), (wide, broad) = (old.rows.size, old.columns.size), old.rows.shape, old.columns.shape
    for size, warps in _SIZES:
        spec = ResizeSpec(old.batch, sizes, (high, wide), (deep, broad), old.channels, size, warps)
        yield replace(call, spec=spec, operands=(*call.operands, *tables), grid=(blocks(spec.results, size),))


def _tables(name: str, taps: Taps) -> tuple[Block, Block]:
    return Block(f"{name} places", taps.indices.astype(np.int32)), Block(f"{name} weights", taps.weights)
