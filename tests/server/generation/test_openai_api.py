"""The routes of OpenAI's API, on a small model whose whole graph is the oracle."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lathe.core.language.generation import generator
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.client import ApiError, Client
from tests.core.language.encoder_decoders import source
from tests.core.language.families import write_folder
from tests.core.language.test_encoder_decoders import EXPECTED as RECORDED
from tests.core.language.test_encoder_decoders import write_folder as write_encoder_decoder
from tests.core.language.test_onnx_decoder import PROMPT, WRITERS
from tests.core.language.test_onnx_decoder import greedy as onnx_greedy
from tests.core.language.test_tokenizer import trained
from tests.server.generation.tiny_model import NAME, gguf_content, greedy, serving
from tests.server.running import Raw, request, wait_for
from tests.server.service import Service, service

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("openai") / "repository") as running:
        yield running


def post(server: Service, path: str, status: int = 200, headers: Any = None, **body: Any) -> Any:
    answer = httpx.post(
        f"{server.url}/v1/{path}", json={"model": NAME, **body}, headers=headers, timeout=60, verify=False
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def complete(server: Service, prompt: Any = "Hello world", **body: Any) -> Any:
    return post(server, "completions", prompt=prompt, **{"temperature": 0, **body})


def events(server: Service, path: str, **body: Any) -> list[Any]:
    """The events of a stream, without its last line."""
    answer = httpx.post(
        f"{server.url}/v1/{path}", json={"model": NAME, "stream": True, **body}, timeout=60, verify=False
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def metric(server: Service, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", verify=False).text  # reading certificates takes longer than the call
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


def test_a_completion_is_the_text_of_the_graph(server: Service, tmp_path: Path) -> None:
    text, tokens = greedy(tmp_path, "Hello world", 8)
    answer = complete(server, max_tokens=8)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"] == text and usage["completion_tokens"] == len(tokens)
    assert choice["finish_reason"] == ("length" if len(tokens) == 8 and tokens[-1] != 2 else "stop")
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(tokens)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == NAME


def test_a_chat_is_a_completion_of_its_template(server: Service) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    expected = complete(server, text, max_tokens=6)
    answer = post(server, "chat/completions", messages=USER, temperature=0, max_completion_tokens=6)
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    again = post(server, "chat/completions", messages=parts, temperature=0, max_tokens=6)
    assert again["choices"] == answer["choices"]


def test_a_stream_has_the_same_text(server: Service) -> None:
    body = {"messages": USER, "seed": 11, "max_tokens": 12, "n": 2}
    whole = post(server, "chat/completions", **body)["choices"]
    found = events(server, "chat/completions", **body, stream_options={"include_usage": True})
    for index in range(2):
        deltas = [each["choices"][0] for each in found[:-1] if each["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in deltas) == whole[index]["message"]["content"]
        assert deltas[-1]["finish_reason"] == whole[index]["finish_reason"]
        assert all(each["finish_reason"] is None for each in deltas[:-1])
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] > 1
    assert whole[0]["message"]["content"] != whole[1]["message"]["content"]


def test_a_seed_gives_the_same_text_whatever_else_runs(server: Service) -> None:
    def text(seed: int) -> str:
        answer = complete(server, temperature=1, seed=seed % 4, max_tokens=10, top_p=0.9)
        return str(answer["choices"][0]["text"])

    alone = [text(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(text, range(24))) == alone * 6
    assert len(set(alone)) == 4


def test_several_prompts_and_texts(server: Service) -> None:
    prompts = ["One", [5, 6, 7], "Three"]
    alone = [complete(server, prompt, max_tokens=4) for prompt in prompts[:1] + prompts[2:]]
    answer = complete(server, ["One", "Three"], max_tokens=4, n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [alone[0]["choices"][0]["text"]] * 2 + [alone[1]["choices"][0]["text"]] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
    assert complete(server, [5, 6, 7], max_tokens=4)["usage"]["prompt_tokens"] == 3
    echoed = complete(server, "One", max_tokens=4, echo=True)["choices"][0]["text"]
    assert echoed == "One" + texts[0]


def test_prompts_are_truncated_at_their_beginning(server: Service) -> None:
    last = complete(server, [7, 8, 9], max_tokens=4)
    found = complete(server, [[5, 6, 7, 8, 9], [7, 8, 9]], max_tokens=4, truncate_prompt_tokens=3)
    assert [each["text"] for each in found["choices"]] == [last["choices"][0]["text"]] * 2
    assert found["usage"]["prompt_tokens"] == 6
    assert complete(server, [7, 8], max_tokens=1, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 2
    context = httpx.get(f"{server.url}/v1/models/{NAME}", verify=False).json()["max_model_len"]
    whole = complete(server, [5] * (context + 9), max_tokens=4, truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == context - 1 and whole["usage"]["completion_tokens"] == 1
    body: dict[str, Any] = {"messages": USER, "max_tokens": 1, "truncate_prompt_tokens": 2}
    assert post(server, "chat/completions", **body)["usage"]["prompt_tokens"] == 2
    for wrong in (0, -2, "x"):
        error = post(server, "completions", 400, prompt="x", truncate_prompt_tokens=wrong)["error"]
        assert error["param"] == "truncate_prompt_tokens"


def test_stop_strings(server: Service) -> None:
    whole = complete(server, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    stop = whole[3:5]
    choice = complete(server, max_tokens=12, ignore_eos=True, stop=[stop])["choices"][0]
    assert choice["text"] == whole[: whole.find(stop)] and choice["finish_reason"] == "stop"


def test_logprobs(server: Service) -> None:
    answer = post(server, "chat/completions", messages=USER, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    choice = answer["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode(errors="replace") == choice["message"]["content"]
    for each in tokens:
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0, "the likeliest token was taken"
        values = [other["logprob"] for other in each["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
    listed = complete(server, max_tokens=4, logprobs=2)["choices"][0]["logprobs"]
    assert [len(values) for values in listed.values()] == [4, 4, 4, 4]
    assert all(len(best) <= 2 for best in listed["top_logprobs"])


def test_tokens_that_are_parts_of_characters(server: Service) -> None:
    """Each of these characters has four bytes, and the tokenizer knows some of them as several tokens."""
    constraint: dict[str, Any] = {"guided_regex": "a🙂ß🙃", "logprobs": 3, "max_tokens": 30}
    choice = complete(server, "x", echo=False, **constraint)["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == "a🙂ß🙃"
    assert found["tokens"][0] == "a" and any(token.startswith("bytes:\\x") for token in found["tokens"])
    begins, offsets = {0: 0, 1: 1, 5: 2, 7: 3}, []  # the character that begins at each byte
    at = current = 0
    for token in found["tokens"]:
        current = max(value for byte, value in begins.items() if byte <= at)
        offsets.append(current)
        at += (len(token) - len("bytes:")) // 4 if token.startswith("bytes:") else len(token.encode())
    assert at == len(choice["text"].encode()) and found["text_offset"] == offsets
    chat = post(server, "chat/completions", messages=USER, guided_regex="🙂", logprobs=True, max_tokens=9)["choices"][0]
    assert bytes(byte for each in chat["logprobs"]["content"] for byte in each["bytes"]).decode() == "🙂"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("completions", {"model": "other", "prompt": "x"}, 404, None, "model_not_found"),
        ("completions", {"model": f"{NAME}:7", "prompt": "x"}, 404, None, "not_found"),
        ("completions", {"prompt": "x", "temprature": 1}, 400, "temprature", "bad_request"),
        ("completions", {"prompt": "x", "temperature": 3}, 400, "temperature", "bad_request"),
        ("completions", {}, 400, "prompt", "bad_request"),
        ("completions", {"prompt": []}, 400, "prompt", "bad_request"),
        ("completions", {"prompt": [100_000]}, 400, "prompt", "bad_request"),
        ("completions", {"prompt": "x " * 5000}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": "x", "best_of": 3}, 400, "best_of", "bad_request"),
        ("completions", {"prompt": "x", "logit_bias": {"100000": 1}}, 400, "logit_bias", "bad_request"),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "bad_request"),
        ("chat/completions", {"messages": []}, 400, "messages", "bad_request"),
        ("chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages", "bad_request"),
        ("chat/completions", {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "bad_request"),
        ("chat/completions", {"messages": USER, "tool_choice": "all"}, 400, "tool_choice", "bad_request"),
    ],
)  # fmt: skip
def test_errors_have_openais_form(server: Service, path: str, body: Any, status: int, param: Any, code: str) -> None:
    error = post(server, path, status, **body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), error


def test_other_models_and_routes(server: Service) -> None:
    for path, status in (("models/none", 404), ("nothing", 404), ("completions", 405)):
        answer = httpx.get(f"{server.url}/v1/{path}")
        assert answer.status_code == status and answer.json()["error"]["message"]
    tensors = {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    answer = httpx.post(f"{server.url}/v2/models/{NAME}/infer", json=tensors)
    assert answer.status_code == 501 and "/v1/completions" in answer.json()["error"]


def test_models_are_listed(server: Service) -> None:
    listed = httpx.get(f"{server.url}/v1/models", verify=False).json()
    (entry,) = listed["data"]
    assert listed["object"] == "list" and (entry["id"], entry["object"]) == (NAME, "model")
    assert httpx.get(f"{server.url}/v1/models/{NAME}", verify=False).json() == entry
    assert httpx.get(f"{server.url}/v1/models/{NAME}:1").json() == {**entry, "id": f"{NAME}:1"}


def test_metrics(server: Service) -> None:
    names = (
        "lathe_prompt_tokens_total", "lathe_generated_tokens_total", "lathe_time_to_first_token_seconds_count",
        "lathe_time_per_output_token_seconds_count",
    )  # fmt: skip
    before = [metric(server, name) for name in names]
    usage = complete(server, max_tokens=5, ignore_eos=True)["usage"]
    after = [metric(server, name) for name in names]
    assert [new - old for old, new in zip(before, after, strict=True)] == [usage["prompt_tokens"], 5, 1, 1]
    assert metric(server, "lathe_kv_cache_usage_ratio") == 0


def test_versions_answer_by_their_aliases(tmp_path: Path) -> None:
    with serving(tmp_path / "repository") as server, server.client() as client:
        first = complete(server, max_tokens=6)["choices"][0]["text"]
        assert client.push(NAME, gguf_content(seed="other")).version == 2
        assert complete(server, max_tokens=6)["choices"][0]["text"] == first
        client.promote(NAME, 2)
        second = complete(server, max_tokens=6)["choices"][0]["text"]
        assert second != first
        assert complete(server, model=f"{NAME}:live", max_tokens=6)["choices"][0]["text"] == second
        client.rollback(NAME)
        assert complete(server, max_tokens=6)["choices"][0]["text"] == first
        client.unload(NAME)
        assert "not loaded" in post(server, "completions", 503, prompt="x")["error"]["message"]
        assert httpx.get(f"{server.url}/v1/models", verify=False).json()["data"] == []
        client.load(NAME)
        assert complete(server, max_tokens=6)["choices"][0]["text"] == first


def test_folders_and_models_without_a_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "llama-tied")
    trained().save(str(folder / "tokenizer.json"))
    (folder / "notes.txt").write_text("stays here")
    with service(tmp_path / "repository", generation_cache=1 << 20, threads=1) as server, server.client() as client:
        client.push(NAME, folder)
        manifest = client.version(NAME, 1).manifest
        assert manifest is not None
        assert sorted(manifest["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert complete(server, [1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] >= 1
        error = post(server, "chat/completions", 400, messages=USER)["error"]
        assert "no chat template" in error["message"] and error["param"] == "messages"
        client.push("broken", gguf_content("{% if %}"))
        assert (
            "chat template" in post(server, "chat/completions", 422, model="broken", messages=USER)["error"]["message"]
        )
        complete(server, model="broken", max_tokens=3)
        for content, message in ((gguf_content()[:2000], "model.gguf"), (b"GGUF", "model.gguf")):
            with pytest.raises(ApiError, match=message) as refused:
                client.push("damaged", content)
            assert refused.value.status == 422


def test_decoders_with_past_as_onnx_files_are_language_models(tmp_path: Path) -> None:
    """Their files keep their names but that of the graph: a version with model.onnx is a model of tensors."""
    with service(tmp_path / "repository", generation_cache=1 << 20, threads=1) as server, server.client() as client:
        for form, files in (
            ("optimum", ["config.json", "decoder.onnx", "tokenizer.json"]),
            ("genai", ["chat_template.jinja", "decoder.onnx", "genai_config.json", "text.onnx.data", "tokenizer.json"]),
        ):
            (tmp_path / form).mkdir()
            model = WRITERS[form](tmp_path / form)
            client.push(form, tmp_path / form)
            manifest = client.version(form, 1).manifest
            assert manifest is not None
            assert sorted(manifest["files"]) == files
            answer = complete(server, list(PROMPT), model=form, max_tokens=8, ignore_eos=True)
            assert answer["choices"][0]["text"] == trained().decode(onnx_greedy(model, PROMPT, 8))
            assert answer["usage"]["completion_tokens"] == 8


def test_encoder_decoders_answer_completions(tmp_path: Path) -> None:
    """The prompt is the source; usage counts its tokens."""
    folder, prompt = tmp_path / "t5", source("mt5")[1][0].tolist()
    folder.mkdir()
    trained().save(str(write_encoder_decoder(folder, "mt5") / "tokenizer.json"))
    tokens = RECORDED["mt5/tokens"].tolist()[1:21]
    with service(tmp_path / "repository", generation_cache=1 << 20, threads=1) as server, server.client() as client:
        client.push(NAME, folder)
        answer = complete(server, prompt, max_tokens=20, temperature=0, ignore_eos=True)
        assert answer["choices"][0]["text"] == trained().decode(tokens)
        assert answer["usage"]["prompt_tokens"] == len(prompt) and answer["usage"]["completion_tokens"] == 20
        error = post(server, "completions", 400, prompt=[5] * 2000)["error"]
        assert error["code"] == "context_length_exceeded"


class Slow:
    """Makes runners that wait before each run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
        make = generator.make_runner

        def slow(*arguments: Any) -> Any:
            runner = make(*arguments)
            run = runner.run
            runner.run = lambda chunks: (time.sleep(seconds), run(chunks))[1]  # type: ignore[method-assign]
            return runner

        monkeypatch.setattr(generator, "make_runner", slow)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    Slow(monkeypatch, 0.05)
    with serving(tmp_path / "repository") as server:
        body = {"model": NAME, "prompt": "Hello", "max_tokens": 1000, "stream": stream, "ignore_eos": True}
        port = int(server.url.rpartition(":")[2])
        with Raw(port) as raw:
            raw.send(
                request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            )
            if stream:
                assert b"200 OK" in raw.socket.recv(1000)
            wait_for(lambda: metric(server, "lathe_texts_running") == 1)
            assert metric(server, "lathe_kv_cache_usage_ratio") > 0
        wait_for(lambda: metric(server, "lathe_texts_running") == 0)
        assert metric(server, "lathe_kv_cache_usage_ratio") == 0
        assert metric(server, "lathe_requests_cancelled_total") == 1, "it has not run to its end"
        assert metric(server, "nv_inference_pending_request_count") == 0


