"""The client library of OpenAI, unmodified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.generation.tiny_model import NAME, serving

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        serving(tmp_path_factory.mktemp("sdk") / "repository") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "lathe"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_chat(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "messages": MESSAGES, "seed": 5, "max_completion_tokens": 10}
    whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2)
    assert len(whole.choices) == 2 and whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content[0].top_logprobs) == 2
    text, usage = "", None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert usage is not None and usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_helper_for_streams(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert whole is not None
    with client.chat.completions.stream(**options, stop=whole[3:6]) as stream:
        parts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(parts) == final.choices[0].message.content == whole[: whole.find(whole[3:6])]
    assert final.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "prompt": ["One", "Two"], "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**options, logprobs=1)
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_tools_reach_the_template(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    options: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 2}
    plain, with_tools = (
        client.chat.completions.create(**options),
        client.chat.completions.create(**options, tools=[tool]),
    )
    assert plain.usage and with_tools.usage and with_tools.usage.prompt_tokens > plain.usage.prompt_tokens
    off = client.chat.completions.create(**options, tools=[tool], tool_choice="none")
    assert off.usage and off.usage.prompt_tokens == plain.usage.prompt_tokens


def test_texts_match_a_json_schema(client: openai.OpenAI) -> None:
    """Whatever the model is: this one has random weights."""
    schema = {
        "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "sunny": {"type": "boolean"}},
        "required": ["unit", "sunny"], "additionalProperties": False,
    }  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    options: Any = {
        "model": NAME, "messages": MESSAGES, "max_tokens": 80, "n": 8, "seed": 1,
        "frequency_penalty": 2, "extra_body": {"repetition_penalty": 5},  # JSON may have any number of spaces
    }  # fmt: skip
    answer = client.chat.completions.create(**options, response_format=wanted)
    ended = [choice.message.content for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        found = json.loads(text or "")
        assert found.keys() == {"unit", "sunny"} and found["unit"] in ("C", "F") and found["sunny"] in (True, False)
    broken: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**options, response_format=broken)
    assert refused.value.param == "response_format"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="none", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=9)
    assert refused.value.param == "temperature" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="word " * 1000)
    assert long.value.code == "context_length_exceeded"
