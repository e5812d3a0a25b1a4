"""Messages for documents that pydantic refused: the key as the user wrote it, what was expected, what was given."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel

Kinds: TypeAlias = list[type[BaseModel]]
Place: TypeAlias = list[tuple[str | int, bool]]  # parts of a path; True: pydantic's tag, not in the document

_MOST_BITS = 4096  # of integers that are shown: Python refuses to format those of more than 4300 digits


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return the number, or its size if it is very large (hexadecimal numbers of TOML have no bound)."""
        return super().repr_int(x, level) if x.bit_length() <= _MOST_BITS else f"a number of {x.bit_length()} bits"


_REPR = _Repr()
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxstring, _REPR.maxother = 4, 8, 8, 80, 80
_MOST_LISTED_KEYS = 12  # a message lists all keys of a table if there are at most this many, and none is similar
_NOTHING: Mapping[str, str] = {}
# How pydantic names the types of a union that are no tables, such as `str` and `list[int]`.
_PLAIN_TYPE = re.compile(r"(constrained-)?(str|int|float|bool|none|bytes)$|(list|dict|tuple|set|literal)\[|function-")
_EXPECTATIONS = {  # pydantic's types of errors -> what was expected; other types keep pydantic's text
    "missing": "is missing",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected at most {le}",
    "less_than": "expected less than {lt}",
    "finite_number": "expected a finite number",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
    "string_type": "expected a text",
    "string_pattern_mismatch": "expected text that matches {pattern}",
    "string_too_short": "expected at least {min_length} characters",
    "string_too_long": "expected at most {max_length} characters",
    **dict.fromkeys(("literal_error", "enum"), "expected {expected}"),
    **dict.fromkeys(("list_type", "tuple_type"), "expected a list"),
    "too_short": "expected at least {min_length} elements",
    "too_long": "expected at most {max_length} elements",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "expected a table (in JSON: an object)"),
    "json_invalid": "expected JSON: {error}",
    "timezone_aware": "expected a time with its zone",
}


def error_messages(
    errors: Iterable[Mapping[str, Any]],
    kind: type[BaseModel] | None,
    document: object,
    synonyms: Mapping[str, str] = _NOTHING,
) -> list[str]:
    """Return one sentence for each of pydantic's errors.

    `kind` is the class that the document was validated against; with None, no keys are suggested. `synonyms` maps keys
    of other tools, in lower case and with underscores, to the keys that mean the same here.
    """
    return [_Mistake(error, kind, document, synonyms).text() for error in errors]


class _Mistake:
    """One error of pydantic, and the place in the document that it is about."""

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
        """Return the sentence about the error."""
        name = str(self.error["type"])
        if name == "extra_forbidden":
            return f"{self._path()}: there is no such key{self._nearest_key()}"
        if name in ("union_tag_invalid", "union_tag_not_found"):
            return self._union_text()
        message = expectation(self.error)
        omits_input = name in {"missing", "json_invalid"} or (
            name == "value_error" and isinstance(self.error["input"], Mapping)
        )
        given = "" if omits_input else f", got {short_repr(self.error['input'])}"
        return f"{path}: {message}{given}" if (path := self._path()) else f"{message}{given}"

    def _path(self, *more: str) -> str:
        return ".".join([str(part) for part, is_tag in self.place if not is_tag] + list(more))

    def _nearest_key(self) -> str:
        wrong = str(self.place[-1][0])
        known = list(dict.fromkeys(name for kind in self.kinds for name in kind.model_fields))
        meant = self.synonyms.get(wrong.lower().replace("-", "_"))
        near = [meant] if meant in known else difflib.get_close_matches(wrong, known, n=1)
        if near:
            return f", did you mean `{near[0]}`?"
        return f", the keys are {', '.join(known)}" if 0 < len(known) <= _MOST_LISTED_KEYS else ""

    def _union_text(self) -> str:
        """The sentence for a tagged union whose tag is missing or unknown."""
        context = self.error["ctx"]
        key = str(context["discriminator"]).strip("'")
        above = [] if self.last is not None and self.last[0] == key else [key]
        if self.error["type"] == "union_tag_invalid":
            known, given = str(context["expected_tags"]), str(context["tag"])
            near = difflib.get_close_matches(given, [tag.strip("'") for tag in known.split(", ")], n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            return f"{self._path(*above)}: expected one of {known}, got {short_repr(given)}{hint}"
        inside = _kinds(self.kinds, self.place[-1:])
        known = ", ".join(repr(tag) for kind in inside for tag in _tags(kind, key))
        return f"{self._path(*above)}: is missing, expected one of {known}"


def expectation(error: Mapping[str, Any]) -> str:
    """Return what was expected where pydantic reports an error: `expected at least 1`."""
    text = _EXPECTATIONS.get(error["type"])
    if text is None:
        return str(error["msg"]).removeprefix("Value error, ")
    bounds = error.get("ctx", {}).items()
    return text.format(**{key: f"{bound:g}" if isinstance(bound, float) else bound for key, bound in bounds})


def short_repr(value: Any, most: int = 80) -> str:
    """Return the `repr` of a value, cut to `most` characters. A large value is not formatted as a whole."""
    text = repr(value[: most + 1]) if isinstance(value, str | bytes) else _REPR.repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _place(document: object, location: Sequence[str | int]) -> Place | None:
    """Return the path with each part marked as a key or a tag; None if it leads to no place in the document."""
    if not location:
        return []
    part, rest = location[0], location[1:]
    if _has(document, part):
        inner = document[part]  # type: ignore[index]
        found = _place(inner, rest)
        if found is None and len(rest) == 1 and _PLAIN_TYPE.match(str(rest[0])):
            found = [(rest[0], True)]  # one of the types that the value may have
        if found is not None:
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
    """Return the classes that the table at `place` may be validated against, from those of the whole document."""
    for part, is_tag in place:
        if is_tag:
            kinds = [kind for kind in kinds if part in kind.model_fields or part in _tags(kind)] or kinds
        elif isinstance(part, str):
            fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
            if fields:  # otherwise the part is a key of a map, and the classes are those of the map's values
                kinds = [found for field in fields for found in model_classes(field.annotation)]
    return kinds


def model_classes(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models in the annotation of a field, also inside unions, lists and maps."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from model_classes(argument)


def _tags(kind: type[BaseModel], key: str | None = None) -> list[object]:
    """Return the literal values of a class's fields (of field `key`, if given), which choose it in a tagged union."""
    fields = [field for name, field in kind.model_fields.items() if key in (None, name)]
    return [
        value for field in fields if get_origin(field.annotation) is Literal for value in get_args(field.annotation)
    ]
