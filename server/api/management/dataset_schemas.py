"""Response schemas of datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from lathe.server.api.management.schemas import ResponseBody

if TYPE_CHECKING:
    from lathe.server.datasets.records import NameEntry
    from lathe.server.datasets.store import Dataset


class DatasetState(ResponseBody):
    """The current content of a dataset."""

    name: str
    digest: str = Field(description="sha256 of the file, in hexadecimal; a job that names it gets exactly these bytes.")
    bytes: int
    rows: int
    format: str
    created: str = Field(description="When this content was uploaded under the name.")

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetState:
        return cls(**_facts(dataset))


class DatasetNaming(ResponseBody):
    """One content in the history of a name."""

    digest: str
    time: str
    actor: str = Field(description="The key that uploaded it; without keys, the address.")

    @classmethod
    def of(cls, naming: NameEntry) -> DatasetNaming:
        return cls(digest=naming.digest, time=naming.time, actor=naming.actor)


class DatasetDetail(DatasetState):
    """One dataset with its columns and its history."""

    columns: list[dict[str, Any]] = Field(description="Name, type and shape of each column.")
    classes: list[str] | None = Field(description="Names of the classes, if the file has them.")
    description: dict[str, Any] = Field(description="The full description of the file's content.")
    history: list[DatasetNaming] = Field(description="The contents of the name, oldest first; the last is current.")

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


class DatasetsRemoved(ResponseBody):
    """The name that was deleted, or lost a content, and the contents that were deleted with it."""

    name: str
    digests: list[str] = Field(description="The deleted contents, without those that another name refers to.")


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
