"""Calls of tools are found in a text, however it is cut into parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lathe.server.api.openai.tool_calls import ToolCallParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
BROKEN = '<tool_call>{"name": 3}</tool_call>'


def parsed(text: str, size: int) -> tuple[str, list[dict[str, Any]]]:
    parser, content, calls = ToolCallParser(), "", []
    for start in range(0, len(text), size):
        more, found = parser.push(text[start : start + size])
        content += more
        calls += found
    assert parser.count == len(calls)
    return content + parser.finish(), calls


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_and_content_are_split(size: int) -> None:
    content, calls = parsed(f"I look.<tool{CALL} and {CALL}{BROKEN} 1 < 2 <tool_c", size)
    assert content == f"I look.<tool and {BROKEN} 1 < 2 <tool_c"
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln", "days": 2}
    assert calls[0]["id"] != calls[1]["id"] and calls[0]["type"] == "function"


def test_a_call_that_does_not_end_stays_content() -> None:
    assert parsed('x<tool_call>{"name": "a"', 3) == ('x<tool_call>{"name": "a"', [])
