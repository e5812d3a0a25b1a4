"""Constraints of texts in requests: the fields of OpenAI and vLLM, and calls of tools. The model has random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.generation.tiny_model import NAME, gguf_content, serving
from tests.server.service import Service

USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
PLACE = {"type": "object", "properties": {"at": {"$ref": "#/$defs/side"}}, "required": ["at"],
         "additionalProperties": False, "$defs": {"side": {"enum": ["left", "right"]}}}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": PLACE}},
    {"type": "function", "function": {"name": 'say "hi"'}},
]
GRAMMAR = 'start: "<" word ">"\nword: /[ab]{1,3}/'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("constraints") / "repository") as running:
        with running.client() as client:
            client.push("brief", gguf_content("{{ messages[0].content }}:"))  # the context is short
        yield running


def post(server: Service, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": NAME, **body}, timeout=60, verify=False)
    assert answer.status_code == status, answer.text
    return answer.json()


def is_small_object(text: str) -> bool:
    return json.loads(text) in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        ({"structured_outputs": {"regex": "[a-c]{2,4}x"}}, lambda text: re.fullmatch("[a-c]{2,4}x", text)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"grammar": GRAMMAR}}, lambda text: re.fullmatch("<[ab]{1,3}>", text)),
        ({"structured_outputs": {"json": SCHEMA}}, is_small_object),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_small_object),
        ({"guided_regex": "(ab)+"}, lambda text: re.fullmatch("(ab)+", text)),
        ({"guided_choice": ["größer", "kleiner"]}, lambda text: text in ("größer", "kleiner")),
        ({"guided_grammar": 'root ::= "u" [v-w]'}, lambda text: text in ("uv", "uw")),
        ({"guided_json": {"enum": ["x", None]}}, lambda text: text in ('"x"', "null")),
    ],
    ids=lambda value: None if callable(value) else str(value)[:60],
)  # fmt: skip
def test_texts_match_their_constraint(server: Service, constraint: Any, matches: Any) -> None:
    body = {"prompt": "x", "n": 6, "seed": 3, "max_tokens": 60, "frequency_penalty": 2, "repetition_penalty": 5}
    choices = post(server, "completions", **body, **constraint)["choices"]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert all(matches(text) for text in ended), ended


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"pattern": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"guided_regex": "[b"}, "guided_regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_json": {"type": "strange"}}, "guided_json"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
    ids=str,
)
def test_an_error_names_the_field_of_the_constraint(server: Service, constraint: Any, field: str) -> None:
    error = post(server, "completions", 400, prompt="x", **constraint)["error"]
    assert error["param"] == field, error


def called(server: Service, **body: Any) -> list[list[tuple[str, Any]]]:
    """The calls of each text that has ended by itself."""
    settings = {"model": "brief", "frequency_penalty": 2, "repetition_penalty": 5, "n": 6, "seed": 4}
    answer = post(server, "chat/completions", messages=USER, tools=TOOLS, **settings, **body)
    messages = [choice["message"] for choice in answer["choices"] if choice["finish_reason"] == "tool_calls"]
    assert messages
    assert all(message["content"] is None or not message["content"].strip() for message in messages)
    functions = [[call["function"] for call in message["tool_calls"]] for message in messages]
    return [[(each["name"], json.loads(each["arguments"])) for each in calls] for calls in functions]


def test_a_tool_is_called_with_arguments_of_its_schema(server: Service) -> None:
    for calls in called(server, tool_choice={"type": "function", "function": {"name": "move"}}):
        ((name, arguments),) = calls
        assert name == "move" and arguments in ({"at": "left"}, {"at": "right"})
    found = [calls for seed in (1, 2) for calls in called(server, tool_choice="required", parallel_tool_calls=False)]
    assert all(len(calls) == 1 for calls in found)
    assert all(call in [("move", {"at": "left"}), ("move", {"at": "right"}), ('say "hi"', {})] for (call,) in found)
    assert called(server, tool_choice="required")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "tools"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"required": 3}}}]}, "tools"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_of_the_tools(server: Service, body: Any, field: str) -> None:
    error = post(server, "chat/completions", 400, messages=USER, **body)["error"]
    assert error["param"] == field, error
