"""Callers that come and go at random: `python -m loadtest generation callers FILE.gguf [--minutes 10]`.

A server of its own gets the model. First each of the requests runs alone. Then 16 callers send them in any order, with
and without streaming, and leave some streams in the middle. Meanwhile there are storms of requests whose callers leave
at once, and requests that cannot succeed. Then the server is killed and started again. Promises:

- Every text equals the one that its request gets alone, or at the first difference the log-probabilities of both tokens
  were closer than 1e-4, alone and in the other run.
- A request that cannot succeed gets a clear error of its own: a prompt longer than the window, a grammar that cannot
  end, a broken chat template, a GGUF file with lying sizes.
- Afterwards no page of the cache is in use, and the server has no more file descriptors than before. Memory does not
  grow: the second half of the time adds at most 5%.
- Texts are the same after a kill and a restart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from lathe.server.client import ApiError, Client
from loadtest.chaos.process import Server
from loadtest.generation.prompts import BEGINNINGS, QUESTIONS

MODEL, BROKEN = "text", "broken"
CLOSE, GROWTH = 1e-4, 1.05
_LEAVES = 0.3  # the share of streams whose caller leaves
_STORM = 40  # requests
_EVERY_S = 8.0  # between two disturbances
_LONG = 60  # seconds for one text
_TYPE_OF_TEXT = 8  # of a value in a GGUF file


@dataclass(frozen=True)
class Text:
    """A text with its tokens and their log-probabilities, and those of the second choices."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    seconds: tuple[float, ...]  # of the second choices
    reason: str | None


