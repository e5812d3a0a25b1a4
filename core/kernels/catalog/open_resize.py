"""Resize of images whose extents are sizes of a table: where a result lies in the image is computed in the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from core.ir.dims import is_sized
from core.ir.graph import Node
from core.ir.types import Dim, DType, Shape
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.ops import registry
from core.ops.registry import Call
from core.ops.resize import resized_axes

_COORDINATES = frozenset({"half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"})


@dataclass(frozen=True, slots=True)
class OpenAxis:
    """An axis of `size` places that becomes one of `count`. `scale`: None where it is count / size."""

    size: Dim
    count: Dim
    scale: float | None


@dataclass(frozen=True)
class OpenResizeSpec(KernelSpec):
    """Float32 images [batch, height, width, channels]. `rounding`: how the nearest place is found; "" for linear
    interpolation between two places of each axis."""

    family: ClassVar[str] = "open_resize"
    batch: Dim
    axes: tuple[OpenAxis, OpenAxis]
    channels: int
    coordinates: str
    rounding: str

    @property
    def summary(self) -> str:
        return f"resize({self.rounding or 'linear'}, {self.channels} channels)"


@covers("Resize")
def open_resize(request: Request) -> KernelCall | None:
    """None for other interpolations than linear and to the nearest, and where another axis than these two changes."""
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
    if scales is None or before[:2] != after[:2] or not any(map(is_sized, (*before[2:], *after[2:]))):
        return None
    channels = before[1] if last else 1
    if not isinstance(channels, int):
        return None
    height, width = (OpenAxis(before[axis], after[axis], scales[axis]) for axis in (2, 3))
    rounding = str(attribute(node, "nearest_mode")) if mode == "nearest" else ""
    batch = before[0] if last else before[0] * before[1]
    spec = OpenResizeSpec(batch, (height, width), channels, coordinates, rounding)
    return KernelCall(spec, (In(0), Out()), flops=node.output.tensor.size * 8, bytes=traffic(node))


def _channels_first(shape: Shape, last: bool) -> Shape:
    return (shape[0], shape[-1], *shape[1:-1]) if last else shape


def _scales(node: Node) -> Sequence[float | None] | None:
    """The scale of each axis, channels first; None for one that follows from sizes. None where proportions are kept."""
    call = Call(registry.get(node.op), node, [])
    scales: Sequence[Any] | None = call.param("scales")
    if not scales and attribute(node, "keep_aspect_ratio_policy") != "stretch":
        return None
    found: list[float | None] = [None] * 4
    for position, axis in enumerate(resized_axes(call, 4)):
        found[axis] = float(scales[position]) if scales else None
    return found
