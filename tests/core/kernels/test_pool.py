"""MaxPool and AveragePool in both layouts."""

from __future__ import annotations

from typing import Any

import pytest

from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel, sweep
from tests.core.targets import each_target

WINDOWS: list[dict[str, Any]] = [
    {"kernel_shape": (2, 2), "strides": (2, 2)},
    {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)},
    {"kernel_shape": (3, 2), "strides": (1, 3), "dilations": (2, 1), "pads": (0, 1, 2, 1)},
    {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (0, 1, 1, 0), "ceil_mode": 1},
    {"kernel_shape": (3, 4), "strides": (2, 2), "auto_pad": "SAME_UPPER"},
    {"kernel_shape": (3, 4), "strides": (2, 2), "auto_pad": "SAME_LOWER"},
    {"kernel_shape": (9, 9)},
]


def _image(layout: str, channels: int) -> str:
    return f"float32[n,{channels},9,11]" if layout == "NCHW" else f"float32[n,9,11,{channels}]"


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: "-".join(map(str, window.values())))
@pytest.mark.parametrize(
    ("op", "layout", "channels"), [("AveragePool", "NCHW", 3), ("MaxPool", "NHWC", 17), ("AveragePool", "NHWC", 5)]
)
def test_windows(target: Target, window: dict[str, Any], op: str, layout: str, channels: int) -> None:
    sweep(op, _image(layout, channels), layout=layout, target=target, batches=(0, 2), **window)


@each_target
@pytest.mark.parametrize("channels", [1, 3, 16, 70, 130])
def test_channels(target: Target, channels: int) -> None:
    window = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    sweep("MaxPool", _image("NHWC", channels), layout="NHWC", target=target, **window)  # type: ignore[arg-type]


@each_target
@pytest.mark.parametrize("ceil_mode", [0, 1])
def test_average_that_counts_padding(target: Target, ceil_mode: int) -> None:
    window = {"kernel_shape": (4, 3), "strides": (3, 2), "pads": (1, 1, 1, 1), "ceil_mode": ceil_mode}
    for layout in ("NCHW", "NHWC"):
        shape = _image(layout, 5)
        sweep("AveragePool", shape, layout=layout, count_include_pad=1, target=target, **window)  # type: ignore[arg-type]


@each_target
def test_one_and_three_spatial_axes(target: Target) -> None:
    sweep("MaxPool", "float32[n,3,17]", kernel_shape=(3,), strides=(2,), target=target)
    sweep("AveragePool", "float32[n,3,7,5,6]", kernel_shape=(2, 3, 2), pads=(0, 1, 1, 1, 1, 0), target=target)


@each_target
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_greatest_byte(target: Target, dtype: str) -> None:
    window = {"kernel_shape": (2, 3), "pads": (1, 1, 0, 1)}
    sweep("MaxPool", f"{dtype}[n,5,6,7]", layout="NHWC", target=target, batches=(2,), **window)  # type: ignore[arg-type]


def test_many_lines_are_split_among_threads() -> None:
    compiled = kernel(
        "MaxPool", "float32[n,56,56,16]", layout="NHWC", kernel_shape=(3, 3), strides=(2, 2), pads=(1,) * 4
    )
    for threads in (1, 2, 3):
        compiled.check(floats(4, 56, 56, 16), threads=threads)


@pytest.mark.parametrize(
    ("window", "inside"),
    [
        (Window(8, 4, 2, 2, 1, 0, 0), (0, 4)),
        (Window(8, 4, 3, 2, 1, 1, 1), (1, 4)),
        (Window(9, 5, 3, 2, 1, 1, 1), (1, 4)),
        (Window(3, 3, 5, 1, 1, 2, 2), (2, 2)),
    ],
)
def test_windows_inside_the_image(window: Window, inside: tuple[int, int]) -> None:
    assert window.inside == inside
