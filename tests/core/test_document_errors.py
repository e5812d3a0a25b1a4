"""Errors of invalid documents: the path as written, the nearest key, no text of pydantic's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lathe.core.train.recipe.recipe import SYNONYMS, Recipe
from lathe.core.validation_errors import error_messages, model_classes, short_repr


class Table(BaseModel):
    """A table without unknown keys."""

    model_config = ConfigDict(extra="forbid")


class Cat(Table):
    """A table of one kind of animal."""

    kind: Literal["cat"]
    lives: int = 9


class Dog(Table):
    """A table of another kind of animal."""

    kind: Literal["dog"]
    tail: float = 0.3


class Zoo(Table):
    """Tables in a list, in a map, and alone."""

    animals: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []
    houses: dict[str, Cat] = {}
    keeper: Cat | None = None


class Form(BaseModel):
    """One field of each kind that settings, recipes and request bodies have."""

    whole: Annotated[int, Field(ge=1, le=9)] = 1
    part: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    flag: bool = False
    name: Annotated[str, Field(pattern="^[a-z]+$", max_length=3)] = "a"
    colour: Literal["red", "blue"] = "red"
    parts: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    table: dict[str, int] = {}
    inner: Cat | None = None


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"whole": 0}, "whole: expected at least 1, got 0"),
        ({"whole": 10}, "whole: expected at most 9, got 10"),
        ({"whole": "x"}, "whole: expected a whole number, got 'x'"),
        ({"whole": 1.5}, "whole: expected a whole number, got 1.5"),
        ({"part": 0}, "part: expected more than 0, got 0"),
        ({"part": 1.5}, "part: expected less than 1, got 1.5"),
        ({"part": float("nan")}, "part: expected a finite number, got nan"),
        ({"part": "x"}, "part: expected a number, got 'x'"),
        ({"flag": "perhaps"}, "flag: expected true or false, got 'perhaps'"),
        ({"name": 1}, "name: expected a text, got 1"),
        ({"name": "A"}, "name: expected text that matches ^[a-z]+$, got 'A'"),
        ({"name": "abcd"}, "name: expected at most 3 characters, got 'abcd'"),
        ({"colour": "green"}, "colour: expected 'red' or 'blue', got 'green'"),
        ({"parts": []}, "parts: expected at least 1 elements, got []"),
        ({"parts": 1}, "parts: expected a list, got 1"),
        ({"table": 1}, "table: expected a table (in JSON: an object), got 1"),
        ({"inner": 1}, "inner: expected a table (in JSON: an object), got 1"),
    ],
)
def test_an_error_says_what_was_expected_and_given(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Form.model_validate(document)
    assert error_messages(caught.value.errors(include_url=False), Form, document) == [sentence]


class Choice(BaseModel):
    """A field that may have one of several plain types."""

    words: str | Annotated[list[str], Field(min_length=1)] | None = None


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        (1, ["words: expected a text, got 1", "words: expected a list, got 1"]),
        ([], ["words: expected a text, got []", "words: expected at least 1 elements, got []"]),
        (["a", 2], ["words: expected a text, got ['a', 2]", "words.1: expected a text, got 2"]),
    ],
)
def test_errors_of_a_choice_of_types_name_the_key(given: object, sentences: list[str]) -> None:
    document = {"words": given}
    with pytest.raises(ValidationError) as caught:
        Choice.model_validate(document)
    assert error_messages(caught.value.errors(include_url=False), Choice, document) == sentences


def error_of(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Zoo.model_validate(document)
    return error_messages(caught.value.errors(include_url=False), Zoo, document, {"years": "lives"})


NO_KEY = "there is no such key"
NO_NUMBER = "expected a number, got 'x'"
KINDS = "expected one of 'cat', 'dog'"


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            {"animals": [{"kind": "dog"}, {"kind": "cat", "lifes": 1}]},
            f"animals.1.lifes: {NO_KEY}, did you mean `lives`?",
        ),
        ({"animals": [{"kind": "dog", "lives": 1}]}, f"animals.0.lives: {NO_KEY}, the keys are kind, tail"),
        ({"animals": [{"kind": "cat", "years": 1}]}, f"animals.0.years: {NO_KEY}, did you mean `lives`?"),
        ({"animals": [{"kind": "cow"}]}, f"animals.0.kind: {KINDS}, got 'cow'"),
        ({"animals": [{"kind": "dogg"}]}, f"animals.0.kind: {KINDS}, got 'dogg', did you mean 'dog'?"),
        ({"animals": [{"tail": 1}]}, f"animals.0.kind: is missing, {KINDS}"),
        ({"animals": [{"kind": "dog", "tail": "x"}]}, f"animals.0.tail: {NO_NUMBER}"),
        ({"houses": {"cat": {"kind": "cat", "livs": 1}}}, f"houses.cat.livs: {NO_KEY}, did you mean `lives`?"),
        ({"keeper": {"lives": 1}}, "keeper.kind: is missing"),
        ({"animal": []}, f"animal: {NO_KEY}, did you mean `animals`?"),
    ],
)
def test_each_error_names_the_path_as_written(document: dict[str, Any], sentence: str) -> None:
    assert error_of(document) == [sentence]


def tables(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The table, and all tables inside it."""
    yield kind
    for field in kind.model_fields.values():
        for below in model_classes(field.annotation):
            yield from tables(below)


@pytest.mark.parametrize("kind", sorted(set(tables(Recipe)), key=lambda kind: kind.__name__))
def test_every_key_of_a_recipe_is_found_by_a_misspelling_of_it(kind: type[BaseModel]) -> None:
    for name in kind.model_fields:
        wrong = name[0] + name[2:] if len(name) > 2 else name + name
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(json.dumps({wrong: 1}))
        (found,) = error_messages(
            [each for each in caught.value.errors() if each["type"] == "extra_forbidden"], kind, {wrong: 1}
        )
        assert f"did you mean `{name}`?" in found, (wrong, found)


def test_every_synonym_maps_to_a_key_and_is_no_key() -> None:
    keys = {name for kind in tables(Recipe) for name in kind.model_fields}
    assert set(SYNONYMS.values()) <= keys
    for wrong, key in SYNONYMS.items():
        kinds = [kind for kind in tables(Recipe) if key in kind.model_fields and wrong not in kind.model_fields]
        assert kinds, (wrong, key)


def test_only_the_beginning_of_a_large_value_is_read() -> None:
    assert len(short_repr("x" * 1000)) == 80
    assert len(short_repr({"a": [list(range(10**5))] * 10**5})) <= 80
