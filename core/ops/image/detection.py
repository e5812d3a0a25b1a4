"""Boxes and regions: NonMaxSuppression, MaxRoiPool."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.registry import Call, Infer, OpDef, Required, register
from lathe.core.ops.opdef.type_rules import FLOAT, as_computed, check_kind, expect_shape


@register
class NonMaxSuppression(OpDef):
    """For each image and class, the best boxes that overlap no better selected box by more than `iou_threshold`.

    boxes [N, B, 4] are y1, x1, y2, x2 (corners in any order), or with `center_point_box` x, y, width, height; scores
    [N, C, B]. The result [S, 3] holds (image, class, box). At most `max_output_boxes_per_class` (0 by default) are
    selected, and only boxes with a score above `score_threshold`.
    """

    agreeing = True
    inputs = "boxes, scores, max_output_boxes_per_class?, iou_threshold?, score_threshold?"
    outputs = "selected_indices"
    attrs = {"center_point_box": 0}
    zero_gradient = "positions do not change with small changes"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        expect_shape(c, 0, ("N", "B", 4))
        images, count = (c.shape(0) or ("N", "B"))[:2]
        expect_shape(c, 1, (images, "C", count))
        return [TensorType(DType.INT64, (c.fresh_dim("selected"), 3))]

    def reference(self, c: Call, boxes: Array, scores: Array, *rest: Array | None) -> Array:
        given = (*rest, None, None, None)[:3]
        most, overlap, least = (None if x is None or x.size == 0 else x.reshape(-1)[0] for x in given)
        selected = [
            (image, kind, box)
            for image, kind in np.ndindex(*scores.shape[:2])
            for box in _best(
                _corners(boxes[image], c.attr("center_point_box")),
                scores[image, kind],
                0 if most is None else max(int(most), 0),
                0.0 if overlap is None else float(overlap),
                None if least is None else float(least),
            )
        ]
        return np.array(selected, np.int64).reshape(-1, 3)


def _corners(boxes: Any, centred: int) -> Any:
    """Boxes as pairs of low and high corner, [B, 2, 2]; `centred` boxes are given as centre and size."""
    first, second = boxes[:, :2], boxes[:, 2:]
    if centred:
        return np.stack([first - second / 2, first + second / 2], axis=1)
    return np.stack([np.minimum(first, second), np.maximum(first, second)], axis=1)


def _best(corners: Any, scores: Any, most: int, overlap: float, least: float | None) -> list[int]:
    """The indices of at most `most` selected boxes, best first; of equal scores the first box is better.

    A box is selected unless its intersection over union with a better selected box exceeds `overlap`. Scores must be
    above `least` (None: no limit).
    """
    candidates = np.argsort(-scores, kind="stable")
    if least is not None:
        candidates = candidates[scores[candidates] > least]
    kept: list[int] = []
    for box in candidates:
        if len(kept) >= most:
            break
        if not np.any(_intersection_over_union(corners[box], corners[kept]) > overlap):
            kept.append(int(box))
    return kept


def _intersection_over_union(box: Any, others: Any) -> Any:
    """The intersection over union [K] of one box [2, 2] with others [K, 2, 2]; 0 where they do not overlap."""
    common = np.minimum(box[1], others[:, 1]) - np.maximum(box[0], others[:, 0])
    shared = np.prod(np.maximum(common, 0), axis=-1)
    areas = np.prod(others[:, 1] - others[:, 0], axis=-1)
    union = np.prod(box[1] - box[0]) + areas - shared
    return np.where((shared > 0) & (union > 0), shared / np.where(union > 0, union, 1), 0)


@register
class MaxRoiPool(OpDef):
    """The maximum of each of `pooled_shape` bins of every region; 0 for a bin outside the image.

    X is [N, C, H, W]; rois [R, 5] are image, x1, y1, x2, y2; `spatial_scale` converts these coordinates to pixels. The
    result is [R, C, *pooled_shape].
    """

    agreeing = True
    inputs = "X, rois"
    outputs = "Y"
    attrs = {"pooled_shape": Required("ints"), "spatial_scale": 1.0}
    no_gradient = "its bins move with its regions in whole pixels; RoiAlign is what detectors are trained with"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, x, rois = check_kind(c, 0, FLOAT), c.shape(0), c.shape(1)
        if len(c.attr("pooled_shape")) != 2 or min(c.attr("pooled_shape")) < 1:
            c.fail(f"pooled_shape is {list(c.attr('pooled_shape'))}, expected 2 numbers of at least 1")
        if not isfinite(c.attr("spatial_scale")):
            c.fail(f"spatial_scale is {c.attr('spatial_scale')}, expected a finite number")
        if x is None or rois is None:
            return [TensorType(dtype, None)]
        expect_shape(c, 0, ("N", "C", "H", "W"))
        expect_shape(c, 1, ("num_rois", 5))
        return [TensorType(dtype, (rois[0], x[1], *c.attr("pooled_shape")))]

    def reference(self, c: Call, x: Array, rois: Array) -> Array:
        height, width = c.attr("pooled_shape")
        y = np.zeros((len(rois), x.shape[1], height, width), x.dtype)
        for i, (image, *region) in enumerate(as_computed(rois)):
            if not 0 <= image < len(x):
                c.fail(f"region {i} is of image {image}, of {len(x)}")
            x1, y1, x2, y2 = (int(np.floor(v * np.float32(c.attr("spatial_scale")) + 0.5)) for v in region)
            rows, columns = _bins(y1, y2, height, x.shape[2]), _bins(x1, x2, width, x.shape[3])
            for (r, row), (q, column) in ((a, b) for a in enumerate(rows) for b in enumerate(columns)):
                part = x[int(image), :, row, column]
                y[i, :, r, q] = part.max(axis=(1, 2)) if part.size else 0
        return y


def _bins(start: int, end: int, count: int, size: int) -> list[slice]:
    """The pixels of each of `count` bins along an axis, for a region from pixel `start` to pixel `end`, inclusive.

    Bins overlap if the region does not divide evenly, and are cut to the image of `size` pixels.
    """
    extent = max(end - start + 1, 1) / count
    edges = [(start + int(np.floor(i * extent)), start + int(np.ceil((i + 1) * extent))) for i in range(count)]
    return [slice(min(max(low, 0), size), min(max(high, 0), size)) for low, high in edges]
