"""What is wrong with a document that pydantic refused: the key as it was written, what was expected, what came."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel

Kinds: TypeAlias = list[type[BaseModel]]
Place: TypeAlias = list[tuple[str | int, bool]]  # a part of a path; True: a tag of pydantic's, which no document has

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxstring, _REPR.maxother = 4, 8, 8, 80, 80
_MOST = 12  # keys that are listed where none is near
_NOTHING: Mapping[str, str] = {}


def mistakes(
    errors: Iterable[Mapping[str, Any]],
    kind: type[BaseModel] | None,
    document: object,
    synonyms: Mapping[str, str] = _NOTHING,
) -> list[str]:
    """Return one sentence for each of pydantic's errors.

    ``kind`` is what the document was read as; None where that is not known, and keys are not suggested. ``synonyms``:
    keys that other tools have, and this one's for them.
    """
    return [_Mistake(error, kind, document, synonyms).text() for error in errors]


class _Mistake:
    """One error."""

    def __init__(
        self,
        error: Mapping[str, Any],
        kind: type[BaseModel] | None,
        document: object,
        synonyms: Mapping[str, str],
    ) -> None:
        self.error = error
        self.synonyms = synonyms
        location: tuple[str | int, ...] = tuple(error["loc"])
        self.place = _place(document, location) or [(part, False) for part in location]
        self.kinds = _kinds([] if kind is None else [kind], self.place[:-1])
        self.last = self.place[-1] if self.place else None

    def text(self) -> str:
        """Return the sentence."""
        name = str(self.error["type"])
        if name == "extra_forbidden":
            return f"{self._path()}: there is no such key{self._nearest_key()}"
        if name in ("union_tag_invalid", "union_tag_not_found"):
            return self._of_union()
        message = str(self.error["msg"]).removeprefix("Value error, ")
        told = name in {"missing", "json_invalid"} or (
            name == "value_error" and isinstance(self.error["input"], Mapping)
        )
        came = "" if told else f", got {shortened(self.error['input'])}"
        return f"{path}: {message}{came}" if (path := self._path()) else f"{message}{came}"

    def _path(self, *more: str) -> str:
        return ".".join([str(part) for part, is_tag in self.place if not is_tag] + list(more))

    def _nearest_key(self) -> str:
        wrong = str(self.place[-1][0])
        known = list(dict.fromkeys(name for kind in self.kinds for name in kind.model_fields))
        meant = self.synonyms.get(wrong.lower().replace("-", "_"))
        near = [meant] if meant in known else difflib.get_close_matches(wrong, known, n=1)
        if near:
            return f", did you mean `{near[0]}`?"
        return f", the keys are {', '.join(known)}" if 0 < len(known) <= _MOST else ""

    def _of_union(self) -> str:
        """A table that says which of several it is by a key: with a value that is none, or not at all."""
        context = self.error["ctx"]
        key = str(context["discriminator"]).strip("'")
        above = [] if self.last is not None and self.last[0] == key else [key]
        if self.error["type"] == "union_tag_invalid":
            known, came = str(context["expected_tags"]), str(context["tag"])
            near = difflib.get_close_matches(came, [tag.strip("'") for tag in known.split(", ")], n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            return f"{self._path(*above)}: expected one of {known}, got {shortened(came)}{hint}"
        inside = _kinds(self.kinds, self.place[-1:])
        known = ", ".join(repr(tag) for kind in inside for tag in _tags(kind, key))
        return f"{self._path(*above)}: is missing, expected one of {known}"


def shortened(value: Any, most: int = 80) -> str:
    """Return a value as text that is no longer than a line, without looking at all of a large one."""
    text = repr(value[: most + 1]) if isinstance(value, str | bytes) else _REPR.repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _place(document: object, location: Sequence[str | int]) -> Place | None:
    """Return the path with each part known to be a key or a tag; None where it leads nowhere."""
    if not location:
        return []
    part, rest = location[0], location[1:]
    if _has(document, part) and (found := _place(document[part], rest)) is not None:  # type: ignore[index]
        return [(part, False), *found]
    if not rest:
        return [(part, False)] if isinstance(document, Mapping) else None  # a key that is missing
    found = _place(document, rest)
    return None if found is None else [(part, True), *found]


def _has(document: object, part: str | int) -> bool:
    if isinstance(document, Mapping):
        return part in document
    return isinstance(document, list | tuple) and isinstance(part, int) and 0 <= part < len(document)


def _kinds(kinds: Kinds, place: Place) -> Kinds:
    """Return the classes that the table at a place can be of."""
    for part, is_tag in place:
        if is_tag:
            kinds = [kind for kind in kinds if part in kind.model_fields or part in _tags(kind)] or kinds
        elif isinstance(part, str):
            fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
            if fields:  # else the part is a key of a map, whose values the classes are
                kinds = [found for field in fields for found in classes(field.annotation)]
    return kinds


def classes(annotation: object) -> Iterator[type[BaseModel]]:
    """Return the tables that a field of this type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from classes(argument)


def _tags(kind: type[BaseModel], key: str | None = None) -> list[object]:
    """Return the values by which a class is chosen among others."""
    fields = [field for name, field in kind.model_fields.items() if key in (None, name)]
    return [
        value for field in fields if get_origin(field.annotation) is Literal for value in get_args(field.annotation)
    ]
