"""A GGUF file of a small seeded decoder with a tokenizer and a chat template, and a server that has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import lathe
from tests.core.language.checkpoints import gguf_parts, weight
from tests.core.language.families import config, weights
from tests.core.language.gguf_writer import floats, gguf_bytes
from tests.core.language.test_tokenizer import vocabulary
from tests.server.service import Service, service

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{# <tool_call> #}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAME = "tiny"


@cache
def gguf_content(template: str | None = TEMPLATE, seed: str = "tiny") -> bytes:
    """The file; another `seed` gives other weights of the embedding."""
    fields: dict[str, Any] = vocabulary()
    if template is not None:
        fields |= {"tokenizer.chat_template": ("str", template)}
    tokens = len(fields["tokenizer.ggml.tokens"][1])
    embedding = {"model.embed_tokens.weight": weight(seed, "embedding", (tokens, 48))}
    metadata, arrays = gguf_parts({**config("llama-tied"), "vocab_size": tokens}, weights("llama-tied") | embedding)
    return gguf_bytes(metadata | fields, {key: floats(array) for key, array in arrays.items()})


@contextmanager
def serving(root: Path, **settings: Any) -> Iterator[Service]:
    """A server whose model `tiny` is live as version 1."""
    with service(root, generation_cache=1 << 20, threads=1, **settings) as running:
        with running.client() as client:
            client.push(NAME, gguf_content())
        yield running


def greedy(folder: Path, prompt: str, count: int) -> tuple[str, list[int]]:
    """The text and tokens that follow a prompt, by running the whole graph for every token; end tokens included."""
    path = folder / "oracle.gguf"
    path.write_bytes(gguf_content())
    model = lathe.load_language_model(path)
    tokens = model.tokenizer.encode(prompt)
    begin = len(tokens)
    import numpy as np

    for _ in range(count):
        (logits,) = lathe.interpret(model.graph, {"input_ids": np.array([tokens])}).values()
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in model.tokenizer.ends:
            break
    return model.tokenizer.decode(tokens[begin:]), tokens[begin:]
