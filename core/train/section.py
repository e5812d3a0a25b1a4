"""Tables of a recipe. Many are written down by what they stand for: a loss or an optimizer, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, ClassVar, Literal, Union, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model


class Section(BaseModel):
    """Nothing unknown, nothing converted, nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Part(Section):
    """A table with a `kind` that says which class its other fields are arguments of."""

    target: ClassVar[type[Any]]

    def make(self, **others: Any) -> Any:
        """The object, with further arguments of which a recipe says nothing."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}
        return self.target(**given, **others)


def part(
    kind: str, target: type[Any], meaning: str, settings: Mapping[str, Any], leave: tuple[str, ...] = ()
) -> type[Part]:
    """The table of a dataclass: `settings` describes its fields, `leave` are those that recipes do not say."""
    hints = get_type_hints(target)
    found: dict[str, Any] = {"kind": (Literal[kind], Field(description=meaning))}
    for field in fields(target):
        if field.name not in leave:
            default = ... if field.default is MISSING else field.default
            found[field.name] = (Annotated[hints[field.name], settings[field.name]], default)
    made = create_model(target.__name__, __base__=Part, __doc__=target.__doc__, **found)
    made.target = target
    return made


def either(*parts: type[Part]) -> Any:
    """The type of a table that is one of these, as its `kind` says."""
    return Annotated[Union[parts], Field(discriminator="kind")]  # noqa: UP007 (made when it runs)
