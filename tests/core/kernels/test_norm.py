"""Normalizations: layer, RMS, group, instance, batch."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import floats, kernel, sweep
from tests.core.targets import each_target

LENGTHS = (1, 7, 16, 33, 384, 1000)


@each_target
@pytest.mark.parametrize("length", LENGTHS)
def test_layer_norm(target: Target, length: int) -> None:
    sweep("LayerNormalization", f"float32[n,3,{length}]", floats(length), floats(length), target=target, tolerance=1e-4)
    sweep("RMSNormalization", f"float32[n,{length}]", floats(length), target=target)


@each_target
def test_layer_norm_over_several_axes_with_statistics(target: Target) -> None:
    inputs = ("float32[n,3,5]", floats(3, 5))
    sweep("LayerNormalization", *inputs, axis=1, epsilon=0.1, outputs=3, target=target, tolerance=1e-4)


@pytest.mark.parametrize("length", [40, 2000])
def test_layer_norm_keeps_small_deviations_from_a_large_mean(length: int) -> None:
    compiled = kernel("LayerNormalization", f"float32[n,{length}]", np.ones(length, np.float32))
    rows = floats(3, length) + np.float32(4096)
    wide = rows.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(compiled(rows)[0], expected, atol=2e-3)


@each_target
@pytest.mark.parametrize("shape", ["n,12,5,7", "n,36,3,1", "n,4,50"])
def test_channels_first(target: Target, shape: str) -> None:
    channels = int(shape.split(",")[1])
    inputs = (f"float32[{shape}]", floats(channels), floats(channels))
    sweep("InstanceNormalization", *inputs, target=target, tolerance=1e-4)
    sweep("GroupNormalization", *inputs, num_groups=4, target=target, tolerance=1e-4, batches=(1, 3))


@each_target
@pytest.mark.parametrize("shape", ["n,5,7,12", "n,3,3,36", "n,9,80", "n,4,32"])
def test_channels_last(target: Target, shape: str) -> None:
    channels = int(shape.split(",")[-1])
    inputs = (f"float32[{shape}]", floats(channels), floats(channels))
    sweep("InstanceNormalization", *inputs, layout="NHWC", target=target, tolerance=1e-4)
    sweep("GroupNormalization", *inputs, num_groups=4, layout="NHWC", target=target, tolerance=1e-4, batches=(1, 3))


@each_target
@pytest.mark.parametrize(("shape", "layout"), [("n,5,7", "NCHW"), ("n,7,3,5", "NHWC"), ("n,5", "NCHW")])
def test_batch_norm_with_given_statistics(target: Target, shape: str, layout: str) -> None:
    statistics = (floats(5), floats(5), floats(5), np.abs(floats(5)))
    sweep("BatchNormalization", f"float32[{shape}]", *statistics, layout=layout, target=target)
