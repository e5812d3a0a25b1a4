"""Triton's `generate` and `generate_stream`, against completions of the same text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.generation.tiny_model import NAME, serving
from tests.server.service import Service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("generate") / "repository") as running:
        yield running


def ask(server: Service, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v2/models/{path}", json=body, timeout=60, verify=False)


def completion(server: Service, **body: Any) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": NAME, **body}, timeout=60, verify=False)
    return str(answer.json()["choices"][0]["text"])


SETTINGS = {"max_tokens": 9, "temperature": 0.8, "seed": 3}


@pytest.mark.parametrize("path", [NAME, f"{NAME}/versions/1", f"{NAME}/versions/live"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_text_is_that_of_the_completion(server: Service, path: str, inside: bool) -> None:
    settings: dict[str, Any] = {"parameters": {**SETTINGS, "stream": False}} if inside else SETTINGS
    answer = ask(server, f"{path}/generate", text_input="Hello world", id="7", **settings).json()
    text = completion(server, prompt="Hello world", **SETTINGS)
    assert answer == {"model_name": NAME, "model_version": "1", "id": "7", "text_output": text}


def test_a_stream_is_the_text_in_parts(server: Service) -> None:
    answer = ask(server, f"{NAME}/generate_stream", text_input="Hello world", **SETTINGS)
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert len(parts) > 1
    assert "".join(part["text_output"] for part in parts) == completion(server, prompt="Hello world", **SETTINGS)


def test_the_text_may_come_first(server: Service) -> None:
    answer = ask(server, f"{NAME}/generate", text_input="Hello", exclude_input_in_output=False, **SETTINGS).json()
    assert answer["text_output"] == "Hello" + completion(server, prompt="Hello", **SETTINGS)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (NAME, {}, 400, "text_input: is missing"),
        (NAME, {"text_input": "x", "parameters": {"heat": 1}}, 400, "parameters.heat: there is no such key"),
        (NAME, {"text_input": "x", "parameters": {"top_p": 2}}, 400, "top_p: expected at most 1, got 2"),
        (NAME, {"text_input": "x " * 5000}, 400, "prompt: expected fewer than"),
        ("none", {"text_input": "x"}, 404, "none"),
        (f"{NAME}/versions/7", {"text_input": "x"}, 404, "7"),
    ],
)
def test_errors_name_the_field(server: Service, path: str, body: dict[str, Any], status: int, message: str) -> None:
    for route in ("generate", "generate_stream"):
        answer = ask(server, f"{path}/{route}", **body)
        assert answer.status_code == status
        assert message in answer.json()["error"]
