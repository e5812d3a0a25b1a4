"""NVIDIA's client, unmodified, against a real server: sync and asyncio, on the direct path and through ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from lathe.server.types import TensorSpec
from tests.server.fakes import FakeModel, adder, doubler, echo, softmax_over_batch
from tests.server.running import Answer, Running, rows, serving

DATATYPES = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 65535]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-(2**15), 7]], np.int16),
    "INT32": np.array([[-(2**31), 7]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "FP16": np.array([[1.5, -2.25]], np.float16),
    "FP32": np.array([[1.5, np.nan, np.inf, -np.inf, 1e-30]], np.float32),
    "FP64": np.array([[0.1, -1e300]], np.float64),
    "BF16": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "BYTES": np.array([["plain", "grün", ""]], dtype=np.object_),
}


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    models = {"doubler": doubler(), "adder": adder(), "mixer": softmax_over_batch()}
    echoes = {f"echo_{kind}": echo(kind) for kind in DATATYPES}
    pairs = FakeModel(lambda t: t, [TensorSpec("x", "BYTES", (-1, 2))], [TensorSpec("x", "BYTES", (-1, 2))])
    with serving(models | echoes | {"pairs": pairs}, request.param) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as found:
        yield found


def tensor(name: str, array: np.ndarray, kind: str, binary: bool = True) -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), kind).set_data_from_numpy(array, binary_data=binary)


def test_health_metadata_and_configuration(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("adder")
    assert client.is_model_ready("adder", "1")
    assert not client.is_model_ready("nobody")
    metadata = client.get_server_metadata()
    assert metadata["name"] == "lathe"
    assert "schedule_policy" in metadata["extensions"]
    metadata = client.get_model_metadata("adder")
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"][0] == {"name": "a", "datatype": "INT32", "shape": [-1, 16]}
    config = client.get_model_config("adder")
    assert config["max_batch_size"] == 8
    assert config["input"][0] == {"name": "a", "data_type": "TYPE_INT32", "dims": [16]}
    assert client.get_model_config("mixer")["max_batch_size"] == 0


@pytest.mark.parametrize("kind", DATATYPES)
def test_every_datatype_in_binary(client: triton.InferenceServerClient, kind: str) -> None:
    array = DATATYPES[kind]
    result = client.infer(f"echo_{kind}", [tensor("x", array, kind)])
    answer = result.as_numpy("y")
    if kind == "BYTES":
        assert [element.decode() for element in answer.ravel()] == array.ravel().tolist()
    else:
        assert answer.dtype == array.dtype
        assert answer.tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", sorted(DATATYPES.keys() - {"FP16", "BF16"}))
def test_every_datatype_in_json(client: triton.InferenceServerClient, kind: str) -> None:
    array = DATATYPES[kind]
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]
    result = client.infer(f"echo_{kind}", [tensor("x", array, kind, binary=False)], outputs=wanted)
    assert "data" in result.get_output("y")
    answer = result.as_numpy("y")
    if kind == "BYTES":
        assert answer.ravel().tolist() == array.ravel().tolist()
    else:
        np.testing.assert_array_equal(answer, array)


@pytest.mark.parametrize("text", ["grün".encode(), b"\x00\xff" * 5000])
def test_a_raw_body_is_one_string(server: Running, text: bytes) -> None:
    """The extension's raw binary request, which the client cannot send: no length before the string."""
    answer = server.ask("POST", "/v2/models/echo_BYTES/infer", text, {"Inference-Header-Content-Length": "0"})
    result = triton.InferenceServerClient.parse_response_body(answer.body, header_length=_json_bytes(answer))
    assert result.as_numpy("y").tolist() == [[text]]


def test_a_raw_body_cannot_be_several_strings(server: Running) -> None:
    answer = server.ask("POST", "/v2/models/pairs/infer", b"ab", {"Inference-Header-Content-Length": "0"})
    assert (answer.status, "takes 2 for [1, 2]" in answer.error) == (400, True)


def _json_bytes(answer: Answer) -> int:
    return int(answer.headers["inference-header-content-length"])


