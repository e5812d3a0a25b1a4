"""No work that grows with a body happens on the event loop.

The functions that read bodies are watched on every path. For every kind of answer the test measures how long the
loop's thread computed without a pause."""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import orjson
import pytest
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from lathe.server.api.codec import codec, input_slots, json_split, json_tensors, payloads
from lathe.server.api.grpc import split_message, tensors
from lathe.server.api.inference import body_reader
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.datatypes import object_array
from lathe.server.types import TensorSpec
from tests.server.api.grpc.wire import grpc_serving, stub
from tests.server.fakes import FakeModel, echo
from tests.server.running import Running

COUNT = 2 * INLINE_BYTES
READERS = [
    (body_reader, "inflate"),
    (orjson, "loads"),
    (json, "loads"),
    (json_tensors, "to_array"),
    (json_split, "split_json"),
    (json_split, "parse_numbers"),
    (codec, "split_json"),
    (input_slots, "unpack_in_steps"),
    (tensors, "_numbers"),
    (tensors, "pack_strings"),
    (payloads, "pack_in_steps"),
    (split_message, "_parse"),
    (json_tensors, "_elements"),
    (codec, "classify_steps"),
]


class Watched:
    """Records calls of the reading functions: their names and sizes, on the event loop and on other threads."""

    def __init__(self) -> None:
        self.here: list[tuple[str, int]] = []
        self.beside: list[tuple[str, int]] = []

    def watch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            size = rest[1] - rest[0] if name == "parse_numbers" else getattr(first, "size", None) or len(first)
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
    with grpc_serving({kind: echo(kind, max_batch=1 << 23) for kind in kinds}, max_body=64 << 20) as found:
        yield found


def document(data: list[Any], kind: str) -> bytes:
    tensor = {"name": "x", "datatype": kind, "shape": [COUNT, 1], "data": data}
    return json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()


NUMBERS = document([1.5] * COUNT, "FP32")
HTTP = {
    "numbers": ("FP32", NUMBERS, ""),
    "numbers as gzip": ("FP32", gzip.compress(NUMBERS), "gzip"),
    "numbers as deflate": ("FP32", zlib.compress(NUMBERS), "deflate"),
    "null instead of a number": ("FP32", NUMBERS.replace(b"[1.5", b"[null", 1), ""),
    "texts": ("BYTES", document(["a"] * COUNT, "BYTES"), ""),
    "lists": ("FP32", b"[" + b"[]," * COUNT + b"1]", ""),
    "NaN": ("FP32", b"[" + b"[]," * COUNT + b"NaN]", ""),
    "no JSON": ("FP32", b"[]," * COUNT, ""),
    "a long document around the data": (
        "FP32",
        NUMBERS.replace(b'"parameters"', b'"' + b"p" * COUNT + b'": 1, "parameters"'),
        "",
    ),
}


@pytest.mark.parametrize("tail", ["", "?a"], ids=["direct", "asgi"])
@pytest.mark.parametrize("name", HTTP)
def test_bodies_over_http_are_read_on_threads(
    name: str, tail: str, served: tuple[Running, str], watched: Watched
) -> None:
    model, body, coding = HTTP[name]
    headers = {"Content-Encoding": coding} if coding else {}
    answer = served[0].ask("POST", f"/v2/models/{model}/infer{tail}", body, headers)
    assert answer.status in (200, 400, 413)
    assert [call for call in watched.here if call[1] > INLINE_BYTES] == []
    assert watched.beside


@pytest.mark.parametrize("kind", ["BOOL", "BYTES"])
def test_binary_tensors_over_http_are_read_on_threads(kind: str, served: tuple[Running, str], watched: Watched) -> None:
    blob = bytes(COUNT) if kind == "BOOL" else b"\1\0\0\0a" * COUNT
    item = {"name": "x", "datatype": kind, "shape": [COUNT, 1], "parameters": {"binary_data_size": len(blob)}}
    answer = served[0].infer(kind, {"inputs": [item], "parameters": {"binary_data_output": True}}, blob)
    assert (answer.status, answer.body.endswith(blob)) == (200, True)
    assert [call for call in watched.here if call[1] > INLINE_BYTES] == []


def test_messages_over_grpc_are_read_on_threads(served: tuple[Running, str], watched: Watched) -> None:
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
    assert [call for call in watched.here if call[1] > INLINE_BYTES] == []
    assert {"_parse", "_numbers", "unpack_in_steps", "pack_in_steps"} <= {name for name, _ in watched.beside}
    assert np.sum([size for name, size in watched.beside if name == "_numbers"]) == 2 * COUNT


MIB = 1 << 20
LONGEST = 0.03  # seconds of processor time: many times what the loop needs, a fraction of what such answers cost


