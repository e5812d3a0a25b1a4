"""The scenario `stalls`: its requests have the declared sizes, and it sees a server that stalls."""

from __future__ import annotations

import asyncio
import json
import time
import zlib

import numpy as np
import onnxruntime as ort
import pytest

from lathe.server.api.grpc.messages import INFERENCE, message_class
from loadtest import stalls, text_bodies
from loadtest.connection import Target
from loadtest.stalls import MIB, ROWS, CostlyRequest, costly_requests, large_answers, longest_wait
from tests.loadtest.fake_server import Answer, Call, serving


def test_requests_have_the_declared_sizes() -> None:
    made = {request.name: request for request in costly_requests("m")}
    zeros = made["gzip of 255 MiB of zeros"]
    assert len(zeros.body) < MIB
    assert len(zlib.decompress(zeros.body, 31)) == 255 * MIB
    lists = zlib.decompress(made["gzip of 15 MiB of empty lists, and NaN"].body, 31)
    assert lists.startswith(b"[[],[],")
    assert lists.endswith(b"[],NaN]")
    assert abs(len(lists) - 15 * MIB) < 100
    assert len(made["index of 1 MiB of empty lists"].body) <= MIB


def test_answers_are_large() -> None:
    session = ort.InferenceSession(stalls.wide())
    assert session.run(None, {"x": np.ones((ROWS, 4), np.float32)})[0].size == MIB
    for request in large_answers("m"):
        asked = json.loads(request.body)
        assert (asked["inputs"][0]["shape"], len(asked["inputs"][0]["data"])) == ([ROWS, 4], ROWS)
        assert len(request.body) < 2048


def test_texts_have_the_declared_form() -> None:
    made = {name: (body, headers) for name, body, headers in text_bodies.http_bodies()}
    binary, as_json, shared = made.values()
    length = int(binary[1]["Inference-Header-Content-Length"])
    (asked,) = json.loads(binary[0][:length])["inputs"]
    assert asked["parameters"]["binary_data_size"] == len(binary[0]) - length == 4 * asked["shape"][0]
    (asked,) = json.loads(as_json[0])["inputs"]
    assert asked["data"] == [""] * asked["shape"][0]
    (asked,) = json.loads(shared[0])["inputs"]
    with text_bodies.shared_texts() as place:
        assert asked["parameters"]["shared_memory_byte_size"] == place["byte_size"] == 4 * asked["shape"][0]
        assert (text_bodies.SHARED / str(place["key"])[1:]).stat().st_size == place["byte_size"]
    session = ort.InferenceSession(text_bodies.first_text())
    assert session.run(None, {"x": np.array(["a", "b"], object)})[0].tolist() == ["a"]


@pytest.mark.slow
def test_protocol_buffers_reads_the_grpc_messages() -> None:
    message = message_class(INFERENCE.message_types_by_name["ModelInferRequest"])
    read = {name: message.FromString(data) for name, data in text_bodies.messages("m")}
    raw, elements, numbers, wrong, inputs, parameters = read.values()
    assert raw.raw_input_contents[0] == bytes(4 * raw.inputs[0].shape[0])
    assert len(elements.inputs[0].contents.bytes_contents) == elements.inputs[0].shape[0]
    rows, width = numbers.inputs[0].shape
    assert len(numbers.inputs[0].contents.fp32_contents) == rows * width
    assert len(wrong.inputs[0].contents.int_contents) == text_bodies.LARGEST
    assert len(inputs.inputs) == text_bodies.LARGEST // 2
    assert dict(parameters.parameters)["k"].bool_param
    assert all(len(data) <= 1.01 * text_bodies.LARGEST for _, data in text_bodies.messages("m"))


def test_the_longest_wait_is_of_its_interval() -> None:
    waits = [(0.0, 0.3), (1.0, 0.1), (2.0, 0.2), (3.0, 0.9)]
    assert longest_wait(waits, 0.9, 2.5) == 0.2
    assert longest_wait(waits, 0.2, 1.5) == 0.3  # a wait that began before the interval and lasted into it
    assert longest_wait(waits, 5.0, 6.0) == 0.0


def test_a_stalled_server_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(call: Call) -> Answer:
        if call.path == "/blocks":
            time.sleep(0.4)  # noqa: ASYNC251  # on the event loop: that is the fault
        return (400 if call.method == "POST" else 200), b""

    async def measure() -> dict[str, tuple[float, float, str]]:
        requests = [CostlyRequest("blocks", "/blocks", b"x"), CostlyRequest("passes", "/passes", b"x")]
        async with serving(handle) as url:
            return await asyncio.to_thread(stalls._measure, Target(url), requests)

    monkeypatch.setattr(stalls, "ROUNDS", 1)
    found = asyncio.run(measure())
    assert {name: status for name, (_, _, status) in found.items()} == {"blocks": "HTTP 400", "passes": "HTTP 400"}
    assert found["blocks"][0] + found["blocks"][1] > 0.35
    assert found["blocks"][0] > found["passes"][0]
