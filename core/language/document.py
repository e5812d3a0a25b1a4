"""Typed reads from a document of settings: a `config.json`, or the metadata of a GGUF file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lathe.core.errors import ModelError, UnsupportedError

# Above published models (at most 126 layers and 262,144 tokens), and low enough that no product of sizes overflows.
LARGEST_SIZE = 1 << 24
MOST_LAYERS = 1024


@dataclass(frozen=True)
class Document:
    """Fields by name. Each read names the field, what is expected, and what the document has.

    `where` is the document's name in errors; `prefix` comes before each field's name. A field of None is missing.
    """

    where: str
    fields: Mapping[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        return self.fields.get(self.prefix + name) is not None

    def get(self, name: str) -> Any:
        return self.fields.get(self.prefix + name)

    def _value(self, name: str, default: Any) -> Any:
        found = self.get(name)
        return default if found is None else found

    def size(self, name: str, default: int | None = None, most: int = LARGEST_SIZE) -> int:
        """A positive integer of at most `most`. ModelError for another value, or none if there is no default."""
        found = self._value(name, default)
        if type(found) is not int or not 0 < found <= most:
            raise self.error(name, f"an integer from 1 to {most}", found)
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number. ModelError for another value, or none if there is no default."""
        found = self._value(name, default)
        if type(found) not in (int, float) or not 0 < found < math.inf:
            raise self.error(name, "a positive number", found)
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.error(name, "true or false", found)
        return found

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of several words. UnsupportedError for another word, or none if there is no default."""
        found = self._value(name, default)
        if found not in choices:
            raise UnsupportedError(
                f"{self.prefix}{name}: expected {_listed(choices)}, got {_shown(found)}", where=self.where
            )
        return str(found)

    def text(self, name: str) -> str | None:
        found = self.get(name)
        if found is not None and not isinstance(found, str):
            raise self.error(name, "text", found)
        return found

    def part(self, name: str) -> Document | None:
        """A nested object; None if the field is missing."""
        found = self.get(name)
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise self.error(name, "an object", found)
        return Document(f"{self.where}: {name}", found)

    def error(self, name: str, expected: str, found: Any) -> ModelError:
        return ModelError(f"{self.prefix}{name}: expected {expected}, got {_shown(found)}", where=self.where)


def _listed(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def _shown(found: Any) -> str:
    """A value as JSON, shortened; other values as Python writes them."""
    try:
        return "nothing" if found is None else json.dumps(found)[:100]
    except (TypeError, ValueError):
        return repr(found)[:100]