def test_half_precision_is_refused_in_json(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]
    with pytest.raises(InferenceServerException, match="FP16 is answered as binary"):
        client.infer("echo_FP16", [tensor("x", DATATYPES["FP16"], "FP16")], outputs=wanted)


def test_several_inputs_and_outputs_in_any_order(client: triton.InferenceServerClient) -> None:
    a, b = np.arange(32, dtype=np.int32).reshape(2, 16), np.ones((2, 16), np.int32)
    inputs = [tensor("b", b, "INT32"), tensor("a", a, "INT32", binary=False)]
    wanted = [triton.InferRequestedOutput("difference"), triton.InferRequestedOutput("total", binary_data=False)]
    result = client.infer("adder", inputs, outputs=wanted, request_id="seven")
    np.testing.assert_array_equal(result.as_numpy("total"), a + b)
    np.testing.assert_array_equal(result.as_numpy("difference"), a - b)
    assert result.get_response()["id"] == "seven"
    assert [output["name"] for output in result.get_response()["outputs"]] == ["difference", "total"]


def test_model_name_and_version_are_answered(client: triton.InferenceServerClient) -> None:
    response = client.infer("doubler", [tensor("x", rows(1), "FP32")], model_version="1").get_response()
    assert (response["model_name"], response["model_version"]) == ("doubler", "1")
    assert "id" not in response


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression_both_ways(client: triton.InferenceServerClient, coding: str) -> None:
    x = rows(2)
    result = client.infer(
        "doubler", [tensor("x", x, "FP32")], request_compression_algorithm=coding, response_compression_algorithm=coding
    )
    np.testing.assert_array_equal(result.as_numpy("y"), x * 2)


def test_a_request_larger_than_a_batch_is_split_and_joined(client: triton.InferenceServerClient) -> None:
    x = rows(37)
    np.testing.assert_array_equal(client.infer("doubler", [tensor("x", x, "FP32")]).as_numpy("y"), x * 2)


def test_classification(client: triton.InferenceServerClient) -> None:
    x = np.array([[1, 4, 2, 3], [9, 0, 0, 8]], np.float32)
    wanted = [triton.InferRequestedOutput("y", class_count=2)]
    answer = client.infer("doubler", [tensor("x", x, "FP32")], outputs=wanted).as_numpy("y")
    assert answer.tolist() == [[b"8.000000:1", b"6.000000:3"], [b"18.000000:0", b"16.000000:3"]]


def test_classes_with_labels_are_named(client: triton.InferenceServerClient, server: Running) -> None:
    x = np.array([[1, 4, 2, 3], [9, 0, 0, 8]], np.float32)
    wanted = [triton.InferRequestedOutput("y", class_count=2)]
    signature = server.registry.resolve("doubler", "").signature
    signature.labels = {"y": (b"zero", b"one:1", b"")}
    try:
        answer = client.infer("doubler", [tensor("x", x, "FP32")], outputs=wanted).as_numpy("y")
    finally:
        signature.labels = {}
    assert answer.tolist() == [[b"8.000000:1:one:1", b"6.000000:3"], [b"18.000000:0:zero", b"16.000000:3"]]


def test_classification_of_outputs_that_are_no_numbers_is_refused(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("y", class_count=2)]
    with pytest.raises(InferenceServerException, match="expected an output of numbers, got BYTES"):
        client.infer("echo_BYTES", [tensor("x", DATATYPES["BYTES"], "BYTES")], outputs=wanted)


def test_index_load_and_unload(client: triton.InferenceServerClient) -> None:
    assert {"name": "mixer", "version": "1", "state": "READY"} in client.get_model_repository_index()
    client.unload_model("mixer")
    assert not client.is_model_ready("mixer")
    with pytest.raises(InferenceServerException, match="not loaded") as refused:
        client.infer("mixer", [tensor("x", rows(1, 2), "FP32")])
    assert refused.value.status() == "503"
    client.load_model("mixer")
    assert client.is_model_ready("mixer")
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.load_model("nobody")


