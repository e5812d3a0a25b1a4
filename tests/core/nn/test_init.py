"""Initial values follow PyTorch's formulas and depend only on the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lathe import nn
from lathe.core.nn import init

UNIFORM = 1 / math.sqrt(3)  # deviation of a uniform distribution, for a bound of 1


def deviations(module: nn.Module) -> dict[str, float]:
    return {name: float(each.data.std()) for name, each in module.named_parameters()}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(400, 300), {"weight": UNIFORM / 20, "bias": UNIFORM / 20}),
        (lambda: nn.Conv2d(64, 200, 5, groups=2), {"weight": UNIFORM / math.sqrt(800),
                                                   "bias": UNIFORM / math.sqrt(800)}),
        (lambda: nn.ConvTranspose2d(60, 300, 2, bias=False), {"weight": UNIFORM / math.sqrt(1200)}),
        (lambda: nn.Embedding(300, 200), {"weight": 1.0}),
        (lambda: nn.GRU(50, 100, bias=False), {"weight_ih_l0": UNIFORM / 10, "weight_hh_l0": UNIFORM / 10}),
        (lambda: nn.MultiheadAttention(100, 2, bias=False), {"in_proj_weight": UNIFORM * math.sqrt(6 / 400),
                                                             "out_proj.weight": UNIFORM / 10}),
    ],
)  # fmt: skip
def test_layers_are_initialised_like_pytorchs(make: Callable[[], nn.Module], expected: dict[str, float]) -> None:
    found = deviations(make())
    assert found.keys() == expected.keys()
    for name, deviation in expected.items():
        assert found[name] == pytest.approx(deviation, rel=0.07), name


@pytest.mark.parametrize(
    ("fill", "mean", "deviation"),
    [
        (lambda p: init.kaiming_normal_(p, nonlinearity="relu"), 0, math.sqrt(2 / 400)),
        (lambda p: init.kaiming_normal_(p, mode="fan_out"), 0, math.sqrt(2 / 300)),
        (lambda p: init.kaiming_uniform_(p, a=1.0), 0, math.sqrt(1 / 400)),
        (lambda p: init.xavier_normal_(p, gain=2.0), 0, 2 * math.sqrt(2 / 700)),
        (lambda p: init.xavier_uniform_(p), 0, math.sqrt(2 / 700)),
        (lambda p: init.uniform_(p, 1.0, 3.0), 2, 2 * UNIFORM / 2),
        (lambda p: init.trunc_normal_(p, std=0.5, a=-10, b=10), 0, 0.5),
        (lambda p: init.ones_(p), 1, 0),
        (lambda p: init.zeros_(p), 0, 0),
    ],
)
def test_initialisers(fill: Callable[[nn.Parameter], Any], mean: float, deviation: float) -> None:
    parameter = fill(nn.Parameter(np.empty((300, 400), np.float32)))
    assert parameter.data.dtype == np.float32
    assert parameter.data.mean() == pytest.approx(mean, abs=0.01)
    assert parameter.data.std() == pytest.approx(deviation, rel=0.02)


def test_a_truncated_distribution_stays_in_its_bounds() -> None:
    data = init.trunc_normal_(nn.Parameter(np.empty(1000, np.float32)), a=-0.5, b=0.25).data
    assert -0.5 <= data.min() < -0.4
    assert 0.2 < data.max() <= 0.25


def test_setting_the_seed_restarts_the_stream() -> None:
    def drawn() -> Any:
        return nn.Linear(3, 3).weight.data

    nn.manual_seed(5)
    first, second = drawn(), drawn()
    with nn.seeded(5):
        np.testing.assert_array_equal(drawn(), first)
    third = drawn()
    nn.manual_seed(5)
    for expected in (first, second, third):
        np.testing.assert_array_equal(drawn(), expected)


def test_unknown_modes_are_refused() -> None:
    parameter = nn.Parameter(np.empty((2, 2), np.float32))
    with pytest.raises(ValueError, match="mode: expected fan_in or fan_out, got 'fan'"):
        init.kaiming_normal_(parameter, mode="fan")
    with pytest.raises(ValueError, match="nonlinearity: expected leaky_relu, linear"):
        init.kaiming_normal_(parameter, nonlinearity="swish")


def test_skipped_parameters_are_zeros_that_take_no_memory() -> None:
    with nn.seeded(3):
        after = nn.Linear(4, 4).weight.data
    with nn.seeded(3):
        with init.skipped():
            layers = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Embedding(1 << 20, 1 << 20))
            small = nn.TransformerEncoderLayer(8, 2, 8)
        np.testing.assert_array_equal(nn.Linear(4, 4).weight.data, after)  # nothing was drawn
    assert {parameter.data.shape for parameter in layers.parameters()} == {(1 << 20, 1 << 20), (1 << 20,)}
    assert all(parameter.data.strides[0] == 0 for parameter in layers.parameters())
    small.load_state_dict({name: np.ones(each.data.shape) for name, each in small.named_state()})
    assert all((parameter.data == 1).all() for parameter in small.parameters())