@dataclass
class Outcome:
    """Counts of events, by kind; `wrong` has descriptions of broken promises."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count(self, kind: str) -> None:
        self.counts[kind] += 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest generation callers", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=int, metavar="MIB", help="memory for keys and values of each model")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(_run(args, Path(folder)))
    table = Table("event", "count")
    for kind, count in sorted(outcome.counts.items()):
        table.add_row(kind, str(count))
    console = Console()
    console.print(table)
    for wrong in outcome.wrong[:20]:
        console.print(f"[red]broken: {wrong}")
    return int(bool(outcome.wrong))


def requests() -> list[dict[str, Any]]:
    """Chats and completions: greedy and sampled, short and long prompts, with and without a grammar."""
    rng, found = random.Random(1), []
    long = " ".join(QUESTIONS)
    for index, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question if index % 3 else f"{long} {question}"}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": rng.randint(4, 60), "top_logprobs": 2}
        body |= {"temperature": 0} if index % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": index}
        if index % 5 == 1:
            schema = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 20}}}
            shape = {"name": "answer", "schema": {**schema, "required": ["answer"], "additionalProperties": False}}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        found.append({"path": "chat/completions", "body": {**body, "logprobs": True}})
    for index, text in enumerate(BEGINNINGS):
        body = {"prompt": text * (1 + 8 * index), "max_tokens": rng.randint(4, 60), "temperature": 0, "logprobs": 2}
        found.append({"path": "completions", "body": body})
    return found


async def _run(args: argparse.Namespace, folder: Path) -> Outcome:
    settings = {} if args.cache is None else {"LATHE_GENERATION_CACHE": str(args.cache << 20)}
    outcome, server = Outcome(), Server(folder, settings)
    server.repository.mkdir()
    try:
        await server.start()
        await server.await_ready(time.monotonic())
        url = f"http://127.0.0.1:{server.target.port}"
        await asyncio.to_thread(_publish, url, args.model, folder)
        async with httpx.AsyncClient(base_url=f"{url}/v1/", timeout=_LONG, limits=_LIMITS) as client:
            alone = [await _ask(client, each) for each in requests()]
            before = await _lowest_descriptors(server, 0)
            await _traffic(client, alone, args, outcome, server, url, folder)
            await _await_idle(client, url, outcome)
            after = await _lowest_descriptors(server, before)
        outcome.counts |= Counter({"file descriptors before": before, "file descriptors afterwards": after})
        if after > before:
            outcome.wrong.append(f"file descriptors grew from {before} to {after}")
        await server.kill()
        await server.start()
        await server.await_ready(time.monotonic())
        async with httpx.AsyncClient(base_url=f"{url}/v1/", timeout=_LONG) as client:
            for index, each in enumerate(requests()):
                _compare(await _ask(client, each), alone[index], f"request {index} after the restart", outcome)
        outcome.counts["tracebacks"] = server.tracebacks()
        if server.tracebacks():
            outcome.wrong.append(f"the server's log has a traceback: {server.log.read_text()[-1500:]}")
    finally:
        await server.end()
    return outcome


_LIMITS = httpx.Limits(max_connections=200, max_keepalive_connections=0)


def _publish(url: str, model: Path, folder: Path) -> None:
    """Push the model, and a copy whose chat template is broken."""
    with Client(url) as client:
        client.push(MODEL, model)
        copy = folder / "broken.gguf"
        shutil.copyfile(model, copy)
        _break_template(copy)
        client.push(BROKEN, copy)


def _break_template(path: Path) -> None:
    """Overwrite the first bytes of the chat template in a GGUF file by a block without an end."""
    data = path.read_bytes()[: 64 << 20]
    key = b"tokenizer.chat_template" + struct.pack("<I", _TYPE_OF_TEXT)
    at = data.index(key) + len(key) + 8
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"{% if %}")


async def _ask(client: httpx.AsyncClient, request: Mapping[str, Any]) -> Text:
    answer = await client.post(request["path"], json={"model": MODEL, **request["body"]})
    answer.raise_for_status()
    return _text_of(answer.json()["choices"][0])


def _text_of(choice: Mapping[str, Any]) -> Text:
    logprobs = choice["logprobs"]
    if "message" in choice:
        tokens = [each["token"] for each in logprobs["content"]]
        chosen = [each["logprob"] for each in logprobs["content"]]
        tops = [[top["logprob"] for top in each["top_logprobs"]] for each in logprobs["content"]]
        text = choice["message"]["content"] or ""
    else:
        tokens, chosen = logprobs["tokens"], logprobs["token_logprobs"]
        tops = [list(top.values()) for top in logprobs["top_logprobs"]]
        text = choice["text"]
    seconds = [sorted(top)[-2] if len(top) > 1 else float("-inf") for top in tops]
    return Text(text, tuple(tokens), tuple(chosen), tuple(seconds), choice["finish_reason"])


def _compare(found: Text, alone: Text, where: str, outcome: Outcome) -> None:
    if found.text == alone.text and found.reason == alone.reason:
        outcome.count("texts that are equal")
    else:
        _judge_difference(found, alone, where, outcome)


def _compare_beginning(found: Text, alone: Text, where: str, outcome: Outcome) -> None:
    if not alone.text.startswith(found.text):
        _judge_difference(found, alone, where, outcome)


def _judge_difference(found: Text, alone: Text, where: str, outcome: Outcome) -> None:
    """A difference is right only after a token to which another one was as likely, in both runs."""
    pairs = zip(found.tokens, alone.tokens, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if first is not None:
        gaps = (text.logprobs[first] - text.seconds[first] for text in (found, alone))
        if max(abs(gap) for gap in gaps) < CLOSE:
            outcome.count("texts that differ after a tie")
            return
    outcome.wrong.append(f"{where}: token {first}: {found.text[:200]!r} ({found.reason}), alone {alone.text[:200]!r}")


async def _traffic(
    client: httpx.AsyncClient, alone: list[Text], args: argparse.Namespace, outcome: Outcome, server: Server, url: str,
    folder: Path,
) -> None:  # fmt: skip
    until = time.monotonic() + 60 * args.minutes
    callers = [
        asyncio.create_task(_caller(client, alone, random.Random(f"{args.seed}/{number}"), until, outcome))
        for number in range(args.callers)
    ]
    disturbing = asyncio.create_task(_disturb(client, url, folder, until, outcome))
    series = asyncio.create_task(_watch_memory(server, outcome))
    await asyncio.sleep(30 * args.minutes)
    half = _resident(server)
    await asyncio.gather(*callers, disturbing)
    series.cancel()
    end = _resident(server)
    outcome.counts |= Counter({"MiB in the middle": half >> 20, "MiB at the end": end >> 20})
    if end > GROWTH * half:
        outcome.wrong.append(f"memory grew from {half >> 20} to {end >> 20} MiB")


async def _caller(
    client: httpx.AsyncClient, alone: list[Text], rng: random.Random, until: float, outcome: Outcome
) -> None:
    all_requests = requests()
    while time.monotonic() < until:
        await asyncio.sleep(rng.expovariate(4))
        index = rng.randrange(len(alone))
        request, where = all_requests[index], f"request {index}"
        try:
            if rng.random() < 0.4:
                _compare(await _ask(client, request), alone[index], where, outcome)
            else:
                leaves = rng.randint(0, 12) if rng.random() < _LEAVES else None
                await _stream(client, request, alone[index], leaves, where, outcome)
        except httpx.HTTPError as error:
            outcome.wrong.append(f"{where}: {type(error).__name__} {error}")


async def _stream(
    client: httpx.AsyncClient, request: Mapping[str, Any], alone: Text, leaves: int | None, where: str, outcome: Outcome
) -> None:
    """Read a stream to its end, or its first `leaves` events."""
    body = {"model": MODEL, **request["body"], "stream": True}
    text, reason, events = "", None, 0
    tokens: list[str] = []
    logprobs: list[float] = []
    seconds: list[float] = []
    async with client.stream("POST", request["path"], json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if leaves is not None and events >= leaves:
                outcome.count("callers that left")
                begun = Text(text, tuple(tokens), tuple(logprobs), tuple(seconds), None)
                _compare_beginning(begun, alone, f"{where}, left", outcome)
                return
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            events += 1
            for choice in json.loads(line[6:])["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reason = choice["finish_reason"] or reason
                if choice.get("logprobs"):
                    part = _text_of({"message": {"content": ""}, **choice} if "delta" in choice else choice)
                    tokens += part.tokens
                    logprobs += part.logprobs
                    seconds += part.seconds
    _compare(Text(text, tuple(tokens), tuple(logprobs), tuple(seconds), reason), alone, f"{where}, streamed", outcome)


async def _disturb(client: httpx.AsyncClient, url: str, folder: Path, until: float, outcome: Outcome) -> None:
    """In turns: a storm of requests whose callers leave, and each request that cannot succeed."""
    while time.monotonic() < until:
        for disturb in (_storm, _long_prompt, _endless_grammar, _broken_template, _lying_sizes):
            await asyncio.sleep(_EVERY_S / 5)
            await disturb(client, url, folder, outcome)


async def _storm(client: httpx.AsyncClient, url: str, folder: Path, outcome: Outcome) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "stream": True}

    async def leave() -> None:
        with suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(random.uniform(0.01, 0.3)), client.stream("POST", "completions", json=body):
                await asyncio.sleep(0.3)
        outcome.count("callers that left in storms")

    await asyncio.gather(*(leave() for _ in range(_STORM)))


async def _long_prompt(client: httpx.AsyncClient, url: str, folder: Path, outcome: Outcome) -> None:
    body = {"model": MODEL, "prompt": [5] * 20_000, "max_tokens": 5}
    answer = await client.post("completions", json=body)
    _expect(answer, 400, "context_length_exceeded", "a prompt longer than the window", outcome)


async def _endless_grammar(client: httpx.AsyncClient, url: str, folder: Path, outcome: Outcome) -> None:
    """A schema that each object contains again: its texts have no end, so they end at their limit, or get an error."""
    again = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "again", "schema": again}}
    messages = [{"role": "user", "content": "Begin."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 30, "response_format": shape}
    answer = await client.post("chat/completions", json=body)
    if answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length":
        outcome.count("refused: a grammar that cannot end")
    else:
        _expect(answer, 400, "response_format", "a grammar that cannot end", outcome)


async def _broken_template(client: httpx.AsyncClient, url: str, folder: Path, outcome: Outcome) -> None:
    body = {"model": BROKEN, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    answer = await client.post("chat/completions", json=body)
    _expect(answer, 422, "chat template", "a broken chat template", outcome)


async def _lying_sizes(client: httpx.AsyncClient, url: str, folder: Path, outcome: Outcome) -> None:
    """A header that promises more tensors and metadata than the file has."""
    for tensors, fields in ((1 << 60, 1), (1, 1 << 60), (3, 0)):
        content = b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + bytes(200)
        refused = await asyncio.to_thread(_push_error, url, content)
        if refused is None or refused.status != 422 or "model.gguf" not in str(refused):
            outcome.wrong.append(f"a GGUF file with lying sizes: {refused}")
        else:
            outcome.count("refused: a GGUF file with lying sizes")


def _push_error(url: str, content: bytes) -> ApiError | None:
    with Client(url) as client:
        try:
            client.push("lying", content)
        except ApiError as error:
            return error
    return None


def _expect(answer: httpx.Response, status: int, words: str, what: str, outcome: Outcome) -> None:
    if answer.status_code == status and words in answer.text:
        outcome.count(f"refused: {what}")
    else:
        outcome.wrong.append(f"{what}: expected {status} with {words!r}, got {answer.status_code} {answer.text[:300]}")


async def _await_idle(client: httpx.AsyncClient, url: str, outcome: Outcome) -> None:
    """No text runs or waits, and no page is in use, after at most ten seconds."""
    names = ("lathe_texts_running", "lathe_texts_waiting", "lathe_kv_cache_usage_ratio")
    for _ in range(100):
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
        used = [line for line in lines if line.startswith(names) and float(line.rsplit(" ", 1)[1])]
        if not used:
            outcome.count("no page in use at the end")
            return
        await asyncio.sleep(0.1)
    outcome.wrong.append(f"pages are in use without texts: {used}")


async def _watch_memory(server: Server, outcome: Outcome) -> None:
    """Note the resident memory after each minute."""
    for minute in itertools.count(1):
        await asyncio.sleep(60)
        outcome.counts[f"MiB after minute {minute:2}"] = _resident(server) >> 20


async def _lowest_descriptors(server: Server, wanted: int) -> int:
    """The number of file descriptors of the server's process, the least within five seconds; not below `wanted`."""
    least = len(os.listdir(f"/proc/{server.pid}/fd"))
    for _ in range(50):
        if least <= wanted:
            break
        await asyncio.sleep(0.1)
        least = min(least, len(os.listdir(f"/proc/{server.pid}/fd")))
    return least


def _resident(server: Server) -> int:
    """The resident memory of the server's process in bytes (Linux)."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))
