"""`TextStream`: tokens become text one by one, with complete characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder writes for the bytes of an incomplete character
_LONGEST = 8  # tokens: a character has at most 4 bytes, so more tokens without an end of one are invalid bytes
_CONTEXT = 6  # tokens of the prompt: decoders treat the first token of a text in its own way

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of tokens that follow a prompt.

    `decode` returns the text of a list of tokens. `stops`: the text ends before the first of these strings: the one
    that is complete first, whatever the tokens are. Text that may be the beginning of a stop string, or of a
    character, is held back.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self.stopped: str | None = None  # the stop string that has ended the text
        self._decode = decode
        self._stops = tuple(stops)
        self._held = ""
        # Text is decoded from some tokens before the new ones, because a token's text can depend on those before it.
        self._tokens = _context(decode, prompt)
        self._start, self._read = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """The text that is certain after this token; empty if it is held back, or after a stop string."""
        if self.stopped is not None:
            return ""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if text.endswith(_REPLACEMENT) and len(self._tokens) - self._read < _LONGEST:
            return ""
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        return self._released(text[len(before) :])

    def finish(self) -> str:
        """The text that was held back; call it after the last token, unless a stop string has ended the text."""
        if self.stopped is not None:
            return ""
        before = self._decode(self._tokens[self._start : self._read])
        rest = self._decode(self._tokens[self._start :])[len(before) :]
        self._read = len(self._tokens)
        released = self._released(rest)
        held, self._held = self._held, ""
        return released + held

    def _released(self, new: str) -> str:
        text = self._held + new
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.stopped = min(found)
            at = end - len(self.stopped)
            self._held = ""
            return text[:at]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


def _context(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt; none if they end within a character."""
    tokens = list(prompt[-_CONTEXT:])
    return [] if decode(tokens).endswith(_REPLACEMENT) else tokens
