"""What the management API takes and gives, as OpenAPI describes it. Pydantic stays in this file and its neighbours.

Clients import the answers: what only the server needs to make them is imported by nobody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from server.repository import names
from server.repository.names import LIVE

if TYPE_CHECKING:
    from server.repository.catalog import ModelInfo, VersionInfo
    from server.repository.journal import Record
    from server.repository.store import Outcome


def whole(value: object) -> object:
    """Return 2 for 2.0: JSON has numbers only, and its schemas count that as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# In this order: behind a validator, bounds would be checked, but not described.
Version = Annotated[int, Field(ge=1, lt=10**9, strict=True), BeforeValidator(whole)]


class Answer(BaseModel):
    """Base of what is answered."""

    model_config = ConfigDict(frozen=True)


class Asked(BaseModel):
    """Base of what is asked: nothing beyond the named fields."""

    model_config = ConfigDict(extra="forbid")


class AliasMove(Asked):
    """Where an alias shall go."""

    version: Version
    allow_signature_change: bool = Field(
        default=False, strict=True, description="Permit other inputs or outputs than now."
    )


class RollbackAsked(Asked):
    """How far to go back."""

    alias: str = Field(
        default=LIVE,
        description="The alias to take back.",
        json_schema_extra={"pattern": f"^(?:{names.ALIAS.pattern})$"},  # checked by `names`, in its own words
    )
    to: Version | None = Field(default=None, description="A version on the history; without it the one before.")


class Failure(Answer):
    """Every error."""

    error: str = Field(description="What was expected and what came.")
    code: str = Field(description="A stable word for the kind of error.")


FAILURE_SCHEMA = {"$ref": f"#/components/schemas/{Failure.__name__}"}


class Published(Answer):
    """An upload that became a version."""

    model: str
    version: int
    state: str = Field(description="The version's state in this server.")
    digest: str = Field(description="sha256 of the model file, in hexadecimal; of a list of the files if several.")
    live: bool = Field(description="Whether requests that name no version go to it.")
    generation: int = Field(description="The number of this change of the model.")
    replayed: bool = Field(description="Whether the same Idempotency-Key had made it before.")

    @classmethod
    def of(cls, model: str, outcome: Outcome, info: VersionInfo | None) -> Published:
        record = outcome.record
        return cls(
            model=model,
            version=record.version,
            state=info.status.state.value if info else "deleted",
            digest=record.digest or "",
            live=record.state.version(LIVE) == record.version,
            generation=record.generation,
            replayed=outcome.replayed,
        )


class AliasState(Answer):
    """Where an alias stands."""

    alias: str
    version: int
    previous: int | None = Field(description="What one rollback would name.")
    history: list[int] = Field(description="What it named before, oldest first, and after a rollback what lies ahead.")
    generation: int

    @classmethod
    def of(cls, alias: str, record: Record) -> AliasState:
        named = record.state.get(alias)
        return cls(
            alias=alias,
            version=named.version,
            previous=named.previous,
            history=list(named.history),
            generation=record.generation,
        )


class ModelState(Answer):
    """One model."""

    name: str
    ready: bool = Field(description="Whether a request that names no version is answered.")
    reason: str = Field(default="", description="Why it is not ready; empty where it is.")
    versions: list[int]
    aliases: dict[str, int] = Field(description="The version each alias names.")
    answering: dict[str, int] = Field(description="The version that answers for each alias in this server.")
    generation: int
    config_error: str = Field(description="Why config.toml is not followed; empty where it is.")

    @classmethod
    def of(cls, info: ModelInfo) -> ModelState:
        return cls(
            name=info.name,
            ready=info.ready,
            reason=info.failure,
            versions=list(info.versions),
            aliases={name: alias.version for name, alias in info.aliases.aliases.items()},
            answering=dict(info.answering),
            generation=info.aliases.generation,
            config_error=info.config_error,
        )


class VersionState(Answer):
    """One version."""

    version: int
    state: str
    reason: str = Field(description="Why it failed, where it did.")
    aliases: list[str] = Field(description="The aliases that name it.")
    digest: str | None = Field(description="sha256 of the model file; null before a copied folder was taken in.")
    created: str | None

    @classmethod
    def of(cls, info: VersionInfo) -> VersionState:
        return cls(**_facts(info))


class VersionDetail(VersionState):
    """One version with its manifest."""

    manifest: dict[str, Any] | None

    @classmethod
    def of(cls, info: VersionInfo) -> VersionDetail:
        return cls(**_facts(info), manifest=info.manifest.to_json() if info.manifest else None)


class AuditEntry(Answer):
    """One change of a model."""

    generation: int
    time: str
    action: str = Field(
        description="publish, adopt, alias, rollback, delete, canary, step, promoted, rolled_back, cancelled or void."
    )
    version: int
    alias: str | None
    digest: str | None
    actor: str
    reason: str = Field(default="", description="Why a trial ended, or why a job's result took no alias.")
    aliases: dict[str, int] = Field(description="What each alias named after the change.")
    chain_digest: str = Field(description="Names this entry and, through `previous`, all before it.")
    previous: str | None = Field(description="`chain_digest` of the entry before; none in the first.")

    @classmethod
    def of(cls, record: Record) -> AuditEntry:
        return cls(
            generation=record.generation,
            time=record.time,
            action=record.action,
            version=record.version,
            alias=record.alias,
            digest=record.digest,
            actor=record.actor,
            reason=record.reason,
            aliases={name: alias.version for name, alias in record.state.aliases.items()},
            chain_digest=record.chain_digest,
            previous=record.previous,
        )


def _facts(info: VersionInfo) -> dict[str, Any]:
    return {
        "version": info.version,
        "state": info.status.state.value,
        "reason": info.status.reason,
        "aliases": list(info.aliases),
        "digest": info.manifest.digest if info.manifest else None,
        "created": info.manifest.created if info.manifest else None,
    }
