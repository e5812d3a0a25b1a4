"""GridSample: pixels of an image at positions that only a run shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, is_plannable, traffic

_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}  # along each axis
_MOST_PIXELS = 16  # of a sample: their places and weights are kept in registers while channels pass by


@dataclass(frozen=True)
class GridSampleSpec(KernelSpec):
    """Float32 images [batch, channels, *sizes], and the positions of `samples` numbers of each channel."""

    family: ClassVar[str] = "grid_sample"
    batch: Dim
    channels: Dim
    sizes: tuple[Dim, ...]
    samples: Dim
    mode: str
    padding: str
    aligned: bool

    @property
    def taps(self) -> int:
        """How many neighbours a sample has along each axis."""
        return _TAPS[self.mode]

    @property
    def summary(self) -> str:
        return f"samples({self.mode}, {self.taps ** len(self.sizes)} pixels each)"


@covers("GridSample")
def grid_sample(request: Request) -> KernelCall | None:
    """None for other elements than float32, and for samples of more than 16 pixels."""
    node = request.node
    x, grid = node.inputs[:2]
    if x is None or grid is None or not has_plannable_types(node):
        return None
    if x.dtype is not DType.FLOAT32 or grid.dtype is not DType.FLOAT32:
        return None
    mode, padding = str(attribute(node, "mode")), str(attribute(node, "padding_mode"))
    sizes, samples = x.shape[2:], product(grid.shape[1:-1])
    pixels = _TAPS[mode] ** len(sizes)
    spec = GridSampleSpec(x.shape[0], x.shape[1], sizes, samples, mode, padding, bool(attribute(node, "align_corners")))
    if pixels > _MOST_PIXELS or not all(map(is_plannable, (spec.batch, spec.channels, *sizes, samples))):
        return None
    flops = node.output.tensor.size * (2 * pixels)
    return KernelCall(spec, (In(0), In(1), Out()), flops=flops, bytes=traffic(node))
