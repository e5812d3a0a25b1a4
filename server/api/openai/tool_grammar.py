"""`tool_grammar`: the grammar of texts that call tools, for `tool_choice` other than `auto` and `none`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

from lathe.core.language.constraint import Grammar
from lathe.server.api.openai.tool_calls import BEGIN, END
from lathe.server.errors import BadRequest

_LINE_END = "\n"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(functions: Sequence[dict[str, Any]], *, several: bool) -> Grammar:
    """The grammar of a call of one of these functions, or of several calls, each on lines of its own.

    A call has the form that `ToolCallParser` reads, and its arguments match the JSON schema in `parameters`. BadRequest
    for a function without a name, or with parameters that are no schema of an object.
    """
    if not functions:
        raise BadRequest("tool_choice: expected tools with it")
    lines = [
        f"start: call ({_quoted(_LINE_END)} call)*" if several else "start: call",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        name, schema = json.dumps(_name(function, index)), _schema(function, index)
        opening, ending = f'{BEGIN}\n{{"name": {name}, "arguments": ', f"}}\n{END}"
        # Each schema is a grammar of its own, so that references within it stay valid.
        lines.append(f"call_{index}: {_quoted(opening)} arguments_{index} {_quoted(ending)}")
        lines.append(f"arguments_{index}: %json {orjson.dumps(schema).decode()}")
    return Grammar("lark", "\n".join(lines))


def _name(function: dict[str, Any], index: int) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"tools[{index}].function.name: expected a text, got {str(name)[:80]}")
    return name


def _schema(function: dict[str, Any], index: int) -> dict[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return _NO_ARGUMENTS
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"tools[{index}].function.parameters: expected the JSON schema of an object")
    return {"type": "object", **schema}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
