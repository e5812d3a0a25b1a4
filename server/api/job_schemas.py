"""What the API of jobs takes, as OpenAPI describes it."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import Field, GetJsonSchemaHandler, field_validator
from pydantic.json_schema import JsonSchemaValue

from server.api.schemas import Asked
from server.jobs.gate import Gate
from server.jobs.job import Publish
from server.jobs.kinds import KINDS, Kind
from server.jobs.service import Request
from server.repository.names import LIVE

PRIORITIES = 10  # either side of 0
DEFAULT_KIND = "train"


class ModelAsked(Asked):
    """A published version."""

    name: str = Field(description="The model's name.", max_length=128)
    version: int | Annotated[str, Field(max_length=64)] = Field(
        default=LIVE, description="A number or an alias, resolved when the job comes."
    )


class PublishAsked(Asked):
    """What becomes of a result."""

    model: str = Field(description="The model that gets a new version.", max_length=128)
    promote: bool = Field(default=False, strict=True, description="Make it live, if the gate lets it.")
    alias: str | None = Field(
        default=None, max_length=64, description="The alias that it takes, if the gate lets it; `live` for `promote`."
    )
    allow_signature_change: bool = Field(default=False, strict=True, description="Even with other inputs or outputs.")
    gate: Gate | None = Field(default=None, description="What the result must be, to take the alias.")

    def to_order(self) -> Publish:
        """Return it as a job keeps it."""
        alias = self.alias or (LIVE if self.promote else None)
        gate = self.gate.model_dump(mode="json") if self.gate else None
        return Publish(self.model, alias, self.allow_signature_change, gate)


class LimitsAsked(Asked):
    """What a job may take; the server's own limits hold besides."""

    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Running time, by the clock.")
    memory: int | None = Field(default=None, ge=1 << 26, lt=1 << 50, strict=True, description="Bytes of memory.")


class JobAsked(Asked):
    """A job: data and a recipe, and what becomes of the result. Never code."""

    kind: str = Field(default=DEFAULT_KIND, description="train, finetune, evaluate or sweep.", max_length=40)
    recipe: dict[str, Any] = Field(description="What is trained and how; its schema depends on the kind.")
    dataset: str = Field(description="Name or sha256 of uploaded data.", max_length=128)
    model: ModelAsked | None = Field(default=None, description="The version that a job starts from or looks at.")
    publish: PublishAsked | None = Field(default=None, description="Without it the result stays with the job.")
    priority: int = Field(
        default=0,
        ge=-PRIORITIES,
        le=PRIORITIES,
        strict=True,
        description="The higher the sooner; above 0 for administrators.",
    )
    limits: LimitsAsked = Field(default=LimitsAsked(), description="What the job may take.")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Say what each kind's recipe looks like. What runs a kind checks its recipes; here they are only described."""
        described = handler(schema)
        handler.resolve_ref_schema(described)["oneOf"] = [_described(*row, handler) for row in KINDS.items()]
        return described

    @field_validator("recipe")
    @classmethod
    def _can_be_kept(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        """Integers beyond 64 bits, numbers that are none, and text that is no Unicode would not come back."""
        try:
            kept = orjson.loads(orjson.dumps(recipe))
        except (TypeError, orjson.JSONEncodeError) as error:
            raise ValueError(str(error)) from error
        if kept != recipe:
            raise ValueError("expected finite numbers")
        return recipe

    def to_request(self) -> Request:
        """Return it as the service takes it."""
        return Request(
            kind=self.kind,
            recipe=self.recipe,
            dataset=self.dataset,
            model=self.model.name if self.model else None,
            version=str(self.model.version) if self.model else LIVE,
            publish=self.publish.to_order() if self.publish else None,
            priority=self.priority,
            seconds=self.limits.seconds,
            memory=self.limits.memory,
        )


def _described(name: str, kind: Kind, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    """The fields of a job of one kind that differ from kind to kind. A job that names none is of the default kind."""
    form = handler(kind.form().__pydantic_core_schema__)
    required = (["kind"] if name != DEFAULT_KIND else []) + (["model"] if kind.needs_model else [])
    described = {"title": name, "properties": {"kind": {"const": name}, "recipe": form}}
    return described | ({"required": required} if required else {})
