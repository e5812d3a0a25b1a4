"""Resize of images on a GPU: weighted sums of a few rows and columns, with weights known at compile time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import Block, KernelCall, KernelSpec, Request
from lathe.core.kernels.resize import spec as on_cpu
from lathe.core.kernels.resize.spec import Taps
from lathe.core.kernels.shared.cuda_tiling import blocks

_SIZES = ((256, 4), (1024, 4), (512, 4))  # results, warps


@dataclass(frozen=True)
class ResizeSpec(KernelSpec):
    """Resize of float32 images [batch, height, width, channels].

    Pairs hold numbers for rows and columns: image extents, results, and taps per result. The operands are x, y, then
    for rows and for columns the indices of the taps (int32) and their weights, each [results, taps].
    """

    family: ClassVar[str] = "resize"
    generator: ClassVar[str] = "resize.cuda"
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


def resize(request: Request) -> KernelCall | None:
    """Selector of Resize along one or two neighbouring axes of float32 images of known size, in all modes.

    None for other nodes, for parameters that only a run knows, and if a result would lie outside the image and get the
    extrapolation value.
    """
    return next(_calls(request), None)


def other_sizes(request: Request) -> Iterable[KernelCall]:
    """Offers of the Resize of `resize` with every candidate number of results per program, the selector's own included.

    No offers for nodes that `resize` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.resize(request)
    if call is None or not isinstance(call.spec, on_cpu.ResizeSpec) or call.spec.planes.size > 1:
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
