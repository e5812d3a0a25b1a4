"""Large messages over gRPC: protobuf reads a bounded part, the rest is not copied, and threads read it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from lathe.server.api.codec import input_slots
from lathe.server.api.codec.codec import ParsedRequest
from lathe.server.api.grpc import tensors
from lathe.server.api.grpc.split_message import MAX_PARSED_BYTES, split_large, split_small
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.errors import BadRequest, TooLarge
from tests.server.api.grpc.wire import grpc_serving, refusal, request, stub
from tests.server.fakes import doubler, echo
from tests.server.running import rows, wait_for

Input = pb.ModelInferRequest.InferInputTensor
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def typed(kind: str, count: int, **contents: Any) -> Any:
    item = Input(name="x", datatype=kind, shape=[count, 1], contents=pb.InferTensorContents(**contents))
    return pb.ModelInferRequest(model_name="m", inputs=[item])


def random_request(source: random.Random) -> Any:
    made = pb.ModelInferRequest(model_name="m" * source.randrange(3), id=source.choice(["", "a7"]))
    for number in range(source.randrange(4)):
        made.inputs.append(Input(name=f"x{number}", datatype="FP32", shape=[source.randrange(1 << 40), 3]))
        made.raw_input_contents.append(source.randbytes(source.choice([0, 1, 127, 128, 40_000])))
    made.parameters["timeout"].int64_param = source.randrange(-5, 1 << 60)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_a_split_message_equals_what_protobuf_reads(seed: int) -> None:
    made = random_request(random.Random(seed))
    whole = made.SerializeToString()
    for sent in (split_large(whole), split_small(whole)):
        assert sent is not None
        raws = [bytes(raw) for raw in sent.raw_contents]
        assert raws == list(made.raw_input_contents)
        bare = pb.ModelInferRequest.FromString(sent.message.SerializeToString())
        bare.raw_input_contents.extend(raws)
        assert bare == made


def test_messages_that_protobuf_refuses_are_refused() -> None:
    whole = request(rows(2), id="a7").SerializeToString()
    mutations = [whole[:end] for end in range(len(whole))]
    source = random.Random(7)
    for _ in range(3000):
        changed = bytearray(whole)
        changed[source.randrange(len(whole))] = source.randrange(256)
        mutations.append(bytes(changed))
    refused = 0
    for data in mutations:
        try:
            found = split_large(data)
        except BadRequest:
            refused += 1  # protobuf may accept it: it knows groups, which no client sends
            continue
        expected = pb.ModelInferRequest.FromString(data)
        assert [bytes(raw) for raw in found.raw_contents] == list(expected.raw_input_contents)
        assert (found.message.model_name, len(found.message.inputs)) == (expected.model_name, len(expected.inputs))
    assert 500 < refused < 3000


@pytest.mark.parametrize(
    "data",
    [
        pb.ModelInferRequest(raw_input_contents=[b""] * MAX_PARSED_BYTES).SerializeToString(),
        typed("INT64", MAX_PARSED_BYTES, int64_contents=[1] * MAX_PARSED_BYTES).SerializeToString(),
    ],
    ids=["raw contents of no bytes", "typed contents"],
)
def test_messages_that_take_long_to_parse_are_refused(data: bytes) -> None:
    assert split_small(data) is None
    with pytest.raises(TooLarge, match=f"at most {MAX_PARSED_BYTES} bytes besides raw_input_contents"):
        split_large(data)


def record_threads(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The names of the threads that call a function from now on."""
    seen: list[str] = []
    real: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        seen.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(owner, name, call)
    return seen


def test_typed_contents_are_read_on_a_reader_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_threads(monkeypatch, tensors, "parse")
    values = np.arange(100_000, dtype=np.int64)
    with grpc_serving({"m": echo("INT64", max_batch=1 << 20)}) as (running, address), stub(address) as service:
        found = service.ModelInfer(typed("INT64", len(values), int64_contents=values.tolist()), timeout=20)
        np.testing.assert_array_equal(np.frombuffer(found.raw_output_contents[0], np.int64), values)
        status, text = refusal(
            service.ModelInfer, typed("INT64", MAX_PARSED_BYTES, int64_contents=[1] * MAX_PARSED_BYTES)
        )
        assert (status, f"at most {MAX_PARSED_BYTES} bytes" in text) == (EXHAUSTED, True)
        assert [name.startswith("lathe-reader") for name in seen] == [True]
        wait_for(lambda: running.ledger.held == 0)


def test_raw_texts_are_read_on_a_reader_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = (
        record_threads(monkeypatch, ParsedRequest, "__post_init__"),
        record_threads(monkeypatch, input_slots, "unpack_in_steps"),
    )
    texts = b"\2\0\0\0ab" * 50_000
    item = Input(name="x", datatype="BYTES", shape=[50_000, 1])
    message = pb.ModelInferRequest(model_name="m", inputs=[item], raw_input_contents=[texts])
    with grpc_serving({"m": echo("BYTES", max_batch=1 << 20)}) as (_, address), stub(address) as service:
        assert service.ModelInfer(message, timeout=20).raw_output_contents[0] == texts
        for _ in range(2):
            assert next(service.ModelStreamInfer(iter([message]))).infer_response.raw_output_contents[0] == texts
    assert [name.startswith("lathe-reader") for name in seen[0]] == [False]  # small, and remembered
    assert [name.startswith("lathe-reader") for name in seen[1]] == [True] * 3


def test_large_messages_are_counted_and_charged() -> None:
    array = rows(INLINE_BYTES // 16 + 1)
    with grpc_serving({"doubler": doubler(max_batch=1 << 20)}, max_receiving=1 << 20) as (running, address):
        with running.ledger.claim("127.0.0.1", 1 << 19), stub(address) as service:
            assert service.ModelInfer(request(rows(1)), timeout=20).raw_output_contents
            assert refusal(service.ModelInfer, request(array))[0] is grpc.StatusCode.UNAVAILABLE
        with stub(address) as service:
            assert service.ModelInfer(request(array), timeout=20).raw_output_contents[0] == (array * 2).tobytes()
        assert running.ledger.held == 0
    settings = {"client_rate": 0.01, "client_burst": 1000}
    with grpc_serving({"m": echo("INT64", max_batch=1 << 20)}, **settings) as (_, address), stub(address) as service:
        many = typed("INT64", 100_000, int64_contents=[1] * 100_000)
        assert service.ModelInfer(many, timeout=20).raw_output_contents
        assert refusal(service.ModelInfer, many)[0] is EXHAUSTED


def test_messages_of_other_calls_have_a_small_limit() -> None:
    with grpc_serving({}) as (_, address), stub(address) as service:
        status, text = refusal(service.ModelMetadata, pb.ModelMetadataRequest(name="m" * (1 << 20)))
        assert (status, "at most 1048576 bytes" in text) == (EXHAUSTED, True)
