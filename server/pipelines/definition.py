"""`pipeline.toml`: the file that a pipeline's version has instead of `model.onnx`.

    inputs = ["image"]
    outputs = ["label"]

    [[step]]
    name = "decode"
    builtin = "decode_image"
    options = {color = "L", resize = [8, 8]}
    inputs = {image = "image"}
    outputs = {pixels = "pixels"}

    [[step]]
    name = "classify"
    model = "digits"
    version = 2
    inputs = {image = "pixels"}
    outputs = {probabilities = "label"}

`inputs` and `outputs` of a step map the step's own names to the pipeline's tensors. A step with `version` always runs
that version; a step without it follows an alias, by default `live`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from lathe.core.files import open_plain
from lathe.core.toml_text import NotToml, parse_toml
from lathe.core.validation_errors import error_messages
from lathe.server.archive import PIPELINE
from lathe.server.datatypes import NUMPY_OF
from lathe.server.types import ModelRef, TensorSpec

PIPELINE_FILE = PIPELINE
MAX_DEFINITION_BYTES = 1 << 18  # bytes
MAX_STEPS = 64
DEFAULT_FILES: Mapping[str, str] = {  # by built-in step
    "tokenize": "tokenizer.json",
    "tokenize_pair": "tokenizer.json",
    "label": "labels.txt",
}
_LIVE = "live"

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}$")]
Label = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
]  # a label of metrics, so without quotes


class BadPipeline(ValueError):
    """The file is not a valid pipeline; the message names the field or step."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputDef(_Table):
    """One input of the pipeline. Datatype and shape may be omitted if a step that takes the input determines them."""

    name: Name
    datatype: str | None = None
    shape: tuple[Annotated[int, Field(ge=-1)], ...] | None = Field(default=None, strict=False)

    @property
    def spec(self) -> TensorSpec | None:
        """The declared type, None if the steps determine it."""
        if self.datatype is None or self.shape is None:
            return None
        return TensorSpec(self.name, self.datatype, self.shape)

    @model_validator(mode="after")
    def _check_type(self) -> InputDef:
        if (self.datatype is None) != (self.shape is None):
            raise ValueError("expected datatype and shape together, or neither")
        if self.datatype is not None and self.datatype not in NUMPY_OF:
            raise ValueError(f"datatype: expected one of {', '.join(NUMPY_OF)}, got {self.datatype!r}")
        return self


def _name_to_table(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class StepDef(_Table):
    """One step: a model of the repository, or a built-in step."""

    name: Label
    model: str | None = None
    version: Annotated[int, Field(ge=1)] | None = None
    alias: str | None = None
    builtin: str | None = None
    options: Mapping[str, Any] = Field(default_factory=dict)
    inputs: Mapping[str, Name] = Field(min_length=1)  # the step's name -> the pipeline's tensor
    outputs: Mapping[str, Name] = Field(min_length=1)

    @property
    def file(self) -> str | None:
        """The name of the version's file that this step reads: the option `file` or its default; None for no file."""
        named = self.options.get("file", DEFAULT_FILES.get(self.builtin or ""))
        return named if isinstance(named, str) else None

    @property
    def selector(self) -> str:
        """The version number of the step's model as text or, if the step names none, the alias; by default `live`."""
        return str(self.version) if self.version is not None else self.alias or _LIVE

    @property
    def pin(self) -> ModelRef | None:
        """The version that this step names by number, None otherwise."""
        return ModelRef(self.model, self.version) if self.model is not None and self.version is not None else None

    @model_validator(mode="after")
    def _check_kind(self) -> StepDef:
        if (self.model is None) == (self.builtin is None):
            raise ValueError("expected either model or builtin")
        if self.builtin is not None and (self.version is not None or self.alias is not None):
            raise ValueError("version and alias are for a model")
        if self.model is not None and self.options:
            raise ValueError("options are for a builtin")
        if self.version is not None and self.alias is not None:
            raise ValueError("expected version or alias, not both")
        return self


class Definition(_Table):
    """The content of `pipeline.toml`, with names checked; `type_check` checks the types."""

    inputs: tuple[Annotated[InputDef, BeforeValidator(_name_to_table)], ...] = Field(min_length=1, strict=False)
    outputs: tuple[Name, ...] = Field(min_length=1, strict=False)
    step: tuple[StepDef, ...] = Field(min_length=1, max_length=MAX_STEPS, strict=False)

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that its steps use."""
        return frozenset(step.model for step in self.step if step.model is not None)

    @property
    def pins(self) -> frozenset[ModelRef]:
        """The versions that its steps name by number."""
        return frozenset(step.pin for step in self.step if step.pin is not None)

    @property
    def files(self) -> frozenset[str]:
        """The names of the files that its steps read from the version's folder."""
        return frozenset(step.file for step in self.step if step.file is not None)

    @model_validator(mode="after")
    def _check_names(self) -> Definition:
        inputs = [given.name for given in self.inputs]
        made = inputs + [tensor for step in self.step for tensor in step.outputs.values()]
        used = {*self.outputs, *(tensor for step in self.step for tensor in step.inputs.values())}
        _raise_first(_duplicates(step.name for step in self.step), "step {} is defined twice")
        _raise_first(_duplicates(made), "tensor {} is made more than once")
        _raise_first(_duplicates(self.outputs), "output {} is listed twice")
        _raise_first(sorted(used - set(made)), "tensor {} is used, but neither an input nor any step's output")
        _raise_first([name for name in inputs if name not in used], "input {} is used by no step")
        _raise_first(
            [step.name for step in self.step if not used & set(step.outputs.values())],
            "step {}: nothing uses its outputs",
        )
        return self


def _duplicates(names: Any) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _raise_first(found: list[str], message: str) -> None:
    if found:
        raise ValueError(message.format(repr(found[0])))


def parse_definition(content: bytes) -> Definition:
    """Parse the content of `pipeline.toml`; raises BadPipeline."""
    if len(content) > MAX_DEFINITION_BYTES:
        raise BadPipeline(f"{PIPELINE_FILE}: expected at most {MAX_DEFINITION_BYTES} bytes, got more")
    document: dict[str, Any] = {}
    try:
        document = parse_toml(content)
        return Definition(**document)
    except NotToml as error:
        raise BadPipeline(f"{PIPELINE_FILE}: not TOML: {error}") from error
    except ValidationError as error:
        found = error_messages(error.errors(include_url=False), Definition, document)
        raise BadPipeline(f"{PIPELINE_FILE}: {'; '.join(found)}") from error


def read_definition(folder: Path) -> Definition:
    """Read the `pipeline.toml` of a version; raises BadPipeline, OSError."""
    with open_plain(folder / PIPELINE_FILE) as file:
        return parse_definition(file.read(MAX_DEFINITION_BYTES + 1))
