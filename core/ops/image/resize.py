"""Resize: interpolation along one axis after the other.

Coordinates are computed in float32, as in ONNX Runtime: with a scale such as 0.6, the pixel that `floor` selects
depends on the precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.nn.spatial import as_summed, channels_last, first_shape, layout_shape, to_first, to_layout
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.numeric import convert
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import normalize_axes

_MODES = ("nearest", "linear", "cubic")
_POLICIES = ("stretch", "not_larger", "not_smaller")
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_LARGEST_SCALE = 1 << 20  # a bound that is safe: far above any scale in use
_MOST_TAPS = 1 << 16  # larger than any image; an unlimited filter could exhaust memory

Params = tuple[Any, ...]


class Axis(NamedTuple):
    """The resizing of one axis, from extent `size` to extent `out`."""

    size: int
    out: int
    scale: Any  # float32
    start: float  # the region of interest, for mode tf_crop_and_resize only
    end: float

    @property
    def is_identity(self) -> bool:
        return self.size == self.out and self.scale == 1 and (self.start, self.end) == (0, 1)


class Samples(NamedTuple):
    """For each output position, the input positions that it is interpolated from, [out, taps], and their weights."""

    indices: Array
    weights: Array | None  # None: one tap of weight 1
    outside: Array | None = None  # the positions that get the extrapolation value


@register
class Resize(OpDef):
    """Resizes X. `scales`, `sizes`, `roi` and `axes` refer to axes in the order N, C, D1.., for any layout of X."""

    inputs = "X, roi?, scales?, sizes?"
    outputs = "Y"
    attrs = {
        "antialias": 0, "axes": None, "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75,
        "exclude_outside": 0, "extrapolation_value": 0.0, "keep_aspect_ratio_policy": "stretch", "mode": "nearest",
        "nearest_mode": "round_prefer_floor", "layout": "NCHW",
    }  # fmt: skip
    params = {"roi": 1, "scales": 2, "sizes": 3}
    symbolic = ("sizes",)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        x = c.tensor(0)
        _check(c)
        if x.shape is None:
            return [x]
        shape = first_shape(c, x.shape) if channels_last(c) else x.shape
        resized = _resized_shape(c, shape)
        for scale in c.param("scales") or ():
            _check_reach(c, scale)
        return [TensorType(x.dtype, layout_shape(c, resized))]

    def reference(self, c: Call, x: Array, *_: Array | None) -> Array:
        first = to_first(c, x)
        y: Any = first
        for number, axis in enumerate(_axes(c, first.shape)):
            if not axis.is_identity:
                y = _interpolate(y, number, _samples(c, axis), c.attr("extrapolation_value"))
        return to_layout(c, _narrow(y, DType.from_numpy(x.dtype)))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if axes[0] is None:
            return [None] if all(axis is None for axis in axes) else MixesRows("a parameter differs from row to row")
        if channels_last(c) and axes[0] != 0:
            return MixesRows("its rows do not lie along the batch axis")
        roi_moves = c.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
        position = resized_axes(c, c.tensor(0).rank)
        if axes[0] in position and (roi_moves or not keeps_size(c, axes[0], position.index(axes[0]))):
            return MixesRows("it resizes the row axis")
        return [axes[0]]

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """One matrix product per resized axis, with its interpolation weights.

        UnsupportedError for layouts other than channels first, and for resized axes of symbolic extent.
        """
        y = g.x()
        unknown = [axis for axis, size in enumerate(y.shape) if not isinstance(size, int)]
        named = resized_axes(g, y.rank)
        if channels_last(g) or any(axis in named and not keeps_size(g, axis, named.index(axis)) for axis in unknown):
            g.unsupported(
                f"only images with their channels first and of known size are differentiated, X is {g.tensor(0)}"
            )
        sizes = [size if isinstance(size, int) else 1 for size in y.shape]
        call = Call(self, g.node, [None if value is None else g.known.get(value) for value in g.node.inputs])
        for axis, samples in enumerate(samples_by_axis(call, sizes)):
            if samples is not None:
                y = _matmul(y, axis, _matrix(samples, sizes[axis]), samples.outside, g.attr("extrapolation_value"))
        return [y]


def samples_by_axis(c: Call, shape: Sequence[int]) -> list[Samples | None]:
    """The samples of each axis of an input of this shape, channels first; None for an axis that is not resized."""
    return [None if axis.is_identity else _samples(c, axis) for axis in _axes(c, tuple(shape))]


def _matrix(samples: Samples, size: int) -> Array:
    """The interpolation weights of an axis of extent `size`, as a matrix [out, size]."""
    weights = np.ones(samples.indices.shape) if samples.weights is None else samples.weights
    matrix = np.zeros((len(samples.indices), size))
    np.add.at(matrix, (np.arange(len(matrix))[:, None], samples.indices), weights)
    return matrix if samples.outside is None else np.where(samples.outside[:, None], 0, matrix)


def _matmul(x: Term, axis: int, matrix: Array, outside: Array | None, fill: float) -> Term:
    """`x` multiplied by a matrix [out, size] along one axis, plus `fill` at results where `outside` is true."""
    last = [i for i in range(x.rank) if i != axis]
    moved = x.transpose(*last, axis) @ x.writer.array(matrix.T, x.dtype)
    if outside is not None:
        moved = moved + x.writer.array(np.where(outside, fill, 0), x.dtype)
    return moved.transpose(*(([*last, axis]).index(i) for i in range(x.rank)))


def _check(c: Infer) -> None:
    for name, allowed in (("mode", _MODES), ("keep_aspect_ratio_policy", _POLICIES), ("nearest_mode", tuple(_ROUND)),
                          ("coordinate_transformation_mode", tuple(_COORDINATES))):  # fmt: skip
        if c.attr(name) not in allowed:
            c.fail(f"{name} is {c.attr(name)!r}, expected one of {', '.join(allowed)}")
    if not c.has_param("scales") and not c.has_param("sizes"):
        c.fail("neither scales nor sizes are given, expected one of them")


def resized_axes(c: NodeView, rank: int) -> list[int]:
    """The axes that scales, sizes and roi refer to, in their order."""
    named = c.attr("axes")
    return list(range(rank)) if named is None else list(normalize_axes(c, named, rank))


def keeps_size(c: Infer, axis: int, position: int) -> bool:
    """Whether `axis` keeps its size for all values of its symbols; `position` is its index in the resized axes."""
    scales, sizes = c.param("scales"), c.param("sizes")
    if scales:
        return bool(scales[position] == 1)
    return bool(sizes and c.attr("keep_aspect_ratio_policy") == "stretch" and sizes[position] == c.tensor(0).dims[axis])


def _resized_shape(c: Infer, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    out = list(shape)
    axes = resized_axes(c, len(shape))
    scales, sizes = c.param("scales"), c.param("sizes")
    for name, values in (("scales", scales), ("sizes", sizes)):
        if values and len(values) != len(axes):
            c.fail(f"{name} has {len(values)} elements, expected {len(axes)}")
    if sizes and c.attr("keep_aspect_ratio_policy") != "stretch":
        sizes = _proportional(c, [shape[axis] for axis in axes], sizes)
    for position, axis in enumerate(axes):
        if scales:
            out[axis] = _scaled_size(c, shape[axis], scales[position], axis)
        else:
            out[axis] = sizes[position] if sizes else c.fresh_dim(f"d{axis}")
    if any(isinstance(size, int) and size < 0 for size in out):
        c.fail(f"output would have shape {out}")
    return tuple(out)


def _scaled_size(c: Infer, size: Dim, scale: float, axis: int) -> Dim:
    """floor(size * scale). A symbolic size gives an expression if the scale is a fraction with denominator up to 64.

    Otherwise it gives a new symbol. ModelError for a scale that is not positive, or above 2**20.
    """
    if not 0 < scale <= _LARGEST_SCALE:
        c.fail(f"scale is {scale}, expected a number above 0, at most {_LARGEST_SCALE}")
    if isinstance(size, int):
        return int(np.floor(np.float32(size) * np.float32(scale)))
    fraction = Fraction(scale)
    return size * fraction.numerator // fraction.denominator if fraction.denominator <= 64 else c.fresh_dim(f"d{axis}")


def _proportional(c: Infer, dims: Sequence[Dim], sizes: Params) -> Params:
    """Output sizes that keep the input's aspect ratio: at most `sizes` ("not_larger"), or at least ("not_smaller").

    New symbols if not all sizes are known.
    """
    known = [dim for dim in dims if isinstance(dim, int) and dim > 0]
    if len(known) < len(dims) or not all(isinstance(size, int) for size in sizes):
        return tuple(c.fresh_dim(f"s{i}") for i in range(len(sizes)))
    scale = _common_scale(c, known, sizes)
    return tuple(int(scale * dim + 0.5) for dim in known)


def _common_scale(c: NodeView, dims: Sequence[int], sizes: Params) -> float:
    ratios = [size / dim for size, dim in zip(sizes, dims, strict=True)]
    return min(ratios) if c.attr("keep_aspect_ratio_policy") == "not_larger" else max(ratios)


def _axes(c: Call, shape: tuple[int, ...]) -> list[Axis]:
    """The resizing of each axis of an input of this shape. FeedError if neither scales nor sizes are given."""
    axes, roi = resized_axes(c, len(shape)), c.param("roi") or ()
    scales, sizes = c.param("scales"), c.param("sizes")
    if not scales and not sizes:
        c.fail("neither scales nor sizes are given, expected one of them")
    result = [Axis(size, size, _ONE, 0.0, 1.0) for size in shape]
    common = None
    if sizes and c.attr("keep_aspect_ratio_policy") != "stretch":
        common = _common_scale(c, [shape[axis] for axis in axes], sizes)
    crops = c.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
    for position, axis in enumerate(axes):
        if sizes and not isinstance(sizes[position], int | float | np.number):
            continue  # an axis of symbolic size that is not resized
        region = (roi[position], roi[position + len(axes)]) if crops else (0.0, 1.0)
        out, scale = _target(shape[axis], scales[position] if scales else None, sizes and sizes[position], common)
        result[axis] = Axis(shape[axis], out, scale, *region)
    return result


def _target(size: int, scale: float | None, wanted: Any, common: float | None) -> tuple[int, Any]:
    """The output size and the float32 scale of an axis of extent `size`.

    They follow from its `scale`, otherwise from `common`, the scale of all axes, otherwise from `wanted`, its new size.
    """
    if scale is not None:
        return int(np.floor(np.float32(size) * np.float32(scale))), np.float32(scale)
    if common is not None:
        return int(common * size + 0.5), np.float32(common)
    return int(wanted), np.float32(wanted) / np.float32(size)


def _narrow(y: Any, dtype: DType) -> Array:
    return np.asarray(y if DType.from_numpy(y.dtype) is dtype else convert(y, dtype))


def _interpolate(x: Any, axis: int, samples: Samples, fill: float) -> Any:
    if samples.weights is None:
        y = np.take(x, samples.indices[:, 0], axis=axis)
    else:
        taps = np.take(as_summed(x) if x.dtype.kind in "fV" else x.astype(np.float32), samples.indices, axis=axis)
        weights = samples.weights.astype(taps.dtype).reshape(*samples.indices.shape, *(1,) * (x.ndim - axis - 1))
        y = (taps * weights).sum(axis=axis + 1)
    if samples.outside is None:
        return y
    outside = samples.outside.reshape(-1, *(1,) * (x.ndim - axis - 1))
    return np.where(outside, np.asarray(fill, y.dtype), y)


# Coordinates of output positions in the input, per transformation mode.


def _half_pixel(x: Any, a: Axis) -> Any:
    return (x + _HALF) / a.scale - _HALF


def _half_pixel_symmetric(x: Any, a: Axis) -> Any:
    exact = a.scale * np.float32(a.size)
    offset = np.float32(a.size) / 2 * (1 - np.float32(a.out) / exact)
    return offset + (x + _HALF) / a.scale - _HALF


def _pytorch_half_pixel(x: Any, a: Axis) -> Any:
    return _half_pixel(x, a) if a.out > 1 else np.zeros_like(x)


def _align_corners(x: Any, a: Axis) -> Any:
    return x * np.float32(a.size - 1) / (_length(a) - 1) if a.out > 1 else np.zeros_like(x)


def _length(a: Axis) -> Any:
    """The output's length before rounding down: ONNX aligns the corners of size * scale, also if it is no integer."""
    exact = a.scale * np.float32(a.size)
    return exact if exact > a.out * (1 + 1e-5) else np.float32(a.out)


