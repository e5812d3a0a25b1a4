"""GridSample: interpolated pixels of an image at computed positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, is_plannable, traffic

_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}  # along each axis
_MOST_PIXELS = 16  # per sample: their places and weights stay in registers for all channels


@dataclass(frozen=True)
class GridSampleSpec(KernelSpec):
    """Float32 images [batch, channels, *sizes], sampled at `samples` positions per image."""

    family: ClassVar[str] = "grid_sample"
    generator: ClassVar[str] = "sampling.grid_sample_cpu"
    batch: Dim
    channels: Dim
    sizes: tuple[Dim, ...]
    samples: Dim
    mode: str
    padding: str
    aligned: bool

    @property
    def taps(self) -> int:
        """The number of neighbours of a sample along each axis."""
        return _TAPS[self.mode]

    @property
    def summary(self) -> str:
        return f"samples({self.mode}, {self.taps ** len(self.sizes)} pixels each)"


def grid_sample(request: Request) -> KernelCall | None:
    """Selector of GridSample of float32 images and grids, with at most 16 pixels (taps of all axes) per sample.

    So it takes images of one or two axes in all modes, and of more axes in the modes that read few pixels. None for
    other nodes, and if generated code cannot compute a dimension.
    """
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
