"""The tokenizer and the chat template of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lathe.core.language.document import Document
from lathe.core.language.json_file import read_bytes, read_json
from lathe.core.language.tokenizer import Tokenizer, parse_tokenizer


def folder_tokenizer(folder: Path, config: Document) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, and the tokens that end an answer. ModelError if it has none."""
    library = parse_tokenizer(read_bytes(folder / "tokenizer.json"), "tokenizer.json")
    generation = _optional(folder / "generation_config.json")
    ends = generation.get("eos_token_id") if generation.has("eos_token_id") else config.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int and token >= 0 for token in listed):
        raise config.error("eos_token_id", "a token or a list of tokens", ends)
    return Tokenizer(library, tuple(listed))


def chat_template(folder: Path) -> str | None:
    """The chat template: the file `chat_template.jinja`, or the field in `tokenizer_config.json` of older folders."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_bytes(file).decode(errors="replace")
    found: Any = _optional(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several templates with names
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _optional(path: Path) -> Document:
    return Document(path.name, read_json(path) if path.exists() else {})
