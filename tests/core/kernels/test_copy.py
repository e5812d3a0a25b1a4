"""Kernels that move elements: every operator, each for every width of element."""

from __future__ import annotations

import itertools
import mmap
import time
from typing import Any

import numpy as np
import pytest

from lathe.core.kernels.target import Target
from tests.core.kernels.harness import guarded
from tests.core.kernels.sweep import floats, kernel, normal, sweep, tensor
from tests.core.targets import each_target

WIDTHS = ("uint8", "int16", "float32", "int64")
each_width = pytest.mark.parametrize("dtype", WIDTHS)


@pytest.mark.sample(4)
@each_target
@each_width
@pytest.mark.parametrize("perm", list(itertools.permutations(range(3))), ids=str)
def test_transpose_with_tails(target: Target, dtype: str, perm: tuple[int, ...]) -> None:
    sweep("Transpose", f"{dtype}[n,17,33]", perm=perm, target=target, batches=(0, 1, 3))


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize(
    ("shape", "perm"),
    [
        ("n,3,7,9", (0, 2, 3, 1)),
        ("n,2,3,32", (0, 2, 3, 1)),
        ("n,4,5,5", (0, 2, 3, 1)),
        ("n,7,9,3", (0, 3, 1, 2)),
        ("n,64,5,5", (0, 2, 3, 1)),
        ("n,5,7,9", (3, 0, 2, 1)),
        ("n,12,4,32", (0, 2, 1, 3)),
        ("n,1,5,1", (3, 2, 1, 0)),
        ("n", (0,)),
    ],
)
def test_transposes_of_images_and_heads(target: Target, shape: str, perm: tuple[int, ...]) -> None:
    sweep("Transpose", f"float32[{shape}]", perm=perm, target=target)


def test_large_transposes_are_split_among_threads() -> None:
    compiled = kernel("Transpose", "float32[n,300]", perm=(1, 0))
    for threads in (1, 2, 3):
        compiled.check(normal(compiled.graph.inputs[0].dtype, (501, 300)), threads=threads)


MOVES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("Concat", ("n,17", "n,3", "n,64"), {"axis": 1}),
    ("Concat", ("n,17", "3,17"), {"axis": 0}),
    ("Concat", ("n,5,17", "n,1,17", "n,2,17"), {"axis": -2}),
    ("Slice", ("n,20,33",), {"starts": (1, -3), "ends": (19, 0), "axes": (1, 2), "steps": (2, -4)}),
    ("Slice", ("n,20,33",), {"starts": (-30,), "ends": (99,), "axes": (1,)}),
    ("Expand", ("n,1,7",), {"shape": (1, 5, 7)}),
    ("Expand", ("n,1",), {"shape": (3, 1, 17)}),
    ("Tile", ("n,3,5",), {"repeats": (1, 2, 3)}),
    ("DepthToSpace", ("n,12,5,3",), {"blocksize": 2, "mode": "DCR"}),
    ("DepthToSpace", ("n,12,5,3",), {"blocksize": 2, "mode": "CRD"}),
    ("DepthToSpace", ("n,5,3,12",), {"blocksize": 2, "mode": "CRD", "layout": "NHWC"}),
    ("SpaceToDepth", ("n,3,4,6",), {"blocksize": 2}),
    ("SpaceToDepth", ("n,4,6,3",), {"blocksize": 2, "layout": "NHWC"}),
    ("SpaceToDepth", ("n,3,4,6",), {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", ("n,4,6,3",), {"blocksize": 2, "mode": "CRD", "layout": "NHWC"}),
    ("Reshape", ("n,4,6",), {"shape": (-1, 24)}),
    ("Pad", ("n,6,7",), {"pads": (0, -1, 2, 0, 3, -2)}),
    *(("Pad", ("n,6,7",), {"pads": (0, 1, 2, 0, 3, 4), "mode": m}) for m in ("constant", "edge", "reflect", "wrap")),
]


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("move", MOVES, ids=lambda move: f"{move[0]}-{'-'.join(map(str, move[2].values()))}")
def test_moves(target: Target, move: tuple[str, tuple[str, ...], dict[str, Any]]) -> None:
    op, shapes, attrs = move
    sweep(op, *(f"float32[{shape}]" for shape in shapes), target=target, **attrs)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "float16", "float64"])
def test_moves_in_other_widths(target: Target, dtype: str) -> None:
    def sweep_bits(op: str, *shapes: str, **attrs: Any) -> None:
        sweep(op, *(f"{dtype}[{shape}]" for shape in shapes), target=target, batches=(5,), **attrs)

    sweep_bits("Concat", "n,17", "n,3", axis=1)
    sweep_bits("Slice", "n,20,33", starts=(1, -3), ends=(19, 0), axes=(1, 2), steps=(2, -4))
    sweep_bits("Tile", "n,3,5", repeats=(1, 2, 3))
    sweep_bits("Pad", "n,6,7", pads=(1, 2), axes=(1,), constant_value=np.ones((), tensor(f"{dtype}[]").dtype.numpy))


@each_target
def test_split_into_unequal_parts(target: Target) -> None:
    sweep("Split", "float32[n,20]", axis=1, split=(3, 16, 1), outputs=3, target=target)
    sweep("Split", "float32[n,20,3]", axis=-2, num_outputs=3, outputs=3, target=target)


def test_large_concat_is_split_among_threads() -> None:
    sweep("Concat", "float32[n,3,700]", "float32[n,1,700]", axis=1, target=kernel("Relu", "float32[n]").target,
          batches=(1, 50, 200))  # fmt: skip


def test_concat_of_few_long_rows_is_split_among_threads() -> None:
    compiled = kernel("Concat", "float32[n,3,20480]", "float32[n,1,20480]", axis=1)
    for threads in (1, 2, 3):
        compiled.check(floats(2, 3, 20480), floats(2, 1, 20480), threads=threads)


def test_rows_that_do_not_exist_cost_nothing() -> None:
    """Masked loads beyond the image took fifty times as long if the memory after it had never been touched.

    There are such loads because a tile has more rows than the image has channels."""
    compiled = kernel("Transpose", "float32[n,3,128,128]", perm=(0, 2, 3, 1))
    output = guarded(floats(1, 128, 128, 3))
    places = [np.frombuffer(mmap.mmap(-1, 4 << 20), np.float32) for _ in range(2)]
    places[1][:] = 0
    images = [place[: 3 * 128 * 128] for place in places]
    images[0][:] = 0
    times: list[list[float]] = [[], []]
    for turn in range(30):
        started = time.perf_counter()
        compiled._run([images[turn % 2], output], 1, 1)
        times[turn % 2].append(time.perf_counter() - started)
    assert min(times[0]) < 5 * min(times[1])
