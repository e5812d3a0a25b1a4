"""`Recipe`: the configuration of a training, read from TOML or JSON files and from requests.

The same recipe, data and number of threads give bit-identical weights on machines of the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from lathe.core.errors import LatheError
from lathe.core.section import Section
from lathe.core.toml_text import NotToml, parse_toml
from lathe.core.train.data import Preprocess, Transform
from lathe.core.train.data.formats import Format
from lathe.core.train.recipe.choices import Loss, Optimizer, ScheduleChoice
from lathe.core.train.recipe.training_compression import Distil, Prune, Quantize
from lathe.core.train.zoo import Architecture
from lathe.core.validation_errors import error_messages, short_repr

MAX_BYTES = 1 << 20  # most bytes of a recipe file

# The names that PyTorch, Keras and others use for a key of a recipe: error messages suggest the right key.
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
    "distill": "distil",
    "distillation": "distil",
    "pruning": "prune",
    "quantization": "quantize",
}

Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # JSON and TOML have lists

Pixels = Annotated[int, Field(ge=1, le=8192)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]


class RecipeError(LatheError):
    """An invalid recipe, or an invalid argument of `fit`.

    The message names each invalid field or the argument, what was expected and what was given.
    """


class Data(Section):
    """The input and target columns, and the split of rows into training, validation and test."""

    format: Format | None = Field(
        default=None,
        description="`npz`, `idx`, `csv`, `parquet`, `images`, `text` or `jsonl`; by default detected from the files.",
    )
    inputs: dict[str, str | Names] | None = Field(
        default=None,
        description="Column of each input, or columns to concatenate; by default all columns but the target.",
    )
    shapes: dict[str, Sizes] = Field(
        default={},
        description="Table from the name of an input to the shape of its rows, for inputs whose shape differs from the "
        "data: `{x = [28, 28]}` for rows of 784 numbers. For an input of sequences, `{x = [100]}` is the length to "
        "which they are padded or cut.",
    )
    image_size: Annotated[tuple[Pixels, Pixels], Field(strict=False)] | None = Field(
        default=None,
        description="Height and width to which image files are resized; by default all images must have the same size.",
    )
    layouts: dict[str, Literal["HW", "CHW", "HWC"]] = Field(
        default={},
        description="Table from the name of an input to the image layout of its rows, `HW`, `CHW` or `HWC`, if the "
        "default does not fit. By default image files are `HWC`, and rows with two axes `HW`. Rows with three axes are "
        "`CHW` if the first axis has length 1, 3 or 4; otherwise `HWC` if the last axis has such a length. All other "
        "rows are no images.",
    )
    target: str | None = Field(
        default=None,
        description="Column to predict; by default `y`, `target`, `label` or `labels`, otherwise the last column.",
    )
    task: Literal["auto", "classes", "numbers"] = Field(
        default="auto",
        description="`classes` (classification), `numbers` (regression) or `auto`, which takes text, booleans and "
        "integers as classes, and floating-point numbers as numbers.",
    )
    held_out: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="Share of the rows for the final test. Ignored if the data have a test part.",
    )
    validation: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the rows for validation after each epoch. If the data have a validation part, the share "
        "is ignored, but `stop` needs a share above 0 even then.",
    )
    stratified: bool = Field(
        default=True,
        description="In a classification: whether the classes have about the same shares in each part of the split.",
    )
    seed: Seed = Field(
        default=0,
        description="Seed of the split. It does not depend on the recipe's `seed`, so trainings with different seeds "
        "are compared on the same rows.",
    )


class OnnxModel(Section):
    """A model from an ONNX file, whose floating-point weights are trained further."""

    onnx: str = Field(
        min_length=1, description="Train this file further; its path is relative to the recipe. Not in jobs."
    )
    trainable: Names = Field(default=("*",), description="Name patterns of the weights to train (`*`, `?`).")


class ParentModel(Section):
    """The published version that the job fine-tunes."""

    parent: Literal[True] = Field(
        description="Fine-tune the job's version (`model`), or the file of `lathe train --parent`."
    )
    trainable: Names = Field(default=("*",), description="Name patterns of the weights to train (`*`, `?`).")
    head: Literal["keep", "replace"] = Field(
        default="keep",
        description="Last layer of the model: `keep` trains the model's own further; `replace` starts with a new "
        "layer, for other classes or targets.",
    )


class PretrainedModel(Section):
    """A language model from a Hugging Face folder or a GGUF file, whose weights are trained further."""

    pretrained: str = Field(
        min_length=1,
        description="Train this language model further, a Hugging Face folder or a GGUF file; its path is relative to "
        "the recipe. Not in jobs.",
    )
    trainable: Names = Field(default=("*",), description="Name patterns of the weights to train (`*`, `?`).")


def _model_kind(model: object) -> str | None:
    """The key that tells which kind of model the table is; None without one. The discriminator of `Model`."""
    keys = model if isinstance(model, Mapping) else getattr(model, "__dict__", ())
    return next((key for key in ("architecture", "onnx", "pretrained", "parent") if key in keys), None)


Model: TypeAlias = Annotated[
    Annotated[Architecture, Tag("architecture")]
    | Annotated[OnnxModel, Tag("onnx")]
    | Annotated[PretrainedModel, Tag("pretrained")]
    | Annotated[ParentModel, Tag("parent")],
    Discriminator(
        _model_kind,
        custom_error_type="model",
        custom_error_message="expected one of the keys `architecture`, `onnx`, `pretrained` and `parent`",
    ),
]


class Text(Section):
    """How the documents of a language model become rows of tokens."""

    length: int = Field(default=256, ge=2, le=1 << 17, description="Tokens of a row.")
    tokenizer: Literal["bpe", "characters"] | None = Field(
        default=None,
        description="Tokenizer of a new model, trained on the training documents: `bpe` (byte-level BPE, the default) "
        "or `characters`, a token for each. A model to fine-tune has its own.",
    )
    vocabulary: int = Field(default=4096, ge=257, le=1 << 20, description="Most tokens of a tokenizer of kind `bpe`.")


class Lora(Section):
    """Low-rank adapters (LoRA) of a language model: they alone are trained, and merged into the result."""

    rank: int = Field(default=8, ge=1, le=4096, description="Rank of the adapters.")
    alpha: float | None = Field(
        default=None, gt=0, description="Adapters are multiplied by alpha / rank; by default twice the rank."
    )
    layers: Names = Field(
        default=("q_proj", "v_proj"),
        description="Name patterns of the linear layers that get adapters (`*`, `?`): whole paths or last names, among "
        "`q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`.",
    )


class Clip(Section):
    """Gradient clipping."""

    norm: float | None = Field(default=None, gt=0, description="Bound of the L2 norm of all gradients together.")
    value: float | None = Field(
        default=None, gt=0, description="Bound of the absolute value of each number in a gradient, after `norm`."
    )


class Stop(Section):
    """Early stopping."""

    patience: int = Field(
        ge=1, description="Training ends after this many epochs in a row in which the metric `judge` does not improve."
    )
    least_change: float = Field(
        default=0.0,
        ge=0,
        description="An epoch is an improvement only if it beats the best one so far by more than this.",
    )


class Checkpoints(Section):
    """How often checkpoints are written. One is always written when training ends or a job is stopped."""

    seconds: float | None = Field(
        default=60.0, gt=0, description="Longest time between two checkpoints, approximately."
    )
    steps: int | None = Field(
        default=None, ge=1, description="Most batches between two checkpoints; `seconds` applies, too."
    )


class Recipe(Section):
    """The configuration of a training: data, model, loss, optimizer and how long to train."""

    data: Data = Field(default=Data(), description="Columns and split of the data.")
    model: Model = Field(
        description="The model to train: an architecture and its settings, an ONNX file, a language model, or "
        "the job's version."
    )
    preprocess: tuple[Preprocess, ...] = Field(
        default=(),
        strict=False,
        description="Preprocessing steps. They become part of the model, so the served model takes raw values.",
    )
    augment: tuple[Transform, ...] = Field(
        default=(), strict=False, description="Data augmentation: random changes of images, in training only."
    )
    text: Text = Field(default=Text(), description="Language models: how documents become rows of tokens.")
    lora: Lora | None = Field(
        default=None, description="Language models: train low-rank adapters (LoRA) instead of the weights."
    )
    loss: Loss | None = Field(
        default=None, description="Loss function; by default `cross_entropy` for classes, `mse` for numbers."
    )
    optimizer: Optimizer = Field(description="Optimizer and its settings.")
    schedule: ScheduleChoice | None = Field(
        default=None, description="Learning-rate schedule; by default the rate is constant."
    )
    epochs: int = Field(ge=1, le=1_000_000, description="Passes over the training rows.")
    batch: int = Field(default=64, ge=1, le=1 << 20, description="Rows per step.")
    accumulate: int = Field(
        default=1,
        ge=1,
        description="Gradient accumulation: batches per update, which uses the mean of their gradients.",
    )
    clip: Clip | None = Field(default=None, description="Gradient clipping.")
    average: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Decay of exponential running averages of the weights, such as 0.999. The averages are validated, "
        "and become the result. By default there are no averages.",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Mixed precision: `float32`, `bfloat16` or `float16`. In training, matrix products of at least 32 "
        "rows and an even depth round their factors to this type. Weights, sums and convolutions stay float32. "
        "`float16` uses loss scaling and skips updates whose gradients overflow.",
    )
    memory: int | None = Field(
        default=None,
        ge=1,
        description="Most bytes of intermediate values in a step, on the CPU only. Activations that do not fit are "
        "recomputed. If no plan stays within the bound, the training ends with an error.",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|(cuda|simulated|interpreted)(:\d{1,4})?)$",
        description="Device of the training: `cuda` is the first GPU, `cuda:1` the second. The final test runs on the "
        "CPU.",
    )
    prune: Prune | None = Field(default=None, description="Pruning during the training.")
    quantize: Quantize | None = Field(default=None, description="Quantization-aware training.")
    distil: Distil | None = Field(default=None, description="Distillation from a teacher.")
    keep: Literal["best", "last"] = Field(
        default="best",
        description="`best` or `last`: the epoch whose weights become the result. Without validation rows it is the "
        "last one.",
    )
    judge: Literal["accuracy", "loss"] | None = Field(
        default=None,
        description="`accuracy` or `loss`: the validation metric that decides the best epoch. By default `accuracy` "
        "for classes, otherwise `loss`.",
    )
    stop: Stop | None = Field(default=None, description="Early stopping.")
    checkpoint: Checkpoints = Field(default=Checkpoints(), description="How often checkpoints are written.")
    seed: Seed = Field(default=0, description="Seed of new weights, order of rows, augmentation and dropout.")

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.stop is not None and not self.data.validation:
            raise ValueError("`stop` needs validation rows: set `data.validation`")
        if self.memory is not None and self.device != "cpu":
            raise ValueError(f"`memory` bounds steps on the CPU only, got `device` {self.device}")
        if self.prune is not None and self.quantize is not None:
            raise ValueError("expected either `prune` or `quantize`: prune first, then quantize the result")
        if self.prune is not None and (self.stop is not None or (self.data.validation and self.keep == "best")):
            raise ValueError("`prune` needs `keep` = `last` and no `stop`: earlier epochs have fewer zeros")
        return self


def read(path: Path) -> Recipe:
    """A recipe from a file: JSON if its name ends in `.json`, otherwise TOML.

    RecipeError names the file and every invalid field. OSError if the file cannot be read.
    """
    data = _content(path)
    try:
        return from_json(data) if path.suffix == ".json" else from_toml(data)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def read_tables(path: Path) -> dict[str, Any]:
    """The unvalidated tables of a file as for `read`, which may be only a part of a recipe.

    RecipeError, which names the file, if it is too large or neither JSON nor TOML. OSError if it cannot be read.
    """
    data = _content(path)
    try:
        return _json(data) if path.suffix == ".json" else _toml(data)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{path}: {len(data)} bytes, expected {MAX_BYTES} at most")
    try:
        data.decode()
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: expected a recipe, text in TOML or JSON; this file is binary") from None
    return data


def _json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecipeError(f"expected an object, got {short_repr(value)}")
    return value


def from_toml(text: bytes) -> Recipe:
    return from_values(_toml(text))


def _toml(text: bytes) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except NotToml as error:
        raise RecipeError(f"invalid TOML: {error}") from None


def from_values(values: Mapping[str, Any]) -> Recipe:
    """A recipe from nested mappings, lists, strings and numbers, as `tomllib` returns them. RecipeError if invalid."""
    try:
        return from_json(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"a value is not text, number, boolean, list or table: {error}") from None


def from_json(text: bytes | str) -> Recipe:
    """A recipe from JSON. RecipeError for text that is no JSON; otherwise it names every invalid field."""
    return parse_section(Recipe, text)


S = TypeVar("S", bound=Section)


def parse_section(kind: type[S], text: bytes | str) -> S:
    """A section of type `kind` from JSON. RecipeError names every invalid field."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        document = None if errors[0]["type"] == "json_invalid" else json.loads(text)
        raise RecipeError("; ".join(error_messages(errors, kind, document, SYNONYMS))) from None
