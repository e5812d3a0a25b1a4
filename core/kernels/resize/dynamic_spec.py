"""Resize of images with dynamic extents: coordinates are computed at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.resize.image import changed_axes, channels_first, image_of, scales_of
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_COORDINATES = frozenset({"half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"})


@dataclass(frozen=True, slots=True)
class DynamicAxis:
    """An axis of `size` places that is resized to `count` places. A `scale` of None stands for count / size."""

    size: Dim
    count: Dim
    scale: float | None

    @property
    def is_identity(self) -> bool:
        return self.size == self.count and self.scale in (None, 1.0)


_UNIT = DynamicAxis(1, 1, None)


@dataclass(frozen=True)
class DynamicResizeSpec(KernelSpec):
    """Resize of the planes, rows and columns of float32 images [batch, planes, rows, columns, channels].

    `coordinates` is ONNX's `coordinate_transformation_mode`, `rounding` its `nearest_mode`; if that is "", results are
    interpolated linearly between two places per axis.
    """

    family: ClassVar[str] = "open_resize"
    generator: ClassVar[str] = "resize.dynamic_cpu"
    batch: Dim
    axes: tuple[DynamicAxis, DynamicAxis, DynamicAxis]
    channels: int
    coordinates: str
    rounding: str

    @property
    def summary(self) -> str:
        return f"resize({self.rounding or 'linear'}, {self.channels} channels)"


def dynamic_resize(request: Request) -> KernelCall | None:
    """Selector of linear and nearest Resize of float32 images in dynamic-shape code, along the axes of `image_of`.

    At least one extent of the image must be dynamic. None for other nodes, if generated code cannot compute a
    dimension, for coordinates other than `_COORDINATES`, for `antialias` and `exclude_outside`, for parameters that are
    inputs, and for a kept aspect ratio.
    """
    node = request.node
    x = node.inputs[0]
    if x is None or not has_plannable_types(node) or x.dtype is not DType.FLOAT32:
        return None
    mode, coordinates = attribute(node, "mode"), str(attribute(node, "coordinate_transformation_mode"))
    other = attribute(node, "antialias") or attribute(node, "exclude_outside") or len(node.inputs) > 1
    if mode not in ("nearest", "linear") or coordinates not in _COORDINATES or other:
        return None
    if not any(map(has_only_sizes, x.shape)):
        return None
    before, after = (channels_first(node, value.shape) for value in (x, node.output))
    scales = scales_of(node, len(before))
    if scales is None:
        return None
    image = image_of(node, changed_axes(before, after, scales))
    if image is None:
        return None
    planes, rows, columns = (
        _UNIT if axis is None else DynamicAxis(before[axis], after[axis], scales[axis]) for axis in image.axes
    )
    rounding = str(attribute(node, "nearest_mode")) if mode == "nearest" else ""
    spec = DynamicResizeSpec(image.batch, (planes, rows, columns), image.channels, coordinates, rounding)
    return KernelCall(spec, (In(0), Out()), flops=node.output.tensor.size * 8, bytes=traffic(node))
