"""Invalid requests over gRPC: the right status, a helpful message, and the server goes on serving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from lathe.server import errors
from lathe.server.api.grpc.status import STATUS
from lathe.server.types import TensorSpec
from tests.server.api.grpc.wire import grpc_serving, refusal, request, stub
from tests.server.fakes import FakeModel, doubler, echo
from tests.server.running import rows

LIMIT = 100_000
INVALID = grpc.StatusCode.INVALID_ARGUMENT
Input = pb.ModelInferRequest.InferInputTensor


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    spec = TensorSpec("x", "FP32", (-1, 4))

    def fail(tensors: Any) -> Any:
        raise RuntimeError("a secret of the model")

    broken = FakeModel(fail, [spec], [TensorSpec("y", "FP32", (-1, 4))])
    models = {"doubler": doubler(), "broken": broken}
    echoes = {f"echo_{kind}": echo(kind) for kind in ("INT8", "UINT64", "BOOL", "BYTES", "FP16", "FP64", "INT64")}
    with grpc_serving(models | echoes, max_body=LIMIT) as (_, found):
        yield found


@pytest.fixture(scope="module")
def service(address: str) -> Iterator[Any]:
    with stub(address) as found:
        yield found


def one(**changes: Any) -> Any:
    """A valid request for the doubler, with these fields of its input replaced."""
    fields = {"name": "x", "datatype": "FP32", "shape": [1, 4], **changes}
    return request(rows(1), inputs=[Input(**fields)])


def typed(kind: str, shape: list[int], **contents: Any) -> Any:
    item = Input(name="x", datatype=kind, shape=shape, contents=pb.InferTensorContents(**contents))
    return pb.ModelInferRequest(model_name="doubler" if kind == "FP32" else f"echo_{kind}", inputs=[item])


def test_a_remembered_message_of_another_length_is_checked_again(service: Any) -> None:
    """Messages that are equal but for their raw contents are remembered; other lengths make another message."""
    for start in range(3):
        answer = service.ModelInfer(request(rows(1, start=start)))
        assert answer.raw_output_contents[0] == (rows(1, start=start) * 2).tobytes()
    for contents, said in (([b"\0" * 15], "expected 16"), ([b"\0" * 16] * 2, "one per input, got 2")):
        for _ in range(2):
            status, message = refusal(service.ModelInfer, request(rows(1), raw_input_contents=contents))
            assert status is INVALID
            assert said in message


def with_parameter(**choice: Any) -> Any:
    whole = request(rows(1))
    whole.parameters["timeout"].CopyFrom(pb.InferParameter(**choice))
    return whole


ROWS = [
    (request(rows(1), model="nobody"), grpc.StatusCode.NOT_FOUND, "unknown model 'nobody'"),
    (request(rows(1), model=""), grpc.StatusCode.NOT_FOUND, "unknown model ''"),
    (request(rows(1), model_version="9"), grpc.StatusCode.NOT_FOUND, "'9'"),
    (one(name="z"), INVALID, "expected ['x'], got ['z']"),
    (one(datatype="FP64"), INVALID, "expected 32 for FP64 [1, 4], got 16"),
    (one(datatype="FLOAT"), INVALID, "got 'FLOAT'"),
    (one(shape=[1, 5]), INVALID, "expected 20 for FP32 [1, 5], got 16"),
    (one(shape=[4]), INVALID, "expected shape [-1, 4], got [4]"),
    (one(shape=[-1, 4]), INVALID, "expected sizes from 0"),
    (one(shape=[2**62, 2**62]), INVALID, "expected sizes from 0"),
    (one(shape=[1] * 33), INVALID, "at most 32 dimensions"),
    (request(rows(1), raw_input_contents=[b"\0" * 15]), INVALID, "input 'x': bytes of binary data: expected 16"),
    (request(rows(1), raw_input_contents=[b"\0" * 16] * 2), INVALID, "expected 1, one per input, got 2"),
    (request(rows(1), inputs=[]), INVALID, "raw_input_contents: expected 0, one per input, got 1"),
    (pb.ModelInferRequest(model_name="doubler"), INVALID, "inputs: expected ['x'], got []"),
    (request(rows(1), inputs=[Input(name="x", datatype="FP32", shape=[1, 4])] * 2), INVALID, "one per input"),
    (one(contents=pb.InferTensorContents(fp32_contents=[1, 2, 3, 4])), INVALID, "expected none with the typed"),
    (typed("FP32", [1, 4], fp32_contents=[1, 2, 3]), INVALID, "expected 16 for FP32 [1, 4], got 12"),
    (typed("FP32", [1, 4], fp64_contents=[1, 2, 3, 4]), INVALID, "expected fp32_contents for FP32, got fp64_contents"),
    (typed("INT8", [1, 2], int_contents=[1, 128]), INVALID, "out of the range of INT8"),
    (typed("FP16", [1, 1], fp32_contents=[1]), INVALID, "raw_input_contents only"),
    (typed("BYTES", [1, 2], bytes_contents=[b"a"]), INVALID, "expected 2 elements for shape [1, 2], got 1"),
    (with_parameter(), INVALID, "parameters.timeout: expected a value"),
    (with_parameter(string_param="1"), INVALID, "expected an integer, got str"),
    (with_parameter(int64_param=-1), INVALID, "0 or more, got -1"),
    (
        request(rows(1), outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="q")]),
        INVALID,
        "expected some of ['y'], got 'q'",
    ),
    (request(rows(1), model="broken"), grpc.StatusCode.INTERNAL, ""),
]


@pytest.mark.parametrize(("message", "status", "text"), ROWS, ids=lambda value: value if type(value) is str else "")
def test_a_bad_request_is_refused(service: Any, message: Any, status: grpc.StatusCode, text: str) -> None:
    code, details = refusal(service.ModelInfer, message)
    assert code is status, details
    assert text in details
    assert "secret" not in details
    np.testing.assert_array_equal(answer(service, request(rows(1))), rows(1) * 2)


def answer(service: Any, message: Any, dtype: Any = np.float32) -> np.ndarray:
    response = service.ModelInfer(message, timeout=10)
    return np.frombuffer(response.raw_output_contents[0], dtype).reshape(response.outputs[0].shape)


@pytest.mark.parametrize(
    ("kind", "field", "values", "dtype"),
    [
        ("FP32", "fp32_contents", [1.5, 2, 3, 4], np.float32),
        ("FP64", "fp64_contents", [1e300, 2], np.float64),
        ("INT8", "int_contents", [-128, 127], np.int8),
        ("INT64", "int64_contents", [-(2**63), 5], np.int64),
        ("UINT64", "uint64_contents", [2**64 - 1, 0], np.uint64),
        ("BOOL", "bool_contents", [True, False], np.bool_),
    ],
)
def test_typed_contents_are_accepted(service: Any, kind: str, field: str, values: list[Any], dtype: Any) -> None:
    found = answer(service, typed(kind, [1, len(values)], **{field: values}), dtype)
    assert found.ravel().tolist() == [value * 2 if kind == "FP32" else value for value in values]


def test_typed_bytes_are_accepted(service: Any) -> None:
    response = service.ModelInfer(typed("BYTES", [1, 2], bytes_contents=[b"ab", b""]), timeout=10)
    assert response.raw_output_contents[0] == b"\2\0\0\0ab\0\0\0\0"


def test_a_message_larger_than_the_limit_is_refused(service: Any) -> None:
    code, details = refusal(service.ModelInfer, request(rows(LIMIT // 16)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(LIMIT) in details
    assert service.ServerLive(pb.ServerLiveRequest()).live


def test_a_compression_bomb_stops_at_the_limit(service: Any) -> None:
    """Only a thousandth of its decompressed size is sent."""
    bomb = request(np.zeros((2 * LIMIT // 16, 4), np.float32))
    code, details = refusal(service.ModelInfer, bomb, compression=grpc.Compression.Gzip)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Decompressed message larger than max" in details
    assert service.ServerLive(pb.ServerLiveRequest()).live


def test_an_invalid_message_is_refused(service: Any, address: str) -> None:
    garbage = b"\xff\xff\xff"
    with grpc.insecure_channel(address) as channel:
        code, _ = refusal(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"), garbage)
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        good = request(rows(1)).SerializeToString()
        answers = [pb.ModelStreamInferResponse.FromString(item) for item in call(iter([garbage, good]), timeout=10)]
    assert code is INVALID
    assert "got bytes that do not parse" in answers[0].error_message
    assert answers[1].infer_response.raw_output_contents[0] == (rows(1) * 2).tobytes()
    assert service.ServerLive(pb.ServerLiveRequest()).live


def test_every_call_answers_not_found_for_an_unknown_model(service: Any) -> None:
    for call, message in (
        (service.ModelMetadata, pb.ModelMetadataRequest(name="nobody")),
        (service.ModelConfig, pb.ModelConfigRequest(name="nobody")),
        (service.ModelStatistics, pb.ModelStatisticsRequest(name="nobody")),
        (service.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="nobody")),
        (service.RepositoryModelUnload, pb.RepositoryModelUnloadRequest(model_name="nobody")),
    ):
        assert refusal(call, message)[0] is grpc.StatusCode.NOT_FOUND


def test_a_named_repository_is_refused(service: Any) -> None:
    code, details = refusal(service.RepositoryIndex, pb.RepositoryIndexRequest(repository_name="other"))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "one repository" in details


def test_every_error_has_a_status() -> None:
    def family(kind: type[errors.ServerError]) -> Iterator[type[errors.ServerError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from family(child)

    ours = {kind.code for kind in family(errors.ServerError) if kind.__module__ == "lathe.server.errors"}
    assert ours == STATUS.keys()
