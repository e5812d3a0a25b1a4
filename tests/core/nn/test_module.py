"""Modules: their parameters and buffers, their state, and eager runs in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe import nn
from lathe.core.errors import LatheError


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2, bias=False)))


def rows(*shape: int) -> Any:
    return np.random.default_rng(0).normal(1, 2, shape).astype(np.float32)


def test_paths_name_parameters_and_buffers() -> None:
    model = small()
    trained = ["0.weight", "0.bias", "1.weight", "1.bias", "2.1.weight"]
    kept = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [name for name, _ in model.named_parameters()] == trained
    assert [name for name, _ in model.named_buffers()] == kept
    assert list(model.state_dict()) == [*trained[:4], *kept, "2.1.weight"]
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2", "2.0", "2.1"]


def test_shared_parameters_count_once() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    graph = nn.trace(model, {"x": "float32[n,3]"})
    assert [value.name for value in graph.constants] == ["0.weight", "0.bias"]


def test_containers() -> None:
    model = small()
    assert isinstance(model[1:], nn.Sequential)
    assert [model[0], model[-1]] == [model[:1][0], model[1:][1]]
    named = nn.Sequential({"first": nn.Linear(3, 4), "act": nn.ReLU()})
    assert list(named.state_dict()) == ["first.weight", "first.bias"]
    assert named(rows(2, 3)).shape == (2, 4)
    layers = nn.ModuleList([nn.ReLU()]).append(nn.Tanh())
    assert (len(layers), repr(layers[1:])) == (2, "ModuleList(\n  (0): Tanh()\n)")
    heads = nn.ModuleDict({"a": nn.Linear(3, 1)})
    heads["b"] = nn.Linear(3, 2, bias=False)
    assert (list(heads), len(heads), heads["b"](rows(2, 3)).shape) == (["a", "b"], 2, (2, 2))
    assert list(heads.state_dict()) == ["a.weight", "a.bias", "b.weight"]


def test_state_goes_from_one_model_to_another() -> None:
    with nn.seeded(1):
        first = small()
    with nn.seeded(2):
        second = small()
    x = rows(5, 3)
    assert not np.array_equal(first(x).numpy(), second(x).numpy())
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(first.eval()(x).numpy(), second.eval()(x).numpy())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model, before = small(), small().state_dict()
    model.load_state_dict(before)
    missing = {name: array + 1 for name, array in before.items() if name != "0.bias"}
    for state, message in (
        (missing, r"'0\.bias' is missing \(1 such names\)"),
        ({**before, "3.weight": np.zeros(1)}, r"'3\.weight' is not in the module"),
        ({**missing, "0.bias": np.zeros(5)}, r"'0\.bias' has shape \[5\], expected \[4\]"),
    ):
        with pytest.raises(LatheError, match=message):
            model.load_state_dict(state)
        for name, array in model.state_dict().items():
            np.testing.assert_array_equal(array, before[name])
    model.load_state_dict(missing, strict=False)
    np.testing.assert_array_equal(model.state_dict()["0.weight"], before["0.weight"] + 1)


def test_repr_shows_the_submodules() -> None:
    assert repr(nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.GELU(), nn.Dropout(0.1)))) == (
        "Sequential(\n"
        "  (0): Linear(in_features=3, out_features=4, bias=True)\n"
        "  (1): Sequential(\n"
        "    (0): GELU(approximate=none)\n"
        "    (1): Dropout(p=0.1)\n"
        "  )\n"
        ")"
    )


def test_batch_normalization_uses_batch_statistics_in_training() -> None:
    layer, x = nn.BatchNorm2d(3, momentum=0.25), rows(4, 3, 5, 2)
    y = layer(x).numpy()
    np.testing.assert_allclose(y.mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(y.std((0, 2, 3)), 1, 1e-4)
    np.testing.assert_allclose(layer.running_mean.data, 0.25 * x.mean((0, 2, 3)), 1e-5)
    np.testing.assert_allclose(layer.running_var.data, 0.75 + 0.25 * x.var((0, 2, 3)), 1e-5)
    assert layer.num_batches_tracked.data == 1
    layer.eval()(x)
    assert layer.num_batches_tracked.data == 1


def test_dropout_drops_in_training_alone_and_by_the_seed() -> None:
    layer, x = nn.Dropout(0.25), np.ones((100, 100), np.float32)
    with nn.seeded(3):
        dropped = layer(x).numpy()
    with nn.seeded(3):
        np.testing.assert_array_equal(layer(x).numpy(), dropped)
    assert set(np.unique(dropped)) == {0, np.float32(1 / 0.75)}
    assert 0.24 < (dropped == 0).mean() < 0.26
    np.testing.assert_array_equal(layer.eval()(x).numpy(), x)
    assert [node.op for node in nn.trace(layer, {"x": "float32[n]"}).nodes] == ["Identity"]
    assert [node.op for node in nn.trace(layer.train(), {"x": "float32[n]"}).nodes] == ["Dropout"]


def test_outputs_of_modules_are_recorded() -> None:
    model, x = small().eval(), rows(2, 3)
    with nn.recorded() as seen:
        y = model(x)
    assert list(seen) == ["0", "1", "2.0", "2.1", "2", ""]
    np.testing.assert_array_equal(seen[""].numpy(), y.numpy())
    np.testing.assert_array_equal(seen["2.0"].numpy(), np.maximum(seen["1"].numpy(), 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(3, 4, 3, groups=2), "groups is 2, expected a divisor of 3 and of 4 channels"),
        (lambda: nn.Conv2d(3, 4, (1, 2, 3)), "has 3 numbers, expected 1 or 2"),
        (lambda: nn.ModuleDict({"train": nn.ReLU()}), "'train' cannot name a module in a ModuleDict"),
        (lambda: nn.Sequential({"a.b": nn.ReLU()}), "'a.b' cannot name a module in a Sequential"),
        (
            lambda: nn.MaxPool2d((1, 2), padding=1),
            r"padding: expected at most half of the kernel \(1, 2\), got \(1, 1\)",
        ),
        (lambda: nn.Dropout(1.0), "p: expected at least 0 and below 1, got 1.0"),
        (lambda: nn.MultiheadAttention(5, 2), "num_heads: expected a divisor of embed_dim 5, got 2"),
        (lambda: nn.Embedding(3, 2, padding_idx=3), "padding_idx: expected one of 3 rows, got 3"),
        (lambda: nn.GroupNorm(2, 3), "num_groups: expected a divisor of 3 channels, got 2"),
        (lambda: nn.TransformerEncoderLayer(4, 2, activation="swiglu"), "activation: expected one of relu"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
