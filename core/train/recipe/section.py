"""Tables of a training's recipe that select an object by `kind`, made from dataclasses such as those of losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, ClassVar, Literal, Union, get_type_hints

from pydantic import Field, create_model

from lathe.core.section import Section


class Part(Section):
    """A table with a `kind`, which selects the class `target`. The other fields are arguments of that class."""

    target: ClassVar[type[Any]]

    def make(self, **others: Any) -> Any:
        """An object of `target` with the fields of the table and the arguments `others`."""
        arguments = {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}
        return self.target(**arguments, **others)


def make_part(
    kind: str, target: type[Any], meaning: str, settings: Mapping[str, Any], leave: tuple[str, ...] = ()
) -> type[Part]:
    """A subclass of `Part`: the table whose `kind` makes objects of the dataclass `target`.

    `meaning` describes the table. `settings` has the pydantic field of each field of `target` by name. Fields of
    `target` in `leave` are not in the table.
    """
    hints = get_type_hints(target)
    definitions: dict[str, Any] = {"kind": (Literal[kind], Field(description=meaning))}
    for field in fields(target):
        if field.name not in leave:
            default = ... if field.default is MISSING else field.default
            definitions[field.name] = (Annotated[hints[field.name], settings[field.name]], default)
    table = create_model(target.__name__, __base__=Part, __doc__=target.__doc__, **definitions)
    table.target = target
    return table


def tagged_union(*parts: type[Part]) -> Any:
    """The union of these tables, discriminated by `kind`."""
    return Annotated[Union[parts], Field(discriminator="kind")]  # noqa: UP007 (the parts are known at run time only)