class Pulse:
    """The longest time that a loop's thread computed between two ticks of its clock.

    It counts the thread's processor time, so that other work on this machine does not show."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest = 0.0
        self._loop = loop
        self._over = threading.Event()
        self._last = 0.0

    def __enter__(self) -> Pulse:
        self._loop.call_soon_threadsafe(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _begin(self) -> None:
        self._last = time.thread_time()
        self._tick()

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest, self._last = max(self.longest, now - self._last), now
        if not self._over.is_set():
            self._loop.call_later(0.001, self._tick)


def large_answer_maker(datatype: str, output: np.ndarray) -> FakeModel:
    """A model with a large answer to any request."""
    shape = (-1,) * output.ndim
    inputs, outputs = [TensorSpec("x", "FP32", (-1, 4))], [TensorSpec("y", datatype, shape)]
    return FakeModel(lambda _: {"y": output}, inputs, outputs, batchable=False)


NUMBERS_OUT = np.random.default_rng(0).random((MIB, 1), np.float32)
TEXTS_OUT = object_array([b"%d" % number for number in range(MIB)], (MIB, 1))
MAKERS = {
    "floats": lambda: large_answer_maker("FP32", NUMBERS_OUT),
    "odd": lambda: large_answer_maker("FP64", np.where(NUMBERS_OUT < 0.5, np.nan, NUMBERS_OUT.astype(np.float64))),
    "integers": lambda: large_answer_maker("INT64", np.arange(MIB).reshape(1, MIB)),
    "booleans": lambda: large_answer_maker("BOOL", np.zeros((1, 4 * MIB), np.bool_)),
    "texts": lambda: large_answer_maker("BYTES", TEXTS_OUT),
    "long text": lambda: large_answer_maker("BYTES", object_array(["ü" * (4 * MIB)], (1, 1))),
    "scattered": lambda: large_answer_maker("FP32", NUMBERS_OUT.reshape(1024, 1024).repeat(4, axis=0).T),
}
BINARY = {"parameters": {"binary_data_output": True}}
ANSWERS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "floats as JSON": ("floats", {}, {}),
    "NaN as JSON": ("odd", {}, {}),
    "integers as JSON": ("integers", {}, {}),
    "booleans as JSON": ("booleans", {}, {}),
    "texts as JSON": ("texts", {}, {}),
    "a long text as JSON": ("long text", {}, {}),
    "floats": ("floats", BINARY, {}),
    "texts": ("texts", BINARY, {}),
    "a long text": ("long text", BINARY, {}),
    "scattered rows": ("scattered", BINARY, {}),
    "floats as gzip": ("floats", BINARY, {"Accept-Encoding": "gzip"}),
    "floats as deflate": ("floats", BINARY, {"Accept-Encoding": "deflate"}),
    "JSON as gzip": ("integers", {}, {"Accept-Encoding": "gzip"}),
    "texts as gzip": ("texts", BINARY, {"Accept-Encoding": "gzip"}),
    "classes": ("integers", {"outputs": [{"name": "y", "parameters": {"classification": 5}}]}, {}),
    "all classes": ("floats", {"outputs": [{"name": "y", "parameters": {"classification": 1 << 20}}]}, {}),
}


@pytest.fixture(scope="module")
def answering() -> Iterator[tuple[Running, str]]:
    with grpc_serving({name: make() for name, make in MAKERS.items()}, max_body=256 * MIB) as found:
        yield found


@contextmanager
def loop_stays_responsive(running: Running) -> Iterator[None]:
    with Pulse(running.server.servers[0].get_loop()) as pulse:
        yield
    assert pulse.longest < LONGEST


@pytest.mark.sample(5)
@pytest.mark.parametrize("tail", ["", "?a"], ids=["direct", "asgi"])
@pytest.mark.parametrize("name", ANSWERS)
def test_large_answers_over_http_do_not_occupy_the_loop(name: str, tail: str, answering: tuple[Running, str]) -> None:
    running, (model, asked, headers) = answering[0], ANSWERS[name]
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [item], **asked}).encode()
    with loop_stays_responsive(running):
        answer = running.ask("POST", f"/v2/models/{quote(model)}/infer{tail}", body, headers)
    assert answer.status == 200
    assert len(answer.body) > MIB // 2 or name == "classes"


@pytest.mark.parametrize("model", MAKERS)
def test_large_answers_over_grpc_do_not_occupy_the_loop(model: str, answering: tuple[Running, str]) -> None:
    running, address = answering
    item = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])
    message = pb.ModelInferRequest(model_name=model, inputs=[item], raw_input_contents=[bytes(16)])
    with grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        service = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with loop_stays_responsive(running):
            one = service.ModelInfer(message, timeout=60).raw_output_contents[0]
            other = next(service.ModelStreamInfer(iter([message]), timeout=60)).infer_response.raw_output_contents[0]
    assert one == other
    assert len(one) >= 4 * MIB


@pytest.mark.parametrize("kind", ["FP32", "BYTES"])
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_shared_memory_in_both_directions_does_not_occupy_the_loop(
    kind: str, way: str, served: tuple[Running, str]
) -> None:
    running, address = served
    blob, count = (b"\1\0\0\0a" * MIB, MIB) if kind == "BYTES" else (bytes(range(256)) * (MIB // 8), MIB * 8)
    path = Path(f"/dev/shm/lathe-test-{secrets.token_hex(6)}")
    path.write_bytes(blob + bytes(len(blob)))
    where = {"shared_memory_region": "r", "shared_memory_byte_size": len(blob)}
    try:
        register = json.dumps({"key": f"/{path.name}", "offset": 0, "byte_size": 2 * len(blob)}).encode()
        assert running.ask("POST", "/v2/systemsharedmemory/region/r/register", register).status == 200
        given = {"name": "x", "datatype": kind, "shape": [count, 1], "parameters": where}
        wanted = {"name": "y", "parameters": {**where, "shared_memory_offset": len(blob)}}
        with loop_stays_responsive(running):
            if way == "http":
                assert running.infer(kind, {"inputs": [given], "outputs": [wanted]}).status == 200
            else:
                with stub(address) as service:
                    service.ModelInfer(ParseDict(message_of(kind, given, wanted), pb.ModelInferRequest()), timeout=60)
        assert path.read_bytes() == blob * 2
    finally:
        running.ask("POST", "/v2/systemsharedmemory/unregister")
        path.unlink()


def message_of(model: str, *tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a request over gRPC in the JSON form of protobuf."""
    given, wanted = [
        {
            **tensor,
            "parameters": {
                name: {"string_param" if isinstance(value, str) else "int64_param": value}
                for name, value in tensor["parameters"].items()
            },
        }
        for tensor in tensors
    ]
    return {"model_name": model, "inputs": [given], "outputs": [wanted]}