def test_statistics_count_requests_and_executions(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("echo_INT8")["model_stats"][0]
    client.infer("echo_INT8", [tensor("x", np.zeros((3, 5), np.int8), "INT8")])
    after = client.get_inference_statistics("echo_INT8", "1")["model_stats"][0]
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["execution_count"] == before["execution_count"] + 1
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
    assert after["last_inference"] > 0
    assert 3 in [stat["batch_size"] for stat in after["batch_stats"]]
    assert len(client.get_inference_statistics()["model_stats"]) > 3


def test_log_and_trace_settings(client: triton.InferenceServerClient) -> None:
    assert client.update_log_settings({"log_info": True})["log_info"] is True
    assert client.get_log_settings()["log_info"] is True
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    client.update_log_settings({"log_verbose_level": 0})
    with pytest.raises(InferenceServerException, match="log_file"):
        client.update_log_settings({"log_file": "/tmp/elsewhere"})
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_trace_settings("doubler")["trace_level"] == ["OFF"]
    for call in (client.get_trace_settings, client.update_trace_settings):
        with pytest.raises(InferenceServerException, match="unknown model 'nobody'"):
            call("nobody")
    with pytest.raises(InferenceServerException, match="not supported"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_name": "nobody"}, "unknown model"),
        ({"model_name": "doubler", "model_version": "9"}, "has no version"),
        ({"outputs": [triton.InferRequestedOutput("z")]}, "outputs: expected some of"),
        ({"inputs": [tensor("z", rows(1), "FP32")]}, "inputs: expected"),
        ({"inputs": [tensor("x", rows(1, 5), "FP32")]}, r"expected shape \[-1, 4\], got \[1, 5\]"),
        ({"inputs": [tensor("x", np.zeros((1, 4)), "FP64")]}, "expected datatype FP32, got FP64"),
        ({"timeout": 1}, "timeout"),
    ],
)
def test_errors_reach_the_client(client: triton.InferenceServerClient, arguments: dict[str, Any], message: str) -> None:
    client.infer("doubler", [tensor("x", rows(1), "FP32")])  # so that its cost is known
    with pytest.raises(InferenceServerException, match=message):
        client.infer(**{"model_name": "doubler", "inputs": [tensor("x", rows(1), "FP32")], **arguments})


@pytest.mark.parametrize("given", [{"sequence_id": 7}, {"sequence_id": "a"}, {"sequence_id": 7, "sequence_end": True}])
def test_sequences_are_refused_and_not_ignored(client: triton.InferenceServerClient, given: dict[str, Any]) -> None:
    """If they were answered, each request would lack the state from the others of its sequence."""
    with pytest.raises(
        InferenceServerException, match=r"parameters.sequence_id: sequences are not supported"
    ) as caught:
        client.infer("doubler", [tensor("x", rows(1), "FP32")], **given)
    assert caught.value.status() == "501"
    result = client.infer("doubler", [tensor("x", rows(1), "FP32")], sequence_id=0, sequence_start=False)
    np.testing.assert_array_equal(result.as_numpy("y"), rows(1) * 2)


def test_unsupported_extensions_are_not_advertised(client: triton.InferenceServerClient) -> None:
    """The advertised extensions have their tests above; shared memory has a file of its own."""
    assert set(client.get_server_metadata()["extensions"]) == {
        "binary_tensor_data", "classification", "logging", "model_configuration", "model_repository",
        "model_repository(unload_dependents)", "parameters", "schedule_policy", "statistics",
        "system_shared_memory", "trace",
    }  # fmt: skip


def test_asyncio_client(server: Running) -> None:
    async def session() -> None:
        async with triton_aio.InferenceServerClient(server.address) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("doubler"))["name"] == "doubler"
            assert await client.get_model_repository_index()
            inputs = [[tensor("x", rows(1 + i % 3, start=i), "FP32")] for i in range(30)]
            results = await asyncio.gather(*(client.infer("doubler", one) for one in inputs))
            for i, result in enumerate(results):
                np.testing.assert_array_equal(result.as_numpy("y"), rows(1 + i % 3, start=i) * 2)
            big = rows(3000)
            result = await client.infer("doubler", [tensor("x", big, "FP32")])  # large enough to be compressed
            np.testing.assert_array_equal(result.as_numpy("y"), big * 2)
            stats = await client.get_inference_statistics("doubler")
            assert stats["model_stats"][0]["inference_stats"]["success"]["count"] >= 31

    asyncio.run(session())
