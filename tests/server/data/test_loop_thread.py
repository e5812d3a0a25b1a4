"""Nothing that grows with a body is done on the event loop: whatever reads bodies is watched, for every way in."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb

from server.api import codec, jsondata, jsonparts, reading
from server.api.grpc import sent, tensors
from server.api.readers import HERE
from tests.server.data.fakes import echo
from tests.server.data.running import Running
from tests.server.grpc.wire import grpc_serving, stub

COUNT = 2 * HERE
READERS = [
    (reading, "inflate"),
    (orjson, "loads"),
    (json, "loads"),
    (jsondata, "to_array"),
    (jsonparts, "split"),
    (jsonparts, "numbers"),
    (codec, "split"),
    (codec, "unpack_strings"),
    (tensors, "_numbers"),
    (tensors, "pack_strings"),
    (sent, "_parsed"),
]


class Watched:
    """Calls of the readers: their names and how much they were given, on the event loop and beside it."""

    def __init__(self) -> None:
        self.here: list[tuple[str, int]] = []
        self.beside: list[tuple[str, int]] = []

    def watch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            size = rest[1] - rest[0] if name == "numbers" else len(first)
            thread = threading.current_thread().name
            if thread.startswith("lathe-reader"):
                self.beside.append((name, size))
            elif _runs_a_loop():
                self.here.append((name, size))
            return real(first, *rest, **named)

        return call


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched()
    for owner, name in READERS:
        monkeypatch.setattr(owner, name, made.watch(name, getattr(owner, name)))
    return made


@pytest.fixture
def served() -> Iterator[tuple[Running, str]]:
    kinds = ("FP32", "BOOL", "BYTES", "INT64")
    with grpc_serving({kind: echo(kind, max_batch=1 << 20) for kind in kinds}) as found:
        yield found


def document(data: list[Any], kind: str) -> bytes:
    tensor = {"name": "x", "datatype": kind, "shape": [COUNT, 1], "data": data}
    return json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()


NUMBERS = document([1.5] * COUNT, "FP32")
HTTP = {
    "numbers": ("FP32", NUMBERS, ""),
    "numbers as gzip": ("FP32", gzip.compress(NUMBERS), "gzip"),
    "numbers as deflate": ("FP32", zlib.compress(NUMBERS), "deflate"),
    "a number that is none": ("FP32", NUMBERS.replace(b"[1.5", b"[null", 1), ""),
    "texts": ("BYTES", document(["a"] * COUNT, "BYTES"), ""),
    "lists": ("FP32", b"[" + b"[]," * COUNT + b"1]", ""),
    "NaN": ("FP32", b"[" + b"[]," * COUNT + b"NaN]", ""),
    "no JSON": ("FP32", b"[]," * COUNT, ""),
    "a long shell": ("FP32", NUMBERS.replace(b'"parameters"', b'"' + b"p" * COUNT + b'": 1, "parameters"'), ""),
}


@pytest.mark.parametrize("tail", ["", "?a"], ids=["direct", "asgi"])
@pytest.mark.parametrize("name", HTTP)
def test_bodies_over_http(name: str, tail: str, served: tuple[Running, str], watched: Watched) -> None:
    model, body, coding = HTTP[name]
    headers = {"Content-Encoding": coding} if coding else {}
    answer = served[0].ask("POST", f"/v2/models/{model}/infer{tail}", body, headers)
    assert answer.status in (200, 400, 413)
    assert [call for call in watched.here if call[1] > HERE] == []
    assert watched.beside


@pytest.mark.parametrize("kind", ["BOOL", "BYTES"])
def test_binary_tensors_over_http(kind: str, served: tuple[Running, str], watched: Watched) -> None:
    blob = bytes(COUNT) if kind == "BOOL" else b"\1\0\0\0a" * COUNT
    item = {"name": "x", "datatype": kind, "shape": [COUNT, 1], "parameters": {"binary_data_size": len(blob)}}
    answer = served[0].infer(kind, {"inputs": [item], "parameters": {"binary_data_output": True}}, blob)
    assert (answer.status, answer.body.endswith(blob)) == (200, True)
    assert [call for call in watched.here if call[1] > HERE and call[0] != "pack_strings"] == []


def test_messages_over_grpc(served: tuple[Running, str], watched: Watched) -> None:
    Input = pb.ModelInferRequest.InferInputTensor
    values = pb.InferTensorContents(int64_contents=[1] * COUNT)
    texts = b"\1\0\0\0a" * COUNT
    messages = [
        pb.ModelInferRequest(
            model_name="INT64", inputs=[Input(name="x", datatype="INT64", shape=[COUNT, 1], contents=values)]
        ),
        pb.ModelInferRequest(
            model_name="BYTES",
            inputs=[Input(name="x", datatype="BYTES", shape=[COUNT, 1])],
            raw_input_contents=[texts],
        ),
    ]
    with stub(served[1]) as service:
        for message in messages:
            assert service.ModelInfer(message, timeout=30).raw_output_contents
            assert next(service.ModelStreamInfer(iter([message]), timeout=30)).infer_response.raw_output_contents
    read = [call for call in watched.here if call[1] > HERE and call[0] != "pack_strings"]  # which writes the answer
    assert read == []
    assert {"_parsed", "_numbers", "unpack_strings"} <= {name for name, _ in watched.beside}
    assert np.sum([size for name, size in watched.beside if name == "_numbers"]) == 2 * COUNT
