"""`Recipe`: everything that decides what is trained and how, as data: TOML files hold it, and so do requests.

The same recipe, data and number of threads give the same weights, bit by bit, on machines of one kind.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from core.errors import LatheError
from core.mistakes import mistakes, shortened
from core.train.choices import Loss, Optimizer, ScheduleChoice
from core.train.data import Preprocess, Transform
from core.train.data.opening import Format
from core.train.section import Section
from core.train.zoo import Architecture

LARGEST = 1 << 20  # bytes of a recipe

# What PyTorch, Keras and others call a key of a recipe.
SYNONYMS = {
    "lr": "rate",
    "learning_rate": "rate",
    "eps": "epsilon",
    "betas": "beta1",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "l2": "weight_decay",
    "decay": "weight_decay",
    "gamma": "factor",
    "step_size": "every",
    "type": "kind",
    "name": "kind",
    "batch_size": "batch",
    "batchsize": "batch",
    "minibatch": "batch",
    "num_epochs": "epochs",
    "n_epochs": "epochs",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "criterion": "loss",
    "objective": "loss",
    "dataset": "data",
    "network": "model",
    "augmentation": "augment",
    "transforms": "augment",
    "early_stopping": "stop",
    "gradient_accumulation": "accumulate",
    "clip_norm": "clip",
    "ema": "average",
    "dtype": "precision",
    "label": "target",
    "test_split": "held_out",
    "validation_split": "validation",
    "file": "onnx",
    "arch": "architecture",
}

Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # JSON and TOML have lists

Pixels = Annotated[int, Field(ge=1, le=8192)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]


class RecipeError(LatheError):
    """A recipe that does not read as one: every field at fault, what was expected and what came."""


class Data(Section):
    """Which columns the model takes, which it learns to tell, and which rows are kept from it."""

    format: Format | None = Field(default=None, description="What the files are; without it their content says so.")
    inputs: dict[str, str | Names] | None = Field(
        default=None, description="Column, or columns to join, for each input; without it everything but the target."
    )
    shapes: dict[str, Sizes] = Field(default={}, description="Rows of an input in another shape: 784 as 28, 28.")
    image_size: Annotated[tuple[Pixels, Pixels], Field(strict=False)] | None = Field(
        default=None, description="Height and width that image files are brought to; without it all must be alike."
    )
    layouts: dict[str, Literal["HW", "CHW", "HWC"]] = Field(
        default={}, description="How an input's rows are images, where their shape does not tell."
    )
    target: str | None = Field(
        default=None, description="Column to learn; without it `y`, `target`, `label` or the last."
    )
    task: Literal["auto", "classes", "numbers"] = Field(
        default="auto", description="Whether the target counts classes; `auto`: text and whole numbers do."
    )
    held_out: float = Field(
        default=0.2, ge=0, lt=1, description="Share of the rows for the final test, which files with a test part bring."
    )
    validation: float = Field(default=0.0, ge=0, lt=1, description="Share of the rows to look at after every epoch.")
    stratified: bool = Field(default=True, description="Each class gives its share.")
    seed: Seed = Field(default=0, description="Of the split, apart from the training's: runs compare on the same rows.")


class OnnxModel(Section):
    """A model from a file, whose float weights go on learning."""

    onnx: str = Field(min_length=1, description="The file, relative to the recipe's. Only `lathe train` reads it.")
    trainable: Names = Field(default=("*",), description="Patterns of the names of weights that learn (`*`, `?`).")


class ParentModel(Section):
    """The model that the job begins with: a published version."""

    parent: Literal[True] = Field(description="Go on from the job's model.")
    trainable: Names = Field(default=("*",), description="Patterns of the names of weights that learn (`*`, `?`).")
    head: Literal["keep", "replace"] = Field(
        default="keep", description="`replace`: a new last layer, for other classes or numbers than the model tells."
    )


def _which(model: object) -> str | None:
    """How a recipe's model says what it is."""
    keys = model if isinstance(model, Mapping) else getattr(model, "__dict__", ())
    return next((key for key in ("architecture", "onnx", "parent") if key in keys), None)


Model: TypeAlias = Annotated[
    Annotated[Architecture, Tag("architecture")]
    | Annotated[OnnxModel, Tag("onnx")]
    | Annotated[ParentModel, Tag("parent")],
    Discriminator(
        _which,
        custom_error_type="model",
        custom_error_message="expected one of the keys `architecture`, `onnx` and `parent`",
    ),
]


class Clip(Section):
    """Bounds of gradients."""

    norm: float | None = Field(default=None, gt=0, description="Of all gradients together.")
    value: float | None = Field(default=None, gt=0, description="Of every single number.")


