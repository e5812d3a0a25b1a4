"""Drafts of served models: by the model's configuration or its draft model; texts and errors, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lathe.core.errors import ModelError
from lathe.core.language.generation.generator import TextGenerator, memory_bytes
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.sampling import SamplingSettings
from lathe.server.client import ClientError
from tests.server.generation.test_openai_api import complete, metric
from tests.server.generation.tiny_model import NAME, gguf_content
from tests.server.running import wait_for
from tests.server.service import service


def test_generators_have_drafts(tmp_path: Path) -> None:
    path, draft, other = (tmp_path / f"{name}.gguf" for name in ("model", "draft", "other"))
    path.write_bytes(gguf_content())
    draft.write_bytes(gguf_content(seed="another"))
    prompt, settings = tuple(range(3, 9)) * 3, SamplingSettings(temperature=0.5, seed=1)
    found = []
    for speculation in ("none", "lookup", "model", None):
        options = GeneratorOptions(1 << 20, 1, speculation, 4)
        generator = TextGenerator.open(path, options, draft=draft)
        parts = generator.engine.generate(GenerationRequest(prompt, settings, 20))
        found.append([choice.token for part in parts for choice in part.choices])
        assert (generator.engine.counters.drafted_tokens > 0) == (speculation != "none")
        generator.close()
    assert found[1:] == found[:1] * 3
    with pytest.raises(ModelError, match="needs a draft model"):
        TextGenerator.open(path, GeneratorOptions(1 << 20, 1, "model"))
    options = GeneratorOptions(1 << 20)
    assert memory_bytes(path, options, draft=draft) > 1.9 * memory_bytes(path, options)
    other.write_bytes(gguf_content().replace(b"<|im_start|>", b"<|im_other|>"))
    with pytest.raises(ModelError, match="another vocabulary"):
        TextGenerator.open(path, options, draft=other)


def test_served_models_have_drafts(tmp_path: Path) -> None:
    """With a draft model, then by look-up after a change of the configuration."""
    path, draft = tmp_path / "model.gguf", tmp_path / "draft.gguf"
    path.write_bytes(gguf_content())
    draft.write_bytes(gguf_content(seed="another"))
    repository = tmp_path / "repository"
    with service(repository, generation_cache=1 << 20, threads=1) as server:
        with server.client() as client:
            client.push("plain", path)
            client.push(NAME, path, draft=draft)
            with pytest.raises(ModelError, match="expected a GGUF file"):
                client.push("other", path, draft=Path(__file__))
            with pytest.raises(ClientError, match="draft"):
                client.push("other", Path(__file__), draft=draft)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        bodies: list[dict[str, Any]] = [
            {"temperature": 0, "ignore_eos": True}, {"temperature": 1, "seed": 4, "n": 2},
            {"seed": 5, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        ]  # fmt: skip
        prompt = "one two three one two three one two"
        texts = [complete(server, prompt, model="plain", max_tokens=30, **body)["choices"] for body in bodies]
        assert metric(server, "lathe_drafted_tokens_total") == 0

        def same() -> bool:
            return [complete(server, prompt, max_tokens=30, **body)["choices"] for body in bodies] == texts

        assert same()
        by_model = metric(server, "lathe_drafted_tokens_total")
        assert 0 <= metric(server, "lathe_accepted_tokens_total") <= by_model > 0
        (repository / NAME / "config.toml").write_text('[generation]\nspeculation = "lookup"\ndraft_tokens = 3\n')
        wait_for(lambda: metric(server, "lathe_drafted_tokens_total") == 0)  # loaded again
        assert same()
        assert metric(server, "lathe_drafted_tokens_total") > 0
        (repository / NAME / "config.toml").write_text('[generation]\nspeculation = "guess"\n')
        state = f"{server.url}/api/v1/models/{NAME}"
        wait_for(lambda: "generation.speculation" in str(httpx.get(state, verify=False).json()["config_error"]))
