"""Shared code of spatial operators: the `layout` attribute and sliding windows.

`layout` is Lathe's own attribute, set by passes: "NCHW" means channels first (N, C, D1..Dr), "NHWC" channels last
(N, D1..Dr, C), "CHWN" batch last (C, D1..Dr, N), for any number r of spatial axes. It concerns activations only:
weights and every attribute that counts axes stay as ONNX has them. Inference and references work channels first and
convert at their borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim
from lathe.core.ops.opdef.registry import Infer, MixesRows, NodeView, RowAxis
from lathe.core.ops.opdef.type_rules import agree

LAYOUTS = ("NCHW", "NHWC", "CHWN")
AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
WINDOW_ATTRS = {"kernel_shape": None, "strides": None, "pads": None, "dilations": None, "auto_pad": "NOTSET"}

Pads = tuple[tuple[int, int], ...]  # (before, after) of each spatial axis


def layout_of(c: NodeView) -> str:
    layout = c.attr("layout")
    if layout not in LAYOUTS:
        c.fail(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    return str(layout)


def channels_last(c: NodeView) -> bool:
    return layout_of(c) == "NHWC"


def first_shape(c: NodeView, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The shape of an activation, given in the node's layout, as N, C, D1.. ModelError for a rank below 2."""
    if len(shape) < 2:
        c.fail(f"has rank {len(shape)}, expected at least 2 (batch and channels)")
    match layout_of(c):
        case "NHWC":
            return (shape[0], shape[-1], *shape[1:-1])
        case "CHWN":
            return (shape[-1], *shape[:-1])
    return tuple(shape)


