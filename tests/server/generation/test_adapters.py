"""Adapters of a served model: pushed with it, chosen by the model's name or a parameter, apart in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import lathe
from lathe.core.errors import ModelError
from lathe.server.cli.push import read_adapter_options
from lathe.server.client import ApiError, ClientError
from tests.core.language.adapter_files import llama_factors, merged, write_adapter
from tests.core.language.checkpoints import gguf_parts, weight
from tests.core.language.families import config, weights
from tests.core.language.gguf_writer import floats, gguf_bytes
from tests.core.language.test_tokenizer import vocabulary
from tests.server.generation.tiny_model import NAME, gguf_content
from tests.server.service import Service, service

LEGAL, TERSE = llama_factors(1, 4), llama_factors(2, 2)
PROMPT = "Hello world, a prompt that is longer than a page of thirty-two tokens, so that texts share its pages"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "tiny.gguf").write_bytes(gguf_content())
    adapters = {
        "legal": write_adapter(folder / "a", LEGAL, 4),
        "terse-2": write_adapter(folder / "b", TERSE, 2),
    }
    with service(folder / "repository", generation_cache=1 << 20, threads=1) as running:
        with running.client() as client:
            client.push(NAME, folder / "tiny.gguf", adapters=adapters)
        yield running


def expected(folder: Path, tensors: Any, count: int) -> str:
    """The greedy text after the prompt of the model with a merged adapter, whose graph the references run."""
    fields = vocabulary()
    tokens = len(fields["tokenizer.ggml.tokens"][1])
    base = weights("llama-tied") | {"model.embed_tokens.weight": weight("tiny", "embedding", (tokens, 48))}
    metadata, arrays = gguf_parts({**config("llama-tied"), "vocab_size": tokens}, merged(base, tensors, 2.0))
    path = folder / "merged.gguf"
    path.write_bytes(gguf_bytes(metadata | fields, {key: floats(array) for key, array in arrays.items()}))
    model = lathe.load_language_model(path)
    text = model.tokenizer.encode(PROMPT)
    begin = len(text)
    for _ in range(count):
        (logits,) = lathe.interpret(model.graph, {"input_ids": np.array([text])}).values()
        text.append(int(logits[0, -1].argmax()))
    return model.tokenizer.decode(text[begin:])


def complete(server: Service, model: str, status: int = 200, **body: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, verify=False)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_texts_are_those_of_merged_weights(server: Service, tmp_path: Path) -> None:
    """The same prompt for each adapter: pages of one are not those of another."""
    for name, tensors in ((NAME, {}), (f"{NAME}/legal", LEGAL), (f"{NAME}:live/terse-2", TERSE)):
        first, second = complete(server, name), complete(server, name)
        assert first["choices"][0]["text"] == expected(tmp_path, tensors, 8)
        assert second["choices"] == first["choices"]
        cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, second)]
        assert cached[0] == 0 and cached[1] >= 32


def test_chats_and_generate_have_adapters(server: Service) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 6}
    answers = [
        httpx.post(f"{server.url}/v1/chat/completions", json={**body, "model": name}, timeout=60, verify=False).json()
        for name in (NAME, f"{NAME}/legal")
    ]
    assert answers[0]["choices"] != answers[1]["choices"] and answers[1]["model"] == f"{NAME}/legal"
    text = complete(server, f"{NAME}/legal", ignore_eos=False)["choices"][0]["text"]
    settings = {"temperature": 0, "max_tokens": 8}
    for body in ({"adapter": "legal", **settings}, {"parameters": {"adapter": "legal", **settings}}):
        answer = httpx.post(f"{server.url}/v2/models/{NAME}/generate", json={"text_input": PROMPT, **body}, timeout=60)
        assert answer.json()["text_output"] == text


def test_adapters_are_listed_with_their_model(server: Service) -> None:
    listed = httpx.get(f"{server.url}/v1/models", verify=False).json()["data"]
    assert [(each["id"], each.get("parent"), each.get("root")) for each in listed] == [
        (NAME, None, None), (f"{NAME}/legal", NAME, "legal"), (f"{NAME}/terse-2", NAME, "terse-2"),
    ]  # fmt: skip
    assert httpx.get(f"{server.url}/v1/models/{NAME}/legal", verify=False).json() == listed[1]


def test_an_unknown_adapter_is_not_found(server: Service) -> None:
    message = complete(server, f"{NAME}/none", 404)["error"]["message"]
    assert "adapter 'none'" in message and "legal, terse-2" in message
    assert httpx.get(f"{server.url}/v1/models/{NAME}/none", verify=False).status_code == 404
    answer = httpx.post(f"{server.url}/v2/models/{NAME}/generate", json={"text_input": "x", "adapter": "none"})
    assert answer.status_code == 404


def test_bad_adapters_are_refused(server: Service, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(gguf_content())
    (tmp_path / "model.onnx").write_bytes(b"model")
    wrong = write_adapter(tmp_path / "wrong", llama_factors(1, 4), 3)
    with server.client() as client:
        with pytest.raises(ApiError, match="factors of"):
            client.push("other", tmp_path / "tiny.gguf", adapters={"wrong": wrong})
        with pytest.raises(ModelError, match="name of an adapter"):
            client.push("other", tmp_path / "tiny.gguf", adapters={"a/b": wrong})
        with pytest.raises(ClientError, match="adapters"):
            client.push("other", tmp_path / "model.onnx", adapters={"a": wrong})


def test_options_of_the_command_name_adapters() -> None:
    import typer

    assert read_adapter_options(["a=b", "c=d=e"]) == {"a": Path("b"), "c": Path("d=e")}
    for wrong in (["a"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(typer.BadParameter, match="expected NAME=FOLDER"):
            read_adapter_options(wrong)
