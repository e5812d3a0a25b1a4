"""What the API of datasets gives, as OpenAPI describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from server.api.schemas import Answer

if TYPE_CHECKING:
    from server.datasets.record import Naming
    from server.datasets.store import Dataset


class DatasetState(Answer):
    """One dataset, as it is now."""

    name: str
    digest: str = Field(description="sha256 of the file, in hexadecimal; a job that names it gets these very bytes.")
    bytes: int
    rows: int
    format: str
    created: str = Field(description="When the name was given to this content.")

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetState:
        return cls(**_facts(dataset))


class DatasetNaming(Answer):
    """One thing that a name stood for."""

    digest: str
    time: str
    actor: str = Field(description="The key that uploaded it; without keys the address.")

    @classmethod
    def of(cls, naming: Naming) -> DatasetNaming:
        return cls(digest=naming.digest, time=naming.time, actor=naming.actor)


class DatasetDetail(DatasetState):
    """One dataset with what is in it, and what its name stood for."""

    columns: list[dict[str, Any]] = Field(description="Name, type and shape of each column.")
    classes: list[str] | None = Field(description="Names of the classes, where the file says them.")
    description: dict[str, Any] = Field(description="All that was found when the file was looked at.")
    history: list[DatasetNaming] = Field(description="What the name stood for, oldest first; the last is now.")

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetDetail:
        found = dict(dataset.content.description)
        return cls(
            **_facts(dataset),
            columns=found.get("columns", []),
            classes=found.get("classes"),
            description=found,
            history=[DatasetNaming.of(naming) for naming in dataset.named.history],
        )


class DatasetsRemoved(Answer):
    """What a deletion removed."""

    name: str
    digests: list[str] = Field(description="Contents that are gone; one that another name stands for is not.")


def _facts(dataset: Dataset) -> dict[str, Any]:
    content, named = dataset.content, dataset.named
    return {
        "name": named.name,
        "digest": content.digest,
        "bytes": content.size,
        "rows": content.description.get("rows", 0),
        "format": content.description.get("format", ""),
        "created": named.history[-1].time,
    }