def _asymmetric(x: Any, a: Axis) -> Any:
    return x / a.scale


def _tf_half_pixel_for_nn(x: Any, a: Axis) -> Any:
    """The input positions (x + 0.5) / scale of outputs `x`: `half_pixel` without its last term, -0.5.

    Of opset 11 only.
    """
    return (x + _HALF) / a.scale


def _tf_crop_and_resize(x: Any, a: Axis) -> Any:
    last, start, end = np.float32(a.size - 1), np.float32(a.start), np.float32(a.end)
    if a.out > 1:
        return start * last + x * (end - start) * last / np.float32(a.out - 1)
    return np.full_like(x, (start + end) * last / 2)


_COORDINATES: dict[str, Callable[[Any, Axis], Any]] = {
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "align_corners": _align_corners,
    "asymmetric": _asymmetric,
    "tf_half_pixel_for_nn": _tf_half_pixel_for_nn,
    "tf_crop_and_resize": _tf_crop_and_resize,
}
_ROUND: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - _HALF),
    "round_prefer_ceil": lambda x: np.floor(x + _HALF),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _samples(c: Call, axis: Axis) -> Samples:
    mode = c.attr("coordinate_transformation_mode")
    x = _COORDINATES[mode](np.arange(axis.out, dtype=np.float32), axis)
    outside = (x < 0) | (x > axis.size - 1) if mode == "tf_crop_and_resize" else None
    if c.attr("mode") == "nearest":
        return Samples(_clamp_to_border(_ROUND[c.attr("nearest_mode")](x)[:, None], axis), None, outside)
    low = np.floor(x)
    first, weights = _weights(c, x - low, axis)
    indices = low[:, None] + np.arange(first, first + weights.shape[1], dtype=np.float32)
    if c.attr("exclude_outside"):
        weights = np.where((indices < 0) | (indices > axis.size - 1), 0, weights)
        weights = weights / weights.sum(axis=1, keepdims=True)
    return Samples(_clamp_to_border(indices, axis), weights, outside)


