"""Which operators have dynamic-shape kernels: every extent of every operator case is tested as a dynamic one.

An operator that has a kernel only for known sizes is listed in `KNOWN_SIZES_ONLY`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.compiler.dynamic_shapes import dynamic_binding, find_dynamic_shapes, has_dynamic_kernels
from lathe.core.compiler.options import make_options
from lathe.core.compiler.run_passes import run_passes
from lathe.core.errors import LatheError
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.reference import interpret
from tests.core.ops.cases import CASES, Case, case, floats, vector
from tests.core.ops.harness import graph_of
from tests.core.ops.numeric_cases import NUMERIC_CASES

# Operator and input -> why a node may have no kernel if an extent of this input is known only at run time.
KNOWN_SIZES_ONLY = {
    ("Slice", 0): "a step back begins at an end that may be clamped",
    ("ScatterElements", 0): "indices leave out places of other axes than theirs",
    ("DepthToSpace", 0): "the square of the block must divide the channels",
    ("SpaceToDepth", 0): "the block must divide the extents",
    ("GatherND", 1): "the last extent of the indices is a number of axes",
    ("ScatterND", 1): "the last extent of the indices is a number of axes",
    ("DFT", 0): "the last extent is 1 or 2",
    ("STFT", 2): "a window is multiplied by tables of known length",
    ("Col2Im", 0): "channels are divided by those of a block",
    ("MatMulInteger", 3): "one zero point, or one for each column: only a run shows which",
    ("Resize", 0): "cubic and smoothing filters have tables of known length",
}
OPTIONS = make_options(tune="off", threads=1)
NO_BATCH = BatchInfo(False, "", None)


def _windows() -> list[Case]:
    """Images and lines with constant weights, [2, 6, height, width]."""
    image, line, volume = floats(2, 6, 8, 10), floats(2, 6, 12), floats(2, 6, 5, 6, 7)
    pooled = {"kernel_shape": [3, 2], "strides": [2, 1]}
    pixels, zero = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 10), np.uint8), np.array(7, np.uint8)
    filters = np.random.default_rng(1).integers(-9, 9, (8, 8, 3, 3), np.int8)
    return [
        case("ConvInteger", pixels, filters, zero, pads=[1, 0, 1, 2]),
        case("ConvInteger", pixels, filters, strides=[2, 1]),
        case("ConvInteger", pixels, filters[:, :4], zero, group=2, dilations=[1, 2]),
        case("ConvInteger", pixels, filters[:, :1], zero, group=8, pads=[1, 1, 1, 1]),
        case("ConvInteger", pixels[:, :, 0], filters[:, :, 0], zero, pads=[1, 1]),
        case("MaxPool", pixels, **pooled),
        case("Conv", image, floats(8, 6, 3, 3), floats(8), pads=[1, 0, 1, 2]),
        case("Conv", image, floats(6, 1, 3, 3), strides=[2, 1], group=6),
        case("Conv", image, floats(8, 3, 3, 2), group=2, dilations=[2, 1]),
        case("Conv", image, floats(8, 6, 3, 3), auto_pad="SAME_UPPER"),
        case("Conv", image, floats(8, 6, 3, 3), auto_pad="SAME_LOWER", strides=[2, 2]),
        case("MaxPool", image, auto_pad="SAME_UPPER", kernel_shape=[3, 2], strides=[2, 2]),
        case("Conv", line, floats(8, 6, 5), pads=[2, 2]),
        case("Conv", volume, floats(8, 6, 3, 3, 3)),
        case("ConvTranspose", image, floats(6, 8, 3, 3), floats(8), strides=[2, 2], pads=[1, 1, 1, 1]),
        case("ConvTranspose", image, floats(6, 4, 3, 4), group=2, strides=[2, 3], output_padding=[1, 0]),
        case("ConvTranspose", image, floats(6, 1, 2, 2), group=6, strides=[2, 2]),
        case("ConvTranspose", line, floats(6, 8, 4), strides=[2], auto_pad="SAME_UPPER"),
        case("ConvTranspose", volume, floats(6, 8, 2, 3, 3)),
        *(case(op, image, **pooled) for op in ("MaxPool", "AveragePool")),
        *(case(op, image, ceil_mode=1, **pooled) for op in ("MaxPool", "AveragePool")),
        *(case(op, data) for op in ("GlobalMaxPool", "GlobalAveragePool") for data in (image, line)),
        case("BatchNormalization", image, floats(6), floats(6), floats(6), np.abs(floats(6)) + 1),
        *(case("InstanceNormalization", data, floats(6), floats(6)) for data in (image, line)),
        case("GroupNormalization", image, floats(6), floats(6), num_groups=2),
        case("LayerNormalization", floats(2, 5, 6), floats(6), floats(6)),
        case("RMSNormalization", floats(2, 5, 6), floats(6), oracle="onnx"),
        case("GridSample", image, floats(2, 5, 7, 2)),
        *(
            case("Resize", image, None, vector(1, 1, 2, 1.5, dtype=np.float32), mode=mode, antialias=smooth)
            for mode in ("nearest", "linear", "cubic")
            for smooth in (0, 1)
        ),
    ]


WINDOWS = _windows()
WITH_WEIGHTS = {each.label for each in WINDOWS}  # all of their inputs but the first are constants


@dataclass(frozen=True)
class Place:
    """An extent of an input of a case."""

    case: Case
    index: int
    axis: int

    def graph(self) -> Graph | None:
        """The case with a symbol as this extent; None if the operator accepts only numbers."""
        shape: list[Any] = [*self.case.inputs[self.index].shape]
        shape[self.axis] = symbol("m")
        try:
            return with_weights(graph_of(self.case, {self.index: tuple(shape)}), self.case)
        except LatheError:
            return None

    def feeds(self, extent: int) -> dict[str, Any]:
        """The inputs; this one is repeated or cut to this extent."""
        arrays = list(self.case.inputs)
        places = np.arange(extent) % arrays[self.index].shape[self.axis]
        arrays[self.index] = np.take(arrays[self.index], places, self.axis)
        return {f"x{index}": array for index, array in enumerate(arrays)}


def with_weights(graph: Graph, origin: Case) -> Graph:
    if origin.label in WITH_WEIGHTS:
        for value in graph.inputs[1:]:
            graph.constants[value] = origin.inputs[int(value.name[1:])]
        del graph.inputs[1:]
    return graph


@dataclass(frozen=True)
class Tried:
    """An extent of a case. `known`: all nodes have kernels for known sizes; `dynamic_call`: also if it is dynamic."""

    place: Place
    known: bool
    dynamic_call: bool


def _places(origin: Case) -> Iterator[Place]:
    for index in _fed(origin):
        extents = origin.inputs[index].shape
        yield from (Place(origin, index, axis) for axis, extent in enumerate(extents) if extent > 1)


def _fed(origin: Case) -> list[int]:
    """The indices of the inputs that are no constants."""
    return [int(value.name[1:]) for value in with_weights(graph_of(origin), origin).inputs]


def _has_kernels(origin: Case) -> bool:
    graph, _ = run_passes(with_weights(graph_of(origin), origin), OPTIONS)
    return has_dynamic_kernels(graph, OPTIONS)


@cache
def _tried() -> tuple[Tried, ...]:
    """Every extent that may be a symbol, with the kernels found for it."""
    found = []
    for origin in (*CASES, *NUMERIC_CASES, *WINDOWS):
        known = _has_kernels(origin)
        for place in _places(origin):
            graph = place.graph()
            if graph is not None and _is_free(graph):
                found.append(Tried(place, known, find_dynamic_shapes(graph, NO_BATCH, OPTIONS).whole))
    return tuple(found)


def _is_free(graph: Graph) -> bool:
    """True if other inputs do not determine the symbol."""
    return any(not isinstance(dim, int) for _, dim in dynamic_binding(graph))


@pytest.mark.slow
def test_operators_have_kernels_for_any_sizes() -> None:
    lacking = {
        (each.place.case.op, each.place.index): each.place for each in _tried() if each.known and not each.dynamic_call
    }
    missing = {key: place for key, place in lacking.items() if key not in KNOWN_SIZES_ONLY}
    assert not missing, f"no kernel for any sizes: {[f'{p.case.label}, axis {p.axis}' for p in missing.values()]}"
    assert not set(KNOWN_SIZES_ONLY) - set(lacking), "these have kernels now"
    assert sum(each.dynamic_call for each in _tried()) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_code_for_any_sizes_computes_the_same(part: int) -> None:
    """For larger and for smaller extents than in the case."""
    for place in [each.place for each in _tried() if each.dynamic_call][part::12]:
        graph = place.graph()
        assert graph is not None
        with lathe.compile(graph.clone(), tune="off", threads=1, new_shapes="wait") as session:
            extent = place.case.inputs[place.index].shape[place.axis]
            for other in (extent, 2 * extent + 3, max(extent - 1, 1), extent + 4):
                feeds = {name: array for name, array in place.feeds(other).items() if name in session.inputs}
                try:
                    want = interpret(graph, feeds)
                except (LatheError, ValueError):
                    continue  # the operator does not accept this extent
                for (name, got), each in zip(session.run(feeds).items(), want.values(), strict=True):
                    where = f"{place.case.label}: {other} along axis {place.axis} of input {place.index}, {name}"
                    assert got.shape == each.shape and got.dtype == each.dtype, where
                    room = 2e-3 if each.dtype.itemsize == 2 else 2e-4
                    np.testing.assert_allclose(
                        np.asarray(got, float), np.asarray(each, float), room, room, err_msg=where
                    )
            general = session._shapes._maker.general
            assert general is None or general.quick, f"{place.case.label}: no code for any sizes could be made"
