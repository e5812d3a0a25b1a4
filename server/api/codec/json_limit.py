"""Limits the JSON that is parsed in one call: its time depends more on the number of values than on that of bytes.

The parsers are C code that holds the interpreter lock, so parsing on another thread would block the event loop as well.
"""

from __future__ import annotations

from lathe.server.errors import TooLarge

MAX_DOCUMENT_VALUES = 1 << 16  # for management calls: about 10 ms in the worst case, if each value is a list
MAX_VALUES = 1 << 18  # for inference calls, without the lists of numbers that native code reads
_SLICE = 1 << 20  # bytes counted per step


def has_at_most(text: bytes | bytearray | memoryview, most: int) -> bool:
    """Whether JSON surely has at most `most` values: by its length, otherwise by the number of `,`, `[` and `{`.

    The outermost value is not counted. Characters inside strings are, so the result can be False for fewer values.
    """
    if len(text) <= most:
        return True
    found = 0
    for start in range(0, len(text), _SLICE):
        part = bytes(text[start : start + _SLICE])
        found += part.count(b",") + part.count(b"[") + part.count(b"{")
        if found > most:
            return False
    return True


def check_values(text: bytes | bytearray | memoryview, field: str, most: int, unless: str = "") -> None:
    """TooLarge if the JSON may have more than `most` values (`has_at_most`).

    The message begins with `field`; `unless` is appended to its number of values, to say which values do not count.
    """
    if not has_at_most(text, most):
        raise TooLarge(f"{field}: expected JSON of at most {most} values{unless}, got more")
