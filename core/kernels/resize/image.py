"""The image that a Resize works on: at most three neighbouring axes, between a batch and channels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Node
from lathe.core.ir.types import Dim
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.ops.image.resize import resized_axes
from lathe.core.ops.nn.spatial import channels_last, first_shape
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Call

_MOST_AXES = 3  # planes, rows and columns


@dataclass(frozen=True, slots=True)
class Image:
    """X of a Resize as [batch, *axes, channels], where all axes that the node resizes are among `axes`.

    `axes` are numbers of axes in the order N, C, D1.., as in the node's parameters. None in front of them stands for an
    axis of extent 1, so that there are always three: planes, rows and columns.
    """

    batch: Dim
    axes: tuple[int | None, ...]
    channels: int


def image_of(node: Node, resized: Collection[int]) -> Image | None:
    """The image of a Resize along the axes `resized`, numbered in the order N, C, D1..

    None unless these lie next to each other in memory, or have one other axis between them, and all extents behind them
    are numbers.
    """
    shape = node.required_input(0).shape
    order = _order(node, len(shape))
    places = [place for place, axis in enumerate(order) if axis in resized] or [len(shape) - 1]
    first, stop = places[0], places[-1] + 1
    channels = product(shape[stop:])
    if stop - first > _MOST_AXES or not isinstance(channels, int):
        return None
    return Image(product(shape[:first]), (*[None] * (_MOST_AXES - stop + first), *order[first:stop]), channels)


def channels_first(node: Node, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The extents of an image in the order N, C, D1.., whatever the node's layout."""
    view = registry.NodeView(registry.get(node.op), node)
    return first_shape(view, shape) if channels_last(view) else tuple(shape)


def changed_axes(before: Sequence[Dim], after: Sequence[Dim], scales: Sequence[float | None]) -> list[int]:
    """The axes that a Resize changes: those of another extent, or of a scale (see `scales_of`) other than 1."""
    pairs = zip(before, after, scales, strict=True)
    return [axis for axis, (old, new, scale) in enumerate(pairs) if old != new or scale not in (None, 1.0)]


def scales_of(node: Node, rank: int) -> Sequence[float | None] | None:
    """The scale of each axis, in the order N, C, D1..; None in place of one that follows from the axis's sizes.

    None instead of a sequence if the node has no scales and keeps the aspect ratio.
    """
    call = Call(registry.get(node.op), node, [])
    scales: Sequence[Any] | None = call.param("scales")
    if not scales and attribute(node, "keep_aspect_ratio_policy") != "stretch":
        return None
    found: list[float | None] = [None] * rank
    for position, axis in enumerate(resized_axes(call, rank)):
        found[axis] = float(scales[position]) if scales else None
    return found


def _order(node: Node, rank: int) -> list[int]:
    """The axes, numbered in the order N, C, D1.., as they lie in memory."""
    return [0, *range(2, rank), 1] if attribute(node, "layout") == "NHWC" else list(range(rank))
