"""Trainings of language models: new ones, fine-tuned ones, with adapters, and their results."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.language.safetensors import read_safetensors
from lathe.core.train.data import open_dataset
from lathe.core.train.recipe import recipe as recipes
from lathe.core.train.recipe.language_setup import language_examples
from lathe.core.train.recipe.parent_model import read_parent
from lathe.core.train.recipe.recipe import Data, RecipeError, Text
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run.evaluation import EvaluationRequest, evaluate
from lathe.core.train.run.folder_setup import initial_model_reader
from lathe.core.train.run.training_loop import FitRun, never_stop
from lathe.core.train.run.work_folder import prepare
from lathe.core.train.text.language import language_of_model
from lathe.core.train.training_step import losses
from lathe.core.train.training_step.optimizers import SGD
from lathe.core.train.training_step.train_step import step
from tests.core.train.text.small_language import recipe, write_documents


@dataclass(frozen=True)
class Trained:
    data: Path
    folder: Path

    @property
    def result(self) -> Path:
        return self.folder / "result"

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.result / "metrics.json").read_text())
        return found


class Bias(nn.Module):
    def __init__(self, bias: np.ndarray[Any, Any]) -> None:
        self.bias = nn.Parameter(bias)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x + self.bias


def train(folder: Path, documents: Path, parent: bytes | None = None, **changes: Any) -> Trained:
    prepare(folder, recipes.from_values(recipe(**changes)), parent)
    read = read_parent(folder / "parent.onnx") if parent is not None else None
    FitRun(recipes.read(folder / "recipe.json"), open_dataset(documents), folder, read, Resources(threads=1)).run()
    return Trained(documents, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("language")
    data = write_documents(root / "texts")
    return train(root / "run", data, data={"validation": 0.1}, epochs=4, stop={"patience": 3})


@pytest.mark.slow
def test_the_perplexity_is_the_exponential_of_the_mean_loss(trained: Trained) -> None:
    """Computed with NumPy from the logits of the folder's model on the held-out rows."""
    metrics = trained.record["metrics"]
    model = lathe.load_language_model(trained.result)
    examples, parts = language_examples(
        Text(length=16), Data(validation=0.1), open_dataset(trained.data), language_of_model(model)
    )
    batch = examples.take(parts.test)
    logits = lathe.compile(model.graph, threads=1).run({"input_ids": batch["input_ids"]})["logits"].astype(np.float64)
    counted = batch["target"] >= 0
    chosen = np.take_along_axis(logits, np.maximum(batch["target"], 0)[..., None], 2)[..., 0]
    loss = (np.log(np.exp(logits).sum(2)) - chosen)[counted].mean()
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert metrics["perplexity"] < 0.7 * model.settings.vocabulary, "it has learned something"


def test_the_model_of_the_folder_is_the_served_one(trained: Trained) -> None:
    ids = np.arange(10).reshape(2, 5)
    served = lathe.compile(trained.result / "model.onnx", threads=1).run({"input_ids": ids})["logits"]
    folder = lathe.compile(lathe.load_language_model(trained.result).graph, threads=1).run({"input_ids": ids})["logits"]
    np.testing.assert_allclose(served, folder, atol=1e-5)


def test_a_served_version_is_evaluated_by_perplexity(trained: Trained) -> None:
    request = EvaluationRequest.model_validate(
        {"data": {"validation": 0.1}, "rows": "test", "operators": False, "text": {"length": 16}}
    )
    found = evaluate(
        request, open_dataset(trained.data), trained.result / "model.onnx", Resources(threads=1), never_stop
    )
    assert found["metrics"] == pytest.approx(trained.record["metrics"])


@pytest.mark.slow
def test_adapters_alone_are_trained_and_merged(trained: Trained, tmp_path: Path) -> None:
    parent = (trained.result / "model.onnx").read_bytes()
    text = {"length": 16}
    lora = {"rank": 2, "layers": ["q_proj", "down_proj"]}
    tuned = train(tmp_path / "lora", trained.data, parent, model={"parent": True}, text=text, lora=lora)
    before, after = (read_parent(each.result / "model.onnx").model for each in (trained, tuned))
    old = {value.name: array for value, array in before.constants.items()}
    new = {value.name: array for value, array in after.constants.items()}
    changed = {name for name in old if name in new and not np.array_equal(old[name], new[name])}
    layer = "model.layers.0"
    assert changed == {f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.down_proj.weight"}
    factors = {name: tensor.array() for name, tensor in read_safetensors(tuned.result / "lora.safetensors").items()}
    assert len(factors) == 4
    prefix = f"base_model.model.{layer}.mlp.down_proj"
    added = factors[f"{prefix}.lora_B.weight"] @ factors[f"{prefix}.lora_A.weight"] * 2.0  # alpha is twice the rank
    name = f"{layer}.mlp.down_proj.weight"
    np.testing.assert_allclose(new[name], old[name] + added, atol=1e-6)
    assert tuned.record["metrics"]["perplexity"] < trained.record["metrics"]["perplexity"]


@pytest.mark.slow
def test_a_folder_is_fine_tuned(trained: Trained, tmp_path: Path) -> None:
    """With a rate of 0 the result is the model of the folder."""
    table = {"pretrained": str(trained.result)}
    changes: dict[str, Any] = {
        "model": table,
        "text": {"length": 16},
        "epochs": 1,
        "optimizer": {"kind": "sgd", "rate": 1e-30},
        "data": {"validation": 0.1},
    }
    first = initial_model_reader(recipes.from_values(recipe(**changes)), tmp_path / "recipe.toml")
    assert first is not None
    tuned = train(tmp_path / "tuned", trained.data, first(), **changes)
    assert tuned.record["metrics"] == pytest.approx(trained.record["metrics"], rel=1e-4)


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    """Loss and gradient of NumPy's formula: (softmax - one-hot) / count for tokens that count, 0 for others."""
    rng = np.random.default_rng(0)
    logits, target = rng.standard_normal((2, 3, 5)).astype(np.float32), np.array([[1, -100, 4], [-100, -100, 0]])
    graph = nn.trace(Bias(logits), {"x": "float32[2,3,5]"}, ["logits"])
    learner = step(graph, losses.NextToken(), SGD(1.0), threads=1)
    loss = learner.run({"x": np.zeros_like(logits), "target": target})["loss"]
    softmax = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    gradient = (softmax - np.eye(5)[np.maximum(target, 0)]) * (target >= 0)[..., None] / 3
    chosen = np.take_along_axis(np.log(softmax), np.maximum(target, 0)[..., None], 2)[..., 0]
    assert loss == pytest.approx(-chosen[target >= 0].mean(), rel=1e-5)
    np.testing.assert_allclose(learner.parameters["bias"], logits - gradient, atol=1e-6)
    assert learner.run({"x": np.zeros_like(logits), "target": np.full((2, 3), -100)})["loss"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"parent": True}}, "expected a model to fine-tune"),
        ({"lora": {}}, "lora: adapters need a model to fine-tune"),
        ({"loss": {"kind": "mse"}}, "loss: language models"),
        ({"judge": "accuracy"}, "judge: expected `loss`"),
        ({"preprocess": [{"kind": "scale", "factor": 2.0}]}, "preprocess: language models"),
    ],
)
def test_settings_that_language_models_lack_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        train(tmp_path / "run", write_documents(tmp_path / "texts"), **changes)
