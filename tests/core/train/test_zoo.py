"""Architectures by name: from settings and the type of a row to a graph that learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from pydantic import TypeAdapter, ValidationError

import lathe
from lathe.core.errors import ModelError
from lathe.core.ir.types import DType
from lathe.core.passes.proofs.rows import rows
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers, schedules
from lathe.core.train.zoo import ARCHITECTURES, Architecture, architecture


@dataclass(frozen=True)
class Row:
    dtype: DType
    shape: tuple[int, ...]


def made(
    name: str, shape: tuple[int, ...], dtype: DType = DType.FLOAT32, seed: int = 0, **settings: Any
) -> lathe.Graph:
    return architecture(ARCHITECTURES[name](**settings), {"x": Row(dtype, shape)}, 4, seed=seed)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_setting_is_described_and_has_a_default(name: str) -> None:
    settings = ARCHITECTURES[name]
    assert settings().architecture == name
    assert all(field.description and field.description.endswith(".") for field in settings.model_fields.values())


SMALL = {"width": 16, "heads": 2, "layers": 1, "feedforward": 32}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "shape", "settings"),
    [
        ("lenet5", (8, 8), {}),
        ("convnet", (8, 8), {"channels": (8, 8), "block": "separable", "pool": "stride", "head": "flatten"}),
        ("mlp", (2, 5), {"batch_norm": True}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("lenet5", (3, 28, 28), {"pool": "average", "activation": "tanh"}),
                ("lenet5", (1, 13, 32), {"dropout": 0.1}),
                ("resnet-small", (2, 9, 8), {"widths": (8, 16)}),
                ("resnet-small", (8, 8), {"blocks": 2}),
                ("transformer-encoder", (6,), SMALL),
                ("transformer-encoder", (5, 3), {}),
            ]
        ),
    ],
)
def test_it_learns_to_tell_four_classes(name: str, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    graph = made(name, shape, **settings)
    rng = np.random.default_rng(0)
    patterns = rng.normal(0, 1, (4, *shape)).astype(np.float32)
    learner = step(graph, losses.CrossEntropy(), optimizers.Adam(), schedules.OneCycle(0.01, 40), threads=1)
    for _ in range(40):
        target = rng.integers(0, 4, 32)
        learner.run({"x": patterns[target] + rng.normal(0, 0.3, (32, *shape)).astype(np.float32), "target": target})
    logits = lathe.compile(learner.graph()).run({"x": patterns})["logits"]
    assert logits.argmax(1).tolist() == [0, 1, 2, 3]


def test_a_transformer_learns_tokens_and_does_not_look_at_padding() -> None:
    graph = made("transformer-encoder", (7,), DType.INT64, vocabulary=9, padding=0, **SMALL)
    rng = np.random.default_rng(0)
    learner = step(graph, losses.CrossEntropy(), optimizers.Adam(), schedules.OneCycle(0.02, 80), threads=1)

    def batch(rows: int) -> dict[str, Any]:
        """Sequences with one token of 1 to 4, which is the class, among other tokens; then padding."""
        lengths, target = rng.integers(1, 8, rows), rng.integers(0, 4, rows)
        x = np.where(np.arange(7) < lengths[:, None], rng.integers(5, 9, (rows, 7)), 0)
        x[np.arange(rows), rng.integers(0, lengths)] = target + 1
        return {"x": x, "target": target}

    for _ in range(80):
        learner.run(batch(32))
    feeds = batch(64)
    session = lathe.compile(learner.graph())
    logits = session.run({"x": feeds["x"]})["logits"]
    assert (logits.argmax(1) == feeds["target"]).mean() > 0.95
    weights = {value.name: array for value, array in learner.graph().constants.items()}
    np.testing.assert_array_equal(weights["embedding.embed.weight"][0], 0)
    assert np.isfinite(session.run({"x": np.zeros((1, 7), np.int64)})["logits"]).all()


@pytest.mark.parametrize(
    ("name", "row", "settings"),
    [
        ("lenet5", Row(DType.FLOAT32, (3, 28, 28)), {}),
        ("mlp", Row(DType.FLOAT32, (2, 5)), {"batch_norm": True}),
        ("mlp", Row(DType.INT64, (3,)), {}),
        ("lenet5", Row(DType.UINT8, (9, 8)), {}),
        ("convnet", Row(DType.UINT8, (9, 7)), {"channels": (4, 6, 6), "head": "flatten", "hidden": 5}),
        (
            "convnet",
            Row(DType.FLOAT32, (3, 7, 9)),
            {"depth": 2, "block": "separable", "pool": "stride", "head": "flatten"},
        ),
        (
            "convnet",
            Row(DType.FLOAT32, (2, 9, 9)),
            {"depth": 2, "block": "inverted", "kernels": (5, 3), "pool": "average"},
        ),
        ("resnet-small", Row(DType.FLOAT32, (8, 8)), {"widths": (4, 8), "blocks": 2}),
        ("transformer-encoder", Row(DType.INT64, (7,)), {"vocabulary": 9, "padding": 0, **SMALL}),
        ("transformer-encoder", Row(DType.FLOAT32, (5,)), SMALL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_exported_model_gives_the_same_outputs(name: str, row: Row, settings: dict[str, Any]) -> None:
    graph = made(name, row.shape, row.dtype, **settings)
    assert rows(graph).batchable
    data = lathe.export(graph)
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (3, *row.shape)) if row.dtype.is_integer else rng.normal(0, 1, (3, *row.shape))
    x = x.astype(row.dtype.numpy)
    (expected,) = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(lathe.interpret(graph, {"x": x})["logits"], expected, 1e-4, 1e-5)
    np.testing.assert_allclose(lathe.interpret(lathe.load(data), {"x": x})["logits"], expected, 1e-4, 1e-5)


def test_a_seed_decides_the_weights() -> None:
    first, again, other = (made("mlp", (5,), seed=seed) for seed in (1, 1, 2))
    assert str(first) == str(again)
    assert str(first) != str(other)


def test_recipes_name_architectures_and_are_checked() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Architecture)
    found = adapter.validate_python({"architecture": "mlp", "hidden": [5]})
    assert found == ARCHITECTURES["mlp"](hidden=(5,))
    for wrong in (
        {"architecture": "mlp", "hiden": [5]},
        {"architecture": "vgg"},
        {"architecture": "mlp", "dropout": 1},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_stages_build_the_first_channels_only() -> None:
    two = made("convnet", (8, 8), channels=(4, 6, 8), stages=2)
    assert str(two) == str(made("convnet", (8, 8), channels=(4, 6)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stages": 3}, "stages is 3, expected at most the 2 of channels"),
        ({"kernels": (3, 4)}, "kernels has 4, expected odd sizes"),
    ],
)
def test_settings_of_a_convnet_that_do_not_fit_together_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ARCHITECTURES["convnet"](**settings)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match=r"convnet': expected images of at least 4 pixels each way for 3 stages"):
        made("convnet", (3, 8), channels=(4, 4, 4))
    with pytest.raises(ModelError, match=r"architecture 'lenet5': expected images, numbers .*, got rows float32\[64\]"):
        made("lenet5", (64,))
    with pytest.raises(ModelError, match=r"architecture 'lenet5': expected images of at least 4 pixels each way"):
        made("lenet5", (3, 9))
    with pytest.raises(ModelError, match=r"architecture 'transformer-encoder': needs the setting `vocabulary`"):
        made("transformer-encoder", (7,), DType.INT64)
    with pytest.raises(ModelError, match=r"architecture 'mlp': expected numbers, got rows string\[5\]"):
        made("mlp", (5,), DType.STRING)
