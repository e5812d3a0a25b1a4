"""Request and response schemas of the management API.

The clients import them too, so the server's own modules are imported only for type checking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from lathe.server.repository import names
from lathe.server.repository.names import LIVE_ALIAS

if TYPE_CHECKING:
    from lathe.server.repository.catalog import ModelInfo, VersionInfo
    from lathe.server.repository.journal import Record
    from lathe.server.repository.store import Outcome


def integral(value: object) -> object:
    """The value, or a whole float (2.0) as an integer (2): JSON Schema accepts such a number as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# The order matters: bounds after a validator are checked, but do not appear in the OpenAPI description.
Version = Annotated[int, Field(ge=1, lt=10**9, strict=True), BeforeValidator(integral)]


class ResponseBody(BaseModel):
    """Base class of responses."""

    model_config = ConfigDict(frozen=True)


class RequestBody(BaseModel):
    """Base class of request bodies; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class AliasMove(RequestBody):
    """The version that an alias moves to."""

    version: Version
    allow_signature_change: bool = Field(default=False, strict=True, description="Allow changed inputs or outputs.")


class RollbackAsked(RequestBody):
    """The target of a rollback."""

    alias: str = Field(
        default=LIVE_ALIAS,
        description="The alias to roll back.",
        json_schema_extra={
            "pattern": f"^(?:{names.ALIAS_PATTERN.pattern})$"
        },  # `names` validates it, with its own errors
    )
    to: Version | None = Field(default=None, description="A version in the history; without it, the previous one.")


class Failure(ResponseBody):
    """The body of every error of the management API."""

    error: str = Field(description="What was expected and what was given.")
    code: str = Field(description="A stable code for the kind of error.")


FAILURE_SCHEMA = {"$ref": f"#/components/schemas/{Failure.__name__}"}


class Published(ResponseBody):
    """The version made from an upload."""

    model: str
    version: int
    state: str = Field(description="The version's state in this server.")
    digest: str = Field(description="sha256 in hexadecimal: of the model file, or of the list of files if several.")
    live: bool = Field(description="Whether it is the live version.")
    generation: int = Field(description="The number of this change of the model.")
    replayed: bool = Field(description="Whether an earlier request with the same Idempotency-Key made it.")

    @classmethod
    def of(cls, model: str, outcome: Outcome, info: VersionInfo | None) -> Published:
        record = outcome.record
        return cls(
            model=model,
            version=record.version,
            state=info.status.state.value if info else "deleted",
            digest=record.digest or "",
            live=record.state.version(LIVE_ALIAS) == record.version,
            generation=record.generation,
            replayed=outcome.replayed,
        )


class AliasState(ResponseBody):
    """The version of an alias, with its history."""

    alias: str
    version: int
    previous: int | None = Field(description="The version that a rollback would restore.")
    history: list[int] = Field(
        description="Earlier versions of the alias, oldest first; after a rollback, also the later ones."
    )
    generation: int
    changed: bool = Field(
        default=True, description="False if the alias named this version already: nothing was logged."
    )

    @classmethod
    def of(cls, alias: str, outcome: Outcome) -> AliasState:
        record = outcome.record
        named = record.state.get(alias)
        return cls(
            alias=alias,
            version=named.version,
            previous=named.previous,
            history=list(named.history),
            generation=record.generation,
            changed=outcome.changed,
        )


class CanarySummary(ResponseBody):
    """The candidate of a running canary."""

    version: int
    weight: float = Field(description="Its present share of the requests; 0 before the start.")


class ModelState(ResponseBody):
    """One model."""

    name: str
    ready: bool = Field(description="Whether the live version answers requests.")
    reason: str = Field(default="", description="Why it is not ready; empty if it is.")
    versions: list[int]
    aliases: dict[str, int] = Field(description="The version of each alias.")
    answering: dict[str, int] = Field(description="The version that answers for each alias in this server.")
    generation: int
    config_error: str = Field(description="Why config.toml could not be applied; empty if it was.")
    canary: CanarySummary | None = Field(default=None, description="The running canary; null if there is none.")

    @classmethod
    def of(cls, info: ModelInfo) -> ModelState:
        plan = info.aliases.canary
        return cls(
            name=info.name,
            ready=info.ready,
            reason=info.failure,
            versions=list(info.versions),
            aliases={name: alias.version for name, alias in info.aliases.aliases.items()},
            answering=dict(info.answering),
            generation=info.aliases.generation,
            config_error=info.config_error,
            canary=CanarySummary(version=plan.version, weight=plan.weight) if plan else None,
        )


class VersionState(ResponseBody):
    """One version."""

    version: int
    state: str
    reason: str = Field(description="Why it failed; empty if it did not.")
    aliases: list[str] = Field(description="The aliases of this version.")
    digest: str | None = Field(description="sha256 of the model file; null before a copied folder was adopted.")
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


class AuditEntry(ResponseBody):
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
    reason: str = Field(default="", description="Why a canary ended, or why a job's result got no alias.")
    aliases: dict[str, int] = Field(description="The version of each alias after the change.")
    chain_digest: str = Field(description="Hash of this entry and, through `previous`, of all entries before it.")
    previous: str | None = Field(description="`chain_digest` of the entry before; null for the first.")

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