class Stop(Section):
    """When to end before the last epoch."""

    patience: int = Field(ge=1, description="Epochs without an improvement.")
    least_change: float = Field(default=0.0, ge=0, description="What counts as an improvement.")


class Checkpoints(Section):
    """How often the whole state is written down. At the end of training, and when a job is stopped, it always is."""

    seconds: float | None = Field(default=60.0, gt=0, description="Time between two, about.")
    steps: int | None = Field(default=None, ge=1, description="Batches between two.")


class Recipe(Section):
    """What is trained, on what, and how."""

    data: Data = Field(default=Data(), description="Columns and split.")
    model: Model = Field(description="What learns: an architecture and its settings, a file, or the job's model.")
    preprocess: tuple[Preprocess, ...] = Field(
        default=(), strict=False, description="Steps that become the model's first: what is served takes raw values."
    )
    augment: tuple[Transform, ...] = Field(
        default=(), strict=False, description="Random changes of images, in training only."
    )
    loss: Loss | None = Field(
        default=None, description="What is made small; without it `cross_entropy` for classes, `mse` for numbers."
    )
    optimizer: Optimizer = Field(description="How weights move.")
    schedule: ScheduleChoice | None = Field(default=None, description="How the rate changes; without it, it does not.")
    epochs: int = Field(ge=1, le=1_000_000, description="How often every row is learned from.")
    batch: int = Field(default=64, ge=1, le=1 << 20, description="Rows of a step.")
    accumulate: int = Field(default=1, ge=1, description="Steps whose mean gradient makes one update.")
    clip: Clip | None = Field(default=None, description="Bounds of gradients.")
    average: float | None = Field(
        default=None, gt=0, lt=1, description="Keep running averages of weights, which become the result; 0.999, say."
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="What products multiply while training; weights and sums are float32 in any case. `float16` scales "
        "the loss, and skips updates that overflow.",
    )
    memory: int | None = Field(
        default=None,
        ge=1,
        description="Bytes for what a step computes; what finds no room is computed again.",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|(cuda|simulated|interpreted)(:\d{1,4})?)$",
        description="Where steps run: `cuda` is a GPU, `cuda:1` the second one. The result is judged on the CPU.",
    )
    keep: Literal["best", "last"] = Field(
        default="best", description="Which epoch's weights become the result; the last's where nothing is validated."
    )
    judge: Literal["accuracy", "loss"] | None = Field(
        default=None, description="What makes an epoch the best; without it `accuracy` for classes, else `loss`."
    )
    stop: Stop | None = Field(default=None, description="When to end early.")
    checkpoint: Checkpoints = Field(default=Checkpoints(), description="How often the state is written down.")
    seed: Seed = Field(default=0, description="Of the first weights, the order of rows, augmentation and dropout.")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.stop is not None and not self.data.validation:
            raise ValueError("`stop` needs rows to look at after every epoch: `data.validation`")
        if self.memory is not None and self.device != "cpu":
            raise ValueError(f"`memory` bounds steps on the CPU, and `device` is {self.device}")
        return self


def read(path: Path) -> Recipe:
    """A recipe from a TOML or JSON file. RecipeError naming the file and every field at fault."""
    data = _content(path)
    try:
        return from_json(data) if path.suffix == ".json" else from_toml(data)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML or JSON file, whether or not they make a whole recipe. RecipeError naming the file."""
    data = _content(path)
    try:
        return _json(data) if path.suffix == ".json" else _toml(data)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if len(data) > LARGEST:
        raise RecipeError(f"{path}: {len(data)} bytes, expected {LARGEST} at most")
    return data


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise RecipeError(f"is {shortened(found)}, expected an object")
    return found


def from_toml(text: bytes) -> Recipe:
    return from_values(_toml(text))


def _toml(text: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"is no TOML: {error}") from None
    except RecursionError:
        raise RecipeError("is no TOML that can be read: too many lists or tables inside each other") from None


def from_values(values: Mapping[str, Any]) -> Recipe:
    """A recipe from tables as TOML has them."""
    try:
        return from_json(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"holds a value that is no text, number, truth value, list or table: {error}") from None


def from_json(text: bytes | str) -> Recipe:
    """A recipe from JSON. RecipeError names every field at fault."""
    return checked(Recipe, text)


S = TypeVar("S", bound=Section)


def checked(kind: type[S], text: bytes | str) -> S:
    """A table of this kind from JSON. RecipeError names every field at fault."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        document = None if errors[0]["type"] == "json_invalid" else json.loads(text)
        raise RecipeError("; ".join(mistakes(errors, kind, document, SYNONYMS))) from None
