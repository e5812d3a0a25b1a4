"""The texts of special tokens by their names in chat templates: `bos_token`, `eos_token`, `pad_token`, `unk_token`."""

from __future__ import annotations

from pathlib import Path

from lathe.core.language.document import Document
from lathe.core.language.gguf import GgufFile
from lathe.core.language.json_file import read_json

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def folder_tokens(folder: Path) -> dict[str, str]:
    """Those in the `tokenizer_config.json` of a Hugging Face folder: texts, or objects with their `content`."""
    path = folder / "tokenizer_config.json"
    fields = read_json(path) if path.exists() else {}
    found = {name: fields.get(name) for name in _NAMES}
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def gguf_tokens(file: GgufFile) -> dict[str, str]:
    """Those whose numbers are in the metadata of a GGUF file."""
    fields = Document(file.name, file.metadata, "tokenizer.ggml.")
    tokens = fields.get("tokens")
    numbers = {name: fields.get(f"{short}_token_id") for name, short in _GGUF_NAMES.items()}
    if not isinstance(tokens, list):
        return {}
    return {
        name: tokens[number] for name, number in numbers.items() if type(number) is int and 0 <= number < len(tokens)
    }
