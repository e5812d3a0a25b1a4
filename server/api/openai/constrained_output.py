"""The fields of a request that constrain its texts: OpenAI's `response_format`, and those of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import orjson
from pydantic import Field

from lathe.core.language.constraint import Grammar
from lathe.server.api.openai.body import Body
from lathe.server.errors import BadRequest

Schema: TypeAlias = dict[str, Any] | str
Alternatives: TypeAlias = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class NamedGrammar(NamedTuple):
    """A grammar, and the field of the request that has it."""

    field: str
    grammar: Grammar


class NamedSchema(Body):
    """A JSON schema."""

    name: str | None = None
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="Ignored: texts always match the schema.")


class ResponseFormat(Body):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(default=None, description="With the type `json_schema`.")

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the text; None for any text. Raises BadRequest for a type without its schema."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_object")
        if self.json_schema is None:
            raise BadRequest("response_format: expected json_schema with the type json_schema")
        return _schema_grammar(self.json_schema.content)


class StructuredOutputs(Body):
    """The form of the text, as vLLM names it. Exactly one field is given."""

    content: Schema | None = Field(default=None, alias="json", description="A JSON schema, or its text.")
    json_object: Literal[True] | None = Field(default=None, description="Any JSON object.")
    regex: str | None = Field(default=None, description="A regular expression, which matches the whole text.")
    choice: Alternatives | None = Field(default=None, description="The text is one of these.")
    grammar: str | None = Field(default=None, description="A grammar in the syntax of Lark, or GBNF.")

    @property
    def found(self) -> Grammar:
        """The grammar of the text. Raises BadRequest unless exactly one field is given."""
        found = [*_grammars(self.content, self.regex, self.choice, self.grammar)]
        if self.json_object:
            found.append(Grammar("json_object"))
        if len(found) != 1:
            raise BadRequest(
                f"structured_outputs: expected one of json, json_object, regex, choice and grammar, got {len(found)}"
            )
        return found[0]


class ConstrainedOutput(Body):
    """The fields of a request that constrain its texts. At most one is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(default=None, description="The form of the text, as in vLLM.")
    guided_json: Schema | None = Field(default=None, description="`structured_outputs.json`, as older vLLM names it.")
    guided_regex: str | None = Field(default=None, description="`structured_outputs.regex`, as older vLLM names it.")
    guided_choice: Alternatives | None = Field(default=None, description="`structured_outputs.choice`, likewise.")
    guided_grammar: str | None = Field(default=None, description="`structured_outputs.grammar`, likewise.")

    def named_grammar(self) -> NamedGrammar | None:
        """The grammar of the texts with its field; None for any text. Raises BadRequest for several."""
        found = list(self._named_grammars())
        if len(found) > 1:
            first, second = found[0].field, found[1].field
            raise BadRequest(f"{second}: expected one constraint of the text, got {first}, too")
        return found[0] if found else None

    def _named_grammars(self) -> Iterator[NamedGrammar]:
        if self.response_format is not None and (grammar := self.response_format.grammar) is not None:
            yield NamedGrammar("response_format", grammar)
        if self.structured_outputs is not None:
            yield NamedGrammar("structured_outputs", self.structured_outputs.found)
        for grammar in _grammars(self.guided_json):
            yield NamedGrammar("guided_json", grammar)
        for grammar in _grammars(regex=self.guided_regex):
            yield NamedGrammar("guided_regex", grammar)
        for grammar in _grammars(choice=self.guided_choice):
            yield NamedGrammar("guided_choice", grammar)
        for grammar in _grammars(grammar=self.guided_grammar):
            yield NamedGrammar("guided_grammar", grammar)


def _grammars(
    schema: Schema | None = None, regex: str | None = None, choice: list[str] | None = None, grammar: str | None = None
) -> Iterator[Grammar]:
    """The grammars that are given."""
    if schema is not None:
        yield _schema_grammar(schema)
    if regex is not None:
        yield Grammar("regex", regex)
    if choice is not None:
        yield Grammar("choice", orjson.dumps(choice).decode())
    if grammar is not None:
        yield Grammar("lark", grammar)


def _schema_grammar(schema: Schema) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else orjson.dumps(schema).decode())
