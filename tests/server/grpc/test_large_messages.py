"""Large messages over gRPC: what protobuf reads of them is bounded, the rest stays where it is, and threads read."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from server.api import codec
from server.api.codec import Head
from server.api.grpc import tensors
from server.api.grpc.sent import TYPED, glance, read
from server.api.readers import HERE
from server.errors import BadRequest, TooLarge
from tests.server.data.fakes import doubler, echo
from tests.server.data.running import rows, wait_for
from tests.server.grpc.wire import grpc_serving, refusal, request, stub

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
def test_a_message_taken_apart_says_what_protobuf_reads(seed: int) -> None:
    made = random_request(random.Random(seed))
    whole = made.SerializeToString()
    for sent in (read(whole), glance(whole)):
        assert sent is not None
        raws = [bytes(raw) for raw in sent.raws]
        assert raws == list(made.raw_input_contents)
        bare = pb.ModelInferRequest.FromString(sent.message.SerializeToString())
        bare.raw_input_contents.extend(raws)
        assert bare == made


def test_what_protobuf_refuses_is_refused() -> None:
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
            found = read(data)
        except BadRequest:
            refused += 1  # protobuf may take it nevertheless: it knows groups, which nobody sends
            continue
        expected = pb.ModelInferRequest.FromString(data)
        assert [bytes(raw) for raw in found.raws] == list(expected.raw_input_contents)
        assert (found.message.model_name, len(found.message.inputs)) == (expected.model_name, len(expected.inputs))
    assert 500 < refused < 3000


@pytest.mark.parametrize(
    "data",
    [
        pb.ModelInferRequest(raw_input_contents=[b""] * TYPED).SerializeToString(),
        typed("INT64", TYPED, int64_contents=[1] * TYPED).SerializeToString(),
    ],
    ids=["raw contents of no bytes", "typed contents"],
)
def test_what_takes_long_is_not_read(data: bytes) -> None:
    assert glance(data) is None
    with pytest.raises(TooLarge, match=f"at most {TYPED} bytes besides raw_input_contents"):
        read(data)


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The names of the threads that call a function from now on."""
    seen: list[str] = []
    real: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        seen.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(owner, name, call)
    return seen


def test_typed_contents_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch, tensors, "begin")
    values = np.arange(100_000, dtype=np.int64)
    with grpc_serving({"m": echo("INT64", max_batch=1 << 20)}) as (running, address), stub(address) as service:
        found = service.ModelInfer(typed("INT64", len(values), int64_contents=values.tolist()), timeout=20)
        np.testing.assert_array_equal(np.frombuffer(found.raw_output_contents[0], np.int64), values)
        status, text = refusal(service.ModelInfer, typed("INT64", TYPED, int64_contents=[1] * TYPED))
        assert (status, f"at most {TYPED} bytes" in text) == (EXHAUSTED, True)
        assert [name.startswith("lathe-reader") for name in seen] == [True]
        wait_for(lambda: running.ledger.held == 0)


def test_raw_texts_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch, Head, "__post_init__"), noted(monkeypatch, codec, "unpacking")
    texts = b"\2\0\0\0ab" * 50_000
    item = Input(name="x", datatype="BYTES", shape=[50_000, 1])
    message = pb.ModelInferRequest(model_name="m", inputs=[item], raw_input_contents=[texts])
    with grpc_serving({"m": echo("BYTES", max_batch=1 << 20)}) as (_, address), stub(address) as service:
        assert service.ModelInfer(message, timeout=20).raw_output_contents[0] == texts
        for _ in range(2):
            assert next(service.ModelStreamInfer(iter([message]))).infer_response.raw_output_contents[0] == texts
    assert [name.startswith("lathe-reader") for name in seen[0]] == [False]  # small, and remembered
    assert [name.startswith("lathe-reader") for name in seen[1]] == [True] * 3


def test_large_messages_are_counted_and_paid_for() -> None:
    array = rows(HERE // 16 + 1)
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


def test_messages_of_other_calls_are_small() -> None:
    with grpc_serving({}) as (_, address), stub(address) as service:
        status, text = refusal(service.ModelMetadata, pb.ModelMetadataRequest(name="m" * (1 << 20)))
        assert (status, "at most 1048576 bytes" in text) == (EXHAUSTED, True)
