"""Computes a node for every case, and its shadow: the result with noise of the size of rounding errors.

A node whose result small changes of the inputs change much is rejected (`UnfitNode`), because two correct programs may
differ there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from tests.fuzz.graphs.facts import EXACT, MANY_ROUNDINGS, ONE_ROUNDING, ROUGH
from tests.fuzz.graphs.shared_state import SharedState
from tests.fuzz.graphs.values import F32, FLOATS, ROUNDING, Array, Item, UnfitNode

MOST_ELEMENTS = 3000
MOST_SIZE = 200.0  # the largest floating-point number: products of larger numbers have large rounding errors
_MOST_CHANGE = 2e-3  # the largest difference of a shadow, relative to the largest number


def computed(
    world: SharedState, node: onnx.NodeProto, sources: Sequence[Item]
) -> tuple[dict[int, list[Array]], dict[int, list[Array]], int]:
    """The results by case, their shadows, and the count of rounded operations that they depend on."""
    cases = list(world.alive)
    constants = {item.name: item.at(cases[0]) for item in sources if item.static}
    moving = [item for item in sources if not item.static]
    feeds = [{item.name: item.at(case) for item in moving} for case in cases]
    shaken = any(item.steps for item in moving)
    if shaken:
        feeds += [{item.name: item.shadows[case] for item in moving} for case in cases]
        feeds += [{item.name: _mirrored(item, case) for item in moving} for case in cases]
    answers = world.evaluator.node(node, constants, feeds)
    lost = [case for index, case in enumerate(cases) if any(a is None for a in answers[index :: len(cases)])]
    left = [case for case in cases if case not in lost]
    if lost and (len(left) < 2 or not (set(lost) == {len(world.cases) - 1} or world.rng.random() < 0.15)):
        raise UnfitNode("refused for some rows")
    steps = _steps(node, sources)
    results: dict[int, list[Array]] = {}
    shadows: dict[int, list[Array]] = {}
    for index, case in enumerate(cases):
        if case in left:
            results[case] = answers[index] or []
            shadows[case] = (answers[index + len(cases)] if shaken else answers[index]) or []
            _check(results[case], shadows[case])
            _check(results[case], (answers[index + 2 * len(cases)] if shaken else answers[index]) or [])
    if steps > 1:
        size = 20 if node.op_type in MANY_ROUNDINGS else 1
        for case in left:
            shadows[case] = [_shake(world, array, node.op_type, size) for array in shadows[case]]
    world.alive = left
    return results, shadows, steps


def _steps(node: onnx.NodeProto, sources: Sequence[Item]) -> int:
    before = max((item.steps for item in sources), default=0)
    if node.op_type in EXACT:
        return before
    integers = all(item.dtype not in FLOATS for item in sources)
    if integers and node.op_type not in ("DequantizeLinear", "Cast", "CastLike") and not _has_body(node):
        return before
    return before + 1 if node.op_type in ONE_ROUNDING else 2


def _shake(world: SharedState, array: Array, op: str, size: int) -> Array:
    """The array with noise of rounding size, relative to each number for simple operators, else to the largest."""
    rounding = ROUNDING.get(array.dtype)
    if rounding is None or array.size == 0:
        return array
    if op in ROUGH:
        rounding = max(rounding, ROUNDING[F32])
    noise = world.numbers.uniform(-1, 1, array.shape) * rounding * size
    wide = array.astype(np.float64)
    scale = np.abs(wide) if op in ONE_ROUNDING else np.abs(wide).max()
    return np.asarray(wide + noise * scale).astype(array.dtype)


def _has_body(node: onnx.NodeProto) -> bool:
    return any(attribute.HasField("g") for attribute in node.attribute)


def _mirrored(item: Item, case: int) -> Array:
    """The shadow mirrored at the value: if the value is at a discontinuity, one of the two shadows crosses it."""
    array, shadow = item.at(case), item.shadows[case]
    if array.dtype not in ROUNDING:
        return array
    return np.asarray(2 * array.astype(np.float64) - shadow.astype(np.float64)).astype(array.dtype)


def _check(results: Sequence[Array], shadows: Sequence[Array]) -> None:
    """UnfitNode unless the results are small and finite, and close to the shadows."""
    for array, shadow in zip(results, shadows, strict=True):
        if array.size > MOST_ELEMENTS:
            raise UnfitNode("large")
        if array.shape != shadow.shape or array.dtype != shadow.dtype:
            raise UnfitNode("unstable")
        if array.dtype not in ROUNDING:
            if not np.array_equal(array, shadow):
                raise UnfitNode("unstable")
            continue
        wide, other = array.astype(np.float64), shadow.astype(np.float64)
        size = float(np.abs(wide).max(initial=0.0))
        if not np.isfinite(wide).all() or size > MOST_SIZE:
            raise UnfitNode("not finite, or large")
        most = max(_MOST_CHANGE, 20 * ROUNDING[array.dtype])
        if not float(np.abs(wide - other).max(initial=0.0)) <= most * max(size, 1e-3):
            raise UnfitNode("unstable")