def test_a_full_queue_refuses_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(monkeypatch)
    with serving(tmp_path / "repository", queue_items=1) as server, ThreadPoolExecutor(1) as threads:
        first = threads.submit(complete, server, max_tokens=40, ignore_eos=True)
        wait_for(lambda: metric(server, "lathe_texts_running") == 1)
        error = post(server, "completions", 503, prompt="x")["error"]
        assert (error["type"], error["code"]) == ("server_error", "overloaded")
        assert first.result()["usage"]["completion_tokens"] == 40


def test_a_refused_text_leaves_the_queue_with_the_others_of_its_request(tmp_path: Path) -> None:
    with serving(tmp_path / "repository", queue_items=1) as server:
        for stream in (False, True):
            refused = post(server, "completions", 400, prompt=[[5, 6], [5, 10**8]], max_tokens=400, stream=stream)
            assert "prompt: expected tokens from 0 to" in refused["error"]["message"]
            assert complete(server, max_tokens=2)["usage"]["completion_tokens"] > 0
        wait_for(lambda: metric(server, "lathe_texts_running") == 0, seconds=5)


def test_keys_see_and_run_their_models_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = {
        name: make_key(name, scopes, models, int(time.time()), None)
        for name, scopes, models in (
            ("owner", [Scope.WRITE, Scope.READ], ["*"]), ("user", [Scope.INFER], ["tiny*"]),
            ("other", [Scope.INFER], ["x*"]),
        )
    }  # fmt: skip
    write_keys(file, [key for key, _ in made.values()])
    headers = {name: {"Authorization": f"Bearer {secret}"} for name, (_, secret) in made.items()}
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
    with service(tmp_path / "repository", generation_cache=1 << 20, threads=1, keys_file=file) as server:
        with Client(server.url, api_key=made["owner"][1]) as client:
            client.push(NAME, gguf_content())
        assert post(server, "completions", headers=headers["user"], **body)["usage"]["completion_tokens"] >= 1
        for name, status, kind in (("owner", 403, "permission_error"), ("other", 403, "permission_error")):
            assert post(server, "completions", status, headers[name], **body)["error"]["type"] == kind
        refused = post(server, "completions", 401, {"Authorization": "Bearer lathe_no"}, **body)["error"]
        assert refused["type"] == "authentication_error"
        lists = {name: httpx.get(f"{server.url}/v1/models", headers=each).json() for name, each in headers.items()}
        assert {name: len(each["data"]) for name, each in lists.items()} == {"owner": 1, "user": 1, "other": 0}
        for name, status in (("owner", 200), ("user", 200), ("other", 403)):
            assert httpx.get(f"{server.url}/v1/models/{NAME}", headers=headers[name]).status_code == status
        assert httpx.get(f"{server.url}/v1/models", verify=False).status_code == 401


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("stream", [True, False])
def test_a_quota_counts_the_tokens_of_prompts_and_texts(tmp_path: Path, stream: bool, missing: int) -> None:
    """Prompts of 5 tokens and texts of 7: the second request needs 5 tokens beside the 12 of the first one."""
    quotas = {"own": (0.01, 17 - missing), "other": (None, None)}
    made = {name: make_key(name, [Scope.INFER], ["*"], 0, None, token_quota=each) for name, each in quotas.items()}
    owner, owner_secret = make_key("owner", list(Scope), ["*"], 0, None)
    write_keys(tmp_path / "keys.json", [owner, *(key for key, _ in made.values())])
    headers = {name: {"Authorization": f"Bearer {secret}"} for name, (_, secret) in made.items()}
    body = {"model": NAME, "prompt": [5, 6, 7, 8, 9], "max_tokens": 7, "ignore_eos": True, "stream": stream}
    repository, options = tmp_path / "repository", {"generation_cache": 1 << 20, "threads": 1}
    with service(repository, keys_file=tmp_path / "keys.json", **options) as server:
        with Client(server.url, api_key=owner_secret) as client:
            client.push(NAME, gguf_content())

        def sent(name: str) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers[name], verify=False)

        answers = [sent("own") for _ in range(3)]
        assert [each.status_code for each in answers] == ([200, 200, 429] if not missing else [200, 429, 429])
        assert sent("other").status_code == 200
    error = answers[-1].json()["error"]
    assert error["type"] == "rate_limit_error" and error["code"] == "quota_exceeded"
    assert error["message"] == f"the quota of 0.01 tokens per second and client, {17 - missing} at once, is used up"
    assert int(answers[-1].headers["retry-after"]) >= 90


def test_a_rate_limit_counts_texts(tmp_path: Path) -> None:
    with serving(tmp_path / "repository", client_rate=0.01, client_burst=3) as server:
        complete(server, n=3, max_tokens=1, temperature=1)
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": NAME, "prompt": "x", "max_tokens": 1})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