def _clamp_to_border(indices: Any, axis: Axis) -> Any:
    """Clamps positions outside the image to its border."""
    return np.clip(indices, 0, max(axis.size - 1, 0)).astype(np.int64)


def _weights(c: NodeView, ratio: Any, axis: Axis) -> tuple[int, Any]:
    """The first tap's offset from the position rounded down (0 linear, -1 cubic, or less), and weights [out, taps].

    `ratio` is the fractional part of each position, [out]. With `antialias` and a shrinking axis the filter is
    stretched by 1/scale, and the weights of a position add up to 1. Errors as `_check_reach`.
    """
    reach, shrink = _check_reach(c, float(axis.scale))
    first = int(np.floor(-reach / shrink)) + 1
    distance = np.abs(np.arange(first, 2 - first) - ratio[:, None].astype(np.float64)) * shrink
    weights = np.maximum(1 - distance, 0) if reach == 1 else _cubic(distance, c.attr("cubic_coeff_a"))
    return first, weights / weights.sum(axis=1, keepdims=True) if shrink < 1 else weights


def _check_reach(c: NodeView, scale: float) -> tuple[int, float]:
    """The reach of a filter in pixels (1 linear, 2 cubic), and the scale, at most 1, by which it is divided.

    It is divided if `antialias` is set and the axis shrinks. Fails (`c.fail`) if the divided reach is above
    `_MOST_TAPS`.
    """
    shrink = scale if c.attr("antialias") and scale < 1 else 1.0
    reach = 1 if c.attr("mode") == "linear" else 2
    if reach > shrink * _MOST_TAPS:
        c.fail(f"scale is {scale}, which makes every result of more than {_MOST_TAPS} samples")
    return reach, shrink


def _cubic(d: Any, a: float) -> Any:
    """The weights of cubic convolution at distances `d`, with coefficient `a`.

    R. Keys, "Cubic convolution interpolation for digital image processing", 1981, equation 4.
    """
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))
