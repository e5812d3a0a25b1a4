"""RoiAlign: regions of images, resampled to bins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_SAMPLES = 4  # samples per bin and axis that are assumed for costs, if their number depends on the region


@dataclass(frozen=True)
class RoiAlignSpec(KernelSpec):
    """Float32 images [batch, channels, *sizes], regions [R, 4] and the image index of each; bins [R, channels, *bins].

    A region with an invalid image index, or with more samples than the reference allows, sets
    `Status.INDEX_OUT_OF_RANGE`, and its bins are not written.
    """

    family: ClassVar[str] = "roi_align"
    generator: ClassVar[str] = "sampling.roi_align_cpu"
    index: DType
    batch: Dim
    channels: Dim
    sizes: tuple[Dim, Dim]
    regions: Dim
    bins: tuple[int, int]
    samples: int  # per bin along each axis; 0: the number of its pixels, rounded up
    scale: float
    half: bool  # whether coordinates are shifted by half a pixel
    greatest: bool

    @property
    def summary(self) -> str:
        return f"regions({'max' if self.greatest else 'mean'}, {self.bins[0]}x{self.bins[1]} bins)"


def roi_align(request: Request) -> KernelCall | None:
    """Selector of RoiAlign of float32 images, with image indices of int32 or int64.

    None for other types, and if generated code cannot compute a dimension.
    """
    node = request.node
    x, regions, images = node.inputs
    if x is None or regions is None or images is None or not has_plannable_types(node):
        return None
    if x.dtype is not DType.FLOAT32 or images.dtype not in (DType.INT32, DType.INT64):
        return None
    spec = RoiAlignSpec(
        index=images.dtype,
        batch=x.shape[0],
        channels=x.shape[1],
        sizes=(x.shape[2], x.shape[3]),
        regions=regions.shape[0],
        bins=(int(attribute(node, "output_height")), int(attribute(node, "output_width"))),
        samples=int(attribute(node, "sampling_ratio")),
        scale=float(attribute(node, "spatial_scale")),
        half=attribute(node, "coordinate_transformation_mode") == "half_pixel",
        greatest=attribute(node, "mode") == "max",
    )
    work = (spec.samples or _SAMPLES) ** 2 * 8
    return KernelCall(spec, (In(0), In(1), In(2), Out()), flops=node.output.tensor.size * work, bytes=traffic(node))