def layout_shape(c: NodeView, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """A shape N, C, D1.., converted to the node's layout."""
    match layout_of(c):
        case "NHWC":
            return (shape[0], *shape[2:], shape[1])
        case "CHWN":
            return (*shape[1:], shape[0])
    return tuple(shape)


def to_first(c: NodeView, array: Array) -> Array:
    """A view as N, C, D1.. of an activation in the node's layout."""
    layout = layout_of(c)
    return array if layout == "NCHW" else np.moveaxis(array, -1, 1 if layout == "NHWC" else 0)


def to_layout(c: NodeView, array: Array) -> Array:
    """A view of a channels-first activation in the node's layout."""
    layout = layout_of(c)
    return array if layout == "NCHW" else np.moveaxis(array, 1 if layout == "NHWC" else 0, -1)


def batch_rows(c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
    """The rule for batch rows (`OpDef.rows`) of operators whose first input is an image: along its batch axis only.

    All other inputs must be the same for all rows. The layout CHWN mixes rows.
    """
    if all(axis is None for axis in axes):
        return [None] * len(c.node.outputs)
    if axes[0] != 0 or c.attr("layout") == "CHWN":
        return MixesRows("its rows do not lie along the batch axis of the first input")
    if any(axis is not None for axis in axes[1:]):
        return MixesRows("a parameter differs from row to row")
    return [0] * len(c.node.outputs)


def as_summed(array: Array) -> Any:
    """Arrays of floats of at most 2 bytes as float32, in which sums are computed; other arrays as they are."""
    return array.astype(np.float32) if array.dtype.itemsize <= 2 and array.dtype.kind in "fV" else array


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window: kernel extents, strides, dilations and padding (before, after) of each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads | None  # None: as needed for an output of ceil(input / stride), see `pads_for`
    lower: bool = False  # the odd element of such a padding goes before the data, not after

    @property
    def extents(self) -> tuple[int, ...]:
        """The number of input elements that one window spans, per axis, dilation included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def pads_for(self, spatial: Sequence[int]) -> Pads:
        """The padding of an input of this spatial shape: `pads`; if that is None, for ceil(size / stride) outputs."""
        if self.pads is not None:
            return self.pads
        totals = (
            max((-(-size // stride) - 1) * stride + extent - size, 0)
            for size, stride, extent in zip(spatial, self.strides, self.extents, strict=True)
        )
        return tuple(((total + self.lower) // 2, total - (total + self.lower) // 2) for total in totals)

    def taps(self, out: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """For each kernel element: its index, and the slices of the padded input that it multiplies.

        Both are index tuples of the trailing (spatial) axes. `out` is the spatial output shape.
        """
        for tap in np.ndindex(*self.kernel):
            starts = [t * d for t, d in zip(tap, self.dilations, strict=True)]
            spans = zip(starts, out, self.strides, strict=True)
            where = (slice(start, start + max((count - 1) * stride + 1, 0), stride) for start, count, stride in spans)
            yield (..., *tap), (..., *where)

    def padded(self, x: Any, out: Sequence[int], fill: Any = 0) -> Any:
        """`x` (N, C, D1..) padded with `fill` as an output of spatial shape `out` needs; `x` itself for no padding."""
        widths = [(0, 0), (0, 0)]
        pads = self.pads_for(x.shape[2:])
        for size, (before, _), count, stride, extent in zip(
            x.shape[2:], pads, out, self.strides, self.extents, strict=True
        ):
            widths.append((before, max((count - 1) * stride + extent - size - before, 0)))
        return np.pad(x, widths, constant_values=fill) if any(map(any, widths)) else x


def window_of(c: NodeView, kernel: Sequence[int]) -> Window:
    """The window that the node's attributes describe, for a kernel of these extents. ModelError if they do not fit."""
    rank = len(kernel)
    strides = _positive(c, "strides", c.attr("strides") or (1,) * rank, rank)
    dilations = _positive(c, "dilations", c.attr("dilations") or (1,) * rank, rank)
    mode = c.attr("auto_pad") or "NOTSET"
    if mode not in AUTO_PADS:
        c.fail(f"auto_pad is {mode!r}, expected one of {', '.join(AUTO_PADS)}")
    kernel = _positive(c, "kernel_shape", kernel, rank)
    if mode.startswith("SAME"):
        return Window(kernel, strides, dilations, None, mode == "SAME_LOWER")
    return Window(kernel, strides, dilations, _explicit_pads(c, rank, mode))


def _explicit_pads(c: NodeView, rank: int, mode: str) -> Pads:
    flat = tuple((c.attr("pads") if mode == "NOTSET" else None) or (0,) * (2 * rank))
    if len(flat) != 2 * rank or min(flat, default=0) < 0:
        c.fail(f"pads are {list(flat)}, expected {2 * rank} numbers of at least 0")
    return tuple(zip(flat[:rank], flat[rank:], strict=True))


def _positive(c: NodeView, name: str, values: Sequence[int], rank: int) -> tuple[int, ...]:
    if len(values) != rank or any(value < 1 for value in values):
        c.fail(f"{name} is {list(values)}, expected {rank} numbers of at least 1")
    return tuple(values)


def kernel_of(c: Infer, w: Sequence[Dim]) -> tuple[int, ...] | None:
    """The spatial extents of a weight [M, C/group, K1..]; None if neither its type nor `kernel_shape` gives them.

    ModelError if the two differ.
    """
    declared, found = c.attr("kernel_shape"), tuple(w[2:])
    if declared is not None and not agree(c, found, declared):
        c.fail(f"kernel_shape is {list(declared)}, W has [{', '.join(map(str, found))}]")
    kernel = found if declared is None else tuple(declared)
    numbers = tuple(extent for extent in kernel if isinstance(extent, int))
    return numbers if len(numbers) == len(kernel) else None


def fresh_spatial(c: Infer, rank: int) -> tuple[Dim, ...]:
    """New symbols for spatial extents that are known only in a run."""
    return tuple(c.fresh_dim(f"d{axis}") for axis in range(rank))


def window_output(c: Infer, window: Window, spatial: Sequence[Dim]) -> tuple[Dim, ...]:
    """The spatial output shape for an input of this spatial shape.

    ModelError if a window is larger than the padded input, or if the numbers of spatial axes differ.
    """
    return tuple(_output_dim(c, window, axis, size, False) for axis, size in _sizes(c, window, spatial))


def pool_output(c: Infer, window: Window, spatial: Sequence[Dim], *, ceil_mode: bool) -> tuple[Dim, ...]:
    """Like `window_output`, but a window may be larger than the padded input if ONNX's formula gives 0 or more outputs.

    `ceil_mode` rounds the number of outputs up. ModelError also where the formula gives 0 outputs but ONNX Runtime
    returns one, because it rounds the quotient towards 0.
    """
    dims = []
    for axis, size in _sizes(c, window, spatial):
        room = _room(window, axis, size)
        if window.pads is None or not isinstance(room, int) or room >= 0:
            dims.append(_output_dim(c, window, axis, size, ceil_mode))
            continue
        stride = window.strides[axis]
        count = -(-room // stride) + 1 if ceil_mode else room // stride + 1
        if count < 0 or (not ceil_mode and room % stride):
            _too_large(c, window, axis, size)
        dims.append(count)
    return tuple(dims)


def _sizes(c: Infer, window: Window, spatial: Sequence[Dim]) -> Iterator[tuple[int, Dim]]:
    if len(spatial) != len(window.kernel):
        c.fail(f"input has {len(spatial)} spatial axes, the kernel {len(window.kernel)}")
    return enumerate(spatial)


def _room(window: Window, axis: int, size: Dim) -> Dim:
    """The distance that a window can move within an input of extent `size` and its padding; negative: too large."""
    before, after = window.pads[axis] if window.pads is not None else (0, 0)
    return size + (before + after - window.extents[axis])


def _too_large(c: Infer, window: Window, axis: int, size: Dim) -> NoReturn:
    before, after = window.pads[axis] if window.pads is not None else (0, 0)
    extent = window.extents[axis]
    c.fail(f"window of extent {extent} is larger than spatial axis {axis} ({size} with padding {before}+{after})")


def _output_dim(c: Infer, window: Window, axis: int, size: Dim, ceil_mode: bool) -> Dim:
    stride, extent = window.strides[axis], window.extents[axis]
    if window.pads is None:
        return (size + (stride - 1)) // stride if size != 0 else c.fail(f"spatial axis {axis} is empty")
    before, after = window.pads[axis]
    room = _room(window, axis, size)
    if isinstance(room, int) and room < 0:
        _too_large(c, window, axis, size)
    if not ceil_mode:
        return room // stride + 1
    # A last window that would start in the padding after the data does not count.
    if stride <= extent - after:
        return (room + (stride - 1)) // stride + 1
    if not isinstance(room, int) or not isinstance(size, int):
        return c.fresh_dim(f"d{axis}")
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= size + before else count
