"""Request schemas of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import Field, GetJsonSchemaHandler, field_validator
from pydantic.json_schema import JsonSchemaValue

from lathe.server.api.management.schemas import RequestBody
from lathe.server.jobs.gate import Gate
from lathe.server.jobs.job import PublishRequest
from lathe.server.jobs.kinds import KINDS, Kind
from lathe.server.jobs.service import JobRequest
from lathe.server.repository.names import LIVE_ALIAS

MAX_PRIORITY = 10  # priorities are from -10 to 10
DEFAULT_KIND = "train"


EXAMPLES: Sequence[Mapping[str, Any]] = (
    {
        "kind": "train",
        "dataset": "handwriting",
        "recipe": {"model": {"architecture": "lenet5"}, "optimizer": {"kind": "adamw", "rate": 0.01}, "epochs": 30},
        "publish": {"model": "handwriting", "promote": True, "gate": {"min": {"accuracy": 0.97}}},
    },
    {
        "kind": "compress",
        "dataset": "handwriting",
        "model": {"name": "digits", "version": "live"},
        "recipe": {"method": {"kind": "static", "calibration": "percentile"}},
        "publish": {
            "model": "digits",
            "promote": True,
            "gate": {"max": {"accuracy_drop": 0.003, "size_ratio": 0.5, "latency_ratio": 1.0}},
        },
    },
)


class ModelAsked(RequestBody):
    """A published version."""

    name: str = Field(description="The model's name.", max_length=128)
    version: int | Annotated[str, Field(max_length=64)] = Field(
        default=LIVE_ALIAS, description="A number or an alias, resolved when the job is submitted."
    )


class PublishAsked(RequestBody):
    """How the result of a job is published."""

    model: str = Field(description="The model that gets a new version.", max_length=128)
    promote: bool = Field(default=False, strict=True, description="Make it live if the gate allows it.")
    alias: str | None = Field(
        default=None, max_length=64, description="The alias to move if the gate allows it; `live` for `promote`."
    )
    allow_signature_change: bool = Field(
        default=False, strict=True, description="Allow inputs or outputs that differ from the live version."
    )
    gate: Gate | None = Field(default=None, description="The conditions that the result must meet to get the alias.")

    def to_order(self) -> PublishRequest:
        """The `PublishRequest` that the job stores; its alias is `alias`, otherwise the live one with `promote`."""
        alias = self.alias or (LIVE_ALIAS if self.promote else None)
        gate = self.gate.model_dump(mode="json") if self.gate else None
        return PublishRequest(self.model, alias, self.allow_signature_change, gate)


class LimitsAsked(RequestBody):
    """The resource limits of a job; the server's own limits apply as well."""

    seconds: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Wall-clock running time in seconds."
    )
    memory: int | None = Field(default=None, ge=1 << 26, lt=1 << 50, strict=True, description="Bytes of memory.")


class JobAsked(RequestBody):
    """A job: a dataset, a recipe, and how to publish the result. It never contains code."""

    kind: str = Field(default=DEFAULT_KIND, description="train, finetune, evaluate, sweep or compress.", max_length=40)
    recipe: dict[str, Any] = Field(description="The recipe; its schema depends on the kind.")
    dataset: str = Field(description="Name or sha256 of an uploaded dataset.", max_length=128)
    model: ModelAsked | None = Field(
        default=None, description="The version to start from, to evaluate or to compress, or the teacher."
    )
    publish: PublishAsked | None = Field(default=None, description="Without it, the result stays with the job.")
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        strict=True,
        description="Jobs of higher priority start first; above 0 only for administrators.",
    )
    limits: LimitsAsked = Field(default=LimitsAsked(), description="The resource limits of the job.")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of the class with examples, and with the recipe's schema for each kind as `oneOf`.

        It only describes: the runner of a kind validates its recipes.
        """
        described = handler(schema)
        resolved = handler.resolve_ref_schema(described)
        resolved["oneOf"] = [_kind_schema(*row, handler) for row in KINDS.items()]
        resolved["examples"] = list(EXAMPLES)
        return described

    @field_validator("recipe")
    @classmethod
    def _check_serializable(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        """Refuse recipes that JSON cannot store: integers beyond 64 bits, NaN, infinities and invalid Unicode."""
        try:
            kept = orjson.loads(orjson.dumps(recipe))
        except (TypeError, orjson.JSONEncodeError) as error:
            raise ValueError(str(error)) from error
        if kept != recipe:
            raise ValueError("expected finite numbers")
        return recipe

    def to_request(self) -> JobRequest:
        """The request for the job service."""
        return JobRequest(
            kind=self.kind,
            recipe=self.recipe,
            dataset=self.dataset,
            model=self.model.name if self.model else None,
            version=str(self.model.version) if self.model else LIVE_ALIAS,
            publish=self.publish.to_order() if self.publish else None,
            priority=self.priority,
            seconds=self.limits.seconds,
            memory=self.limits.memory,
        )


def _kind_schema(name: str, kind: Kind, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    """The schema of the fields that depend on the kind of a job: `kind`, `recipe`, and whether `model` is required.

    `kind` is required unless `name` is the default kind.
    """
    form = handler(kind.form().__pydantic_core_schema__)
    required = (["kind"] if name != DEFAULT_KIND else []) + (["model"] if kind.needs_model else [])
    described = {"title": name, "properties": {"kind": {"const": name}, "recipe": form}}
    return described | ({"required": required} if required else {})
