"""Resize of images with dynamic extents: coordinates are computed at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Node
from lathe.core.ir.types import Dim, DType, Shape
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.ops.image.resize import resized_axes
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Call

_COORDINATES = frozenset({"half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"})


@dataclass(frozen=True, slots=True)
class DynamicAxis:
    """An axis of `size` places that is resized to `count` places. A `scale` of None stands for count / size."""

    size: Dim
    count: Dim
    scale: float | None


@dataclass(frozen=True)
class DynamicResizeSpec(KernelSpec):
    """Resize of the height and width of float32 images [batch, height, width, channels].

    `coordinates` is ONNX's `coordinate_transformation_mode`, `rounding` its `nearest_mode`; if that is "", results are
    interpolated linearly between two places per axis.
    """

    family: ClassVar[str] = "open_resize"
    generator: ClassVar[str] = "resize.dynamic_cpu"
    batch: Dim
    axes: tuple[DynamicAxis, DynamicAxis]
    channels: int
    coordinates: str
    rounding: str

    @property
    def summary(self) -> str:
        return f"resize({self.rounding or 'linear'}, {self.channels} channels)"


def dynamic_resize(request: Request) -> KernelCall | None:
    """Selector of linear and nearest Resize of float32 images of rank 4, if only the two spatial axes change.

    At least one spatial extent, of the image or of the result, must be dynamic; a channels-last image has a known
    number of channels. None for other nodes, if generated code cannot compute a dimension, for coordinates other than
    `_COORDINATES`, for `antialias` and `exclude_outside`, for parameters that are inputs, and for a kept aspect ratio.
    """
    node = request.node
    x = node.inputs[0]
    if x is None or not has_plannable_types(node) or x.dtype is not DType.FLOAT32 or len(x.shape) != 4:
        return None
    mode, coordinates = attribute(node, "mode"), str(attribute(node, "coordinate_transformation_mode"))
    other = attribute(node, "antialias") or attribute(node, "exclude_outside") or len(node.inputs) > 1
    if mode not in ("nearest", "linear") or coordinates not in _COORDINATES or other:
        return None
    last = attribute(node, "layout") == "NHWC"
    before, after = (_channels_first(value.shape, last) for value in (x, node.output))
    scales = _scales(node)
    if scales is None or before[:2] != after[:2] or not any(map(has_only_sizes, (*before[2:], *after[2:]))):
        return None
    channels = before[1] if last else 1
    if not isinstance(channels, int):
        return None
    height, width = (DynamicAxis(before[axis], after[axis], scales[axis]) for axis in (2, 3))
    rounding = str(attribute(node, "nearest_mode")) if mode == "nearest" else ""
    batch = before[0] if last else before[0] * before[1]
    spec = DynamicResizeSpec(batch, (height, width), channels, coordinates, rounding)
    return KernelCall(spec, (In(0), Out()), flops=node.output.tensor.size * 8, bytes=traffic(node))


def _channels_first(shape: Shape, last: bool) -> Shape:
    return (shape[0], shape[-1], *shape[1:-1]) if last else shape


def _scales(node: Node) -> Sequence[float | None] | None:
    """The scale of each of four axes, channels first; None in place of a scale that follows from the axis's sizes.

    None instead of a sequence if the node has no scales and keeps the aspect ratio.
    """
    call = Call(registry.get(node.op), node, [])
    scales: Sequence[Any] | None = call.param("scales")
    if not scales and attribute(node, "keep_aspect_ratio_policy") != "stretch":
        return None
    found: list[float | None] = [None] * 4
    for position, axis in enumerate(resized_axes(call, 4)):
        found[axis] = float(scales[position]) if scales else None
    return found
