"""Sounds become texts: those of Transformers, through the client library of OpenAI and plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from lathe.core.language.generation import generator
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from tests.core.language.speech import CASES, RATE, sound, write_speech
from tests.core.language.test_sound import wav
from tests.core.language.test_transcriber import EXPECTED
from tests.server.generation.test_openai_api import Slow, complete, metric
from tests.server.generation.tiny_model import NAME, gguf_content
from tests.server.running import Raw, wait_for
from tests.server.service import Service, service

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("transcription")
    with service(folder / "repository", generation_cache=1 << 20, threads=1) as running, running.client() as client:
        client.push("speech", write_speech(folder))
        client.push(NAME, gguf_content())
        yield running


@pytest.fixture(scope="module")
def sdk(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def file_of(samples: Any) -> bytes:
    return wav(np.round(samples * 32768).astype(int))


def text_of(name: str) -> str:
    return bytes(EXPECTED[f"{name}/tokens"].tolist()).decode().lstrip()


def transcribed(server: Service, samples: Any = None, status: int = 200, **fields: Any) -> httpx.Response:
    content = file_of(sound(0) if samples is None else samples)
    answer = httpx.post(
        server.url + PATH, data={"model": "speech", **fields}, files={"file": ("a.wav", content)}, timeout=60,
        verify=False,
    )  # fmt: skip
    assert answer.status_code == status, answer.text
    return answer


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_transformers(sdk: openai.OpenAI, name: str) -> None:
    number, language, before = CASES[name]
    options: dict[str, Any] = {"language": language} if language else {}
    options |= {"prompt": before} if before else {}
    file = ("sound.wav", file_of(sound(number)))
    whole = sdk.audio.transcriptions.create(file=file, model="speech", response_format="verbose_json", **options)
    assert whole.text == text_of(name)
    assert whole.language == (language or "de") and whole.duration == 0.9
    deltas = []
    for event in sdk.audio.transcriptions.create(file=file, model="speech", stream=True, **options):
        if event.type == "transcript.text.delta":
            deltas.append(event.delta)
    assert event.type == "transcript.text.done"
    assert "".join(deltas) == event.text == whole.text
    assert len(deltas) > 10


def test_forms_of_the_answer(server: Service) -> None:
    text = text_of("english")
    plain = transcribed(server, language="en", response_format="text")
    assert plain.text == text + "\n" and plain.headers["content-type"].startswith("text/plain")
    assert transcribed(server, language="en").json() == {"text": text, "usage": {"type": "duration", "seconds": 1}}


def test_a_long_sound_is_the_texts_of_its_pieces(server: Service) -> None:
    """The model takes one second; pieces are cut in the silence between the sounds."""
    gap = np.zeros(int(0.08 * RATE), np.float32)
    long = np.concatenate([sound(0), gap, sound(1), gap, sound(2)])
    found = transcribed(server, long, language="en").json()["text"]
    pieces = [transcribed(server, long[start:stop], language="en").json()["text"] for start, stop in _cuts(long)]
    assert found == "".join(pieces) and len(pieces) == 3
    assert len(set(pieces)) == 3
    detected = transcribed(server, long, response_format="verbose_json").json()
    assert detected["language"] == "de" and detected["text"] != found
    with ThreadPoolExecutor(4) as threads:
        assert {
            each.json()["text"] for each in threads.map(lambda _: transcribed(server, long, language="en"), "1234")
        } == {found}


def _cuts(long: Any) -> list[tuple[int, int]]:
    """The places of the pieces: the middle of the quietest 53 samples in the last tenth of each second."""
    found, start = [], 0
    while len(long) - start > RATE:
        searched = long[start + RATE - RATE // 10 : start + RATE].astype(np.float64)
        energies = [np.square(searched[at : at + 53]).sum() for at in range(0, len(searched) - 52, 53)]
        stop = start + RATE - RATE // 10 + int(np.argmin(energies)) * 53 + 26
        found.append((start, stop))
        start = stop
    return [*found, (start, len(long))]


def test_other_rates(server: Service) -> None:
    """A sound that is resampled to what it was gives nearly the same samples, so its text begins alike."""
    from scipy.signal import resample_poly

    from lathe.core.language.resampling import resampled

    fast = resample_poly(sound(0).astype(np.float64), 3, 1) * 0.5
    content = wav(np.round(fast * 32768).astype(int), rate=48_000)
    again = resampled((np.round(fast * 32768) / 32768).astype(np.float32), 48_000, RATE)
    options: Any = {"data": {"model": "speech", "language": "en"}, "verify": False, "timeout": 60}
    answer = httpx.post(server.url + PATH, files={"file": ("a.wav", content)}, **options)
    expected = transcribed(server, again, language="en").json()["text"]
    assert answer.json()["text"][:8] == expected[:8]


def test_temperature_and_seed(server: Service) -> None:
    texts = [transcribed(server, language="en", temperature=1, seed=seed).json()["text"] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"language": "xx"}, 400, "language: expected one of de, en, got 'xx'"),
        ({"response_format": "srt"}, 400, "response_format: expected 'json', 'text' or 'verbose_json', got 'srt'"),
        ({"temperature": "hot"}, 400, "temperature: expected a number"),
        ({"model": NAME}, 400, "model: expected one that transcribes sound, got 'tiny'"),
        ({"model": "none"}, 404, "unknown model 'none'"),
        ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities[]"),
        ({"model": ["speech", "speech"]}, 400, "model: expected one value, got 2"),
    ],
)
def test_errors_in_fields(server: Service, fields: dict[str, Any], status: int, message: str) -> None:
    assert message in transcribed(server, None, status, **fields).json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "body", "status", "message"),
    [
        ("application/json", b"{}", 415, "expected multipart/form-data, got 'application/json'"),
        ("multipart/form-data", b"", 400, "expected a boundary of 1 to 70 characters"),
        ("multipart/form-data; boundary=" + "x" * 71, b"", 400, "expected a boundary"),
        ("multipart/form-data; boundary=x", b"", 400, "begins with its boundary"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n\r\n", 400, "end with its boundary"),
        ("multipart/form-data; boundary=x", b"--x\r\na: b\r\n\r\n\r\n--x--", 400, "a name in the content-disposition"),
        ("multipart/form-data; boundary=x", b'--x\r\na:b;name="m"\r\n\r\n\r\n' * 66 + b"--x--", 400, "name in the"),
        ("multipart/form-data; boundary=x", b"--x--", 400, "file: is missing"),
    ],
)
def test_damaged_forms(server: Service, kind: str, body: bytes, status: int, message: str) -> None:
    answer = httpx.post(server.url + PATH, content=body, headers={"content-type": kind}, verify=False)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"fLaC" + bytes(200), b"RIFF\0\0\0\0WAVE"])
def test_files_of_other_formats(server: Service, content: bytes) -> None:
    form: Any = {"data": {"model": "speech"}, "files": {"file": ("a", content)}}
    answer = httpx.post(server.url + PATH, verify=False, **form)
    assert answer.status_code == (400 if content.startswith(b"RIFF") else 415)
    assert "file: expected a WAV file of PCM" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_too_large_files(server: Service) -> None:
    form: Any = {"data": {"model": "speech"}, "files": {"file": ("a", bytes(26 << 20))}}
    assert httpx.post(server.url + PATH, verify=False, timeout=60, **form).status_code == 413


def test_prompts_are_refused(server: Service) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "speech", "prompt": "Hello"}, verify=False)
    assert answer.status_code == 400
    assert "transcribes sound, and answers no prompts" in answer.json()["error"]["message"]
    assert complete(server, max_tokens=2)["usage"]["completion_tokens"] > 0


def test_a_key_is_checked_before_the_file_is_sent(tmp_path: Path) -> None:
    key, secret = make_key("other", [Scope.INFER], ["other*"], 0, None)
    write_keys(tmp_path / "keys.json", [key])
    with service(tmp_path / "repository", keys_file=tmp_path / "keys.json") as server:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=x\r\n".encode()
        with Raw(int(server.url.rpartition(":")[2])) as raw:
            raw.send(head + b"content-length: 20000000\r\n\r\n--x")
            assert b"401" in raw.socket.recv(200)
        answer = httpx.post(
            server.url + PATH, data={"model": "speech"}, files={"file": ("a.wav", file_of(sound(0)))}, verify=False,
            headers={"authorization": f"Bearer {secret}"},
        )  # fmt: skip
        assert answer.status_code == 403


def test_a_client_that_leaves_frees_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for one text at a time: the next client gets its text when the first one has left."""
    monkeypatch.setattr(generator, "sequence_count", lambda *_: 1)
    with service(tmp_path / "repository", generation_cache=1 << 20, threads=1) as server, server.client() as client:
        Slow(monkeypatch, 0.05)
        client.push("speech", write_speech(tmp_path))
        form: Any = {"data": {"model": "speech", "language": "en", "stream": "true"}, "verify": False, "timeout": 60}
        with httpx.stream("POST", server.url + PATH, files={"file": ("a", file_of(sound(0)))}, **form) as first:
            assert "transcript.text.delta" in next(first.iter_lines())
            assert metric(server, "lathe_texts_running") == 1
        wait_for(lambda: metric(server, "lathe_texts_running") == 0)
        assert metric(server, "lathe_requests_cancelled_total") == 1
        assert transcribed(server, sound(0)[:4000], language="en").json()["text"]
        assert json.loads(transcribed(server, language="en").text)["text"] == text_of("english")
