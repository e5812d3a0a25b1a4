"""How much JSON is parsed in one go: the time that takes depends on the number of values more than on that of bytes.

The parsers are C code that keeps the interpreter lock, so a thread of its own does not help who waits meanwhile.
"""

from __future__ import annotations

from server.errors import TooLarge

DOCUMENT_VALUES = 1 << 16  # of a management call: about ten milliseconds at worst, when each is a list of its own
VALUES = 1 << 18  # of an inference call, where they are not what native code reads
_SLICE = 1 << 20  # bytes counted in one go


def is_few(text: bytes | bytearray | memoryview, most: int) -> bool:
    """Whether a document has at most ``most`` values; signs inside strings count as well."""
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
    """Raise TooLarge where a document may have more values; ``unless`` says which are not counted."""
    if not is_few(text, most):
        raise TooLarge(f"{field}: expected JSON of at most {most} values{unless}, got more")
