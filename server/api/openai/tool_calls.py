"""Finds calls of tools in a text: JSON between `<tool_call>` and `</tool_call>`, as Hermes and Qwen write them."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from lathe.core.language.generation.text_stream import overlap

BEGIN, END = "<tool_call>", "</tool_call>"


class ToolCallParser:
    """Splits a text that arrives in parts into content and calls.

    A call is an object `{"id", "type", "function": {"name", "arguments"}}` with arguments as JSON text. What is between
    the marks but is no call stays content.
    """

    def __init__(self) -> None:
        self.count = 0  # of the calls so far
        self._held = ""
        self._inside = False

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The content and the calls that have become certain with `text`, the next part of the text.

        Returns nothing that an earlier call has returned, and holds back text that may belong to a tool call.
        """
        self._held += text
        content, calls = "", []
        while True:
            mark = END if self._inside else BEGIN
            before, found, rest = self._held.partition(mark)
            if not found:
                break
            self._held = rest
            call = _parse_call(before) if self._inside else None
            if call is not None:
                calls.append(call)
            else:
                content += BEGIN + before + END if self._inside else before
            self._inside = not self._inside
        self.count += len(calls)
        if not self._inside:
            keep = len(self._held) - overlap(self._held, BEGIN)
            content, self._held = content + self._held[:keep], self._held[keep:]
        return content, calls

    def finish(self) -> str:
        """The content that was held back."""
        rest = (BEGIN if self._inside else "") + self._held
        self._held, self._inside = "", False
        return rest


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    match found:
        case {"name": str(name), "arguments": dict() | str() as arguments}:
            written = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
            function = {"name": name, "arguments": written}
            return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return None
