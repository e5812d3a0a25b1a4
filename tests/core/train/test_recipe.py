"""Recipes in files and requests; every error names its field."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from lathe.core.train.recipe import choices, recipe
from lathe.core.train.recipe.recipe import Recipe, RecipeError
from lathe.core.train.recipe.section import Part
from lathe.core.train.training_step import optimizers, schedules
from tests.core.train.small_trainings import RECIPE

TOML = """
epochs = 3
[data]
validation = 0.1
inputs = { image = ["a", "b"] }
[model]
architecture = "mlp"
hidden = [32, 16]
[optimizer]
kind = "adamw"
rate = 1
[schedule]
kind = "cosine"
warm_up = { epochs = 0.5 }
[loss]
kind = "cross_entropy"
label_smoothing = 0.1
"""


def test_toml_and_json_give_the_same_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(TOML)
    read = recipe.read(tmp_path / "r.toml")
    (tmp_path / "r.json").write_text(read.model_dump_json())
    assert recipe.read(tmp_path / "r.json") == read
    assert read.optimizer.make() == optimizers.AdamW(1.0)
    assert read.data.inputs == {"image": ("a", "b")}
    assert read.loss is not None and read.loss.make().label_smoothing == 0.1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"epochs": 0}, "epochs: expected at least 1, got 0"),
        ({"epochs": "3"}, "epochs: expected a whole number, got '3'"),
        ({"epoch": 3}, "epoch: there is no such key, did you mean `epochs`?"),
        (
            {"optimizer": {"kind": "adam", "rate": -1.0}},
            "optimizer.rate: expected more than 0, got -1.0",
        ),
        ({"optimizer": {"kind": "lion"}}, "optimizer.kind: expected one of 'sgd', 'adagrad', .*, got 'lion'"),
        ({"optimizer": {"rate": 0.1}}, "optimizer.kind: is missing, expected one of 'sgd', 'adagrad'"),
        ({"optimizer": {"kind": "adam", "decoupled": True}}, "optimizer.decoupled: there is no such key"),
        ({"optimizer": {"kind": "adam", "lr": 0.1}}, "optimizer.lr: there is no such key, did you mean `rate`?"),
        ({"optimizer": {"kind": "addam"}}, "got 'addam', did you mean 'adam'?"),
        ({"batch-size": 3}, "batch-size: there is no such key, did you mean `batch`?"),
        ({"augment": [{"kind": "flip", "x": 3}]}, "augment.0.x: .* the keys are kind, axis, probability"),
        ({"model": {"onnx": "m.onnx", "train": ["*"]}}, "model.train: there is no such key, did you mean `trainable`?"),
        (
            {"model": {"architecture": "alexnet"}},
            "model.architecture: expected one of 'convnet', .*'lenet5', .*'alexnet'",
        ),
        ({"model": None}, "model: expected one of the keys `architecture`, `onnx` and `parent`, got None"),
        ({"model": "lenet5"}, "model: expected one of the keys"),
        ({"model": [["architecture", "mlp"]]}, "model: expected one of the keys"),
        ({"model": {}}, "model: expected one of the keys `architecture`, `onnx` and `parent`"),
        ({"model": {"architecture": "mlp", "hidden": [0]}}, r"model.hidden.0: .* got 0"),
        ({"data": {"held_out": 1.5}}, "data.held_out: expected less than 1, got 1.5"),
        ({"data": {}, "stop": {"patience": 2}}, "`stop` needs validation rows: set `data.validation`"),
        ({"schedule": {"kind": "steps", "every": {}}}, "expected either `epochs` or `updates`"),
        ({"seed": 1 << 40}, "seed: expected less than 4294967296"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint.replace("?", r"\?")) as caught:
        recipe.from_values({**RECIPE, **changes})
    assert not re.search(r"\btags?\b|discriminator|Extra inputs|Value error", str(caught.value))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"epochs = ", "invalid TOML"),
        (b"\xff", "expected a recipe, text in TOML or JSON; this file is binary"),
        (b"epochs = 2020-01-01", "a value is not text"),
        (b"epochs = nan", "epochs"),
        (b"epochs = " + b"[" * 5000, "lists or tables are nested too deeply"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: bytes, complaint: str) -> None:
    (tmp_path / "r.toml").write_bytes(text)
    with pytest.raises(RecipeError, match=rf"r\.toml: .*{complaint}"):
        recipe.read(tmp_path / "r.toml")


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.from_values({**RECIPE, "epochs": 0, "batch": -1})
    assert "epochs:" in str(caught.value) and "batch:" in str(caught.value)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"#" * (recipe.MAX_BYTES + 1))
    with pytest.raises(RecipeError, match="expected 1048576 at most"):
        recipe.read(tmp_path / "r.toml")


def test_the_json_schema_agrees() -> None:
    schema = Recipe.model_json_schema()
    jsonschema_rs.validate(schema, dict(RECIPE))
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(schema, {**RECIPE, "epochs": 0})


@pytest.mark.parametrize("kind", [*choices.LOSSES, *choices.OPTIMIZERS])
def test_tables_have_the_defaults_of_their_classes(kind: str) -> None:
    table: type[Part] = {**choices.LOSSES, **choices.OPTIMIZERS}[kind]
    assert table(kind=kind).make() == table.target()
    left = {field.name for field in fields(table.target)} - table.model_fields.keys()
    assert left <= {"decoupled"}
    assert all(field.description for field in table.model_fields.values())


def test_every_field_is_described() -> None:
    def fields_of(schema: Any) -> Any:
        for name, definition in {"Recipe": schema, **schema["$defs"]}.items():
            for field, content in definition.get("properties", {}).items():
                yield f"{name}.{field}", content

    assert [name for name, content in fields_of(Recipe.model_json_schema()) if not content.get("description")] == []


def test_schedules_count_in_epochs_or_updates() -> None:
    def made(**table: Any) -> Any:
        schedule = recipe.from_values({**RECIPE, "schedule": table}).schedule
        assert schedule is not None
        return schedule.make(0.5, 100, 10)

    assert made(kind="constant") == schedules.Constant(0.5)
    assert made(kind="steps", every={"epochs": 2}) == schedules.Steps(0.5, 20)
    assert made(kind="steps", every={"updates": 7}, factor=0.5) == schedules.Steps(0.5, 7, 0.5)
    assert made(kind="cosine") == schedules.Cosine(0.5, 100)
    assert made(kind="one_cycle", warm_up={"epochs": 0.5}) == schedules.WarmUp(schedules.OneCycle(0.5, 95), 5)
