"""NVIDIA's gRPC client, unmodified, against a real server: sync, streaming and asyncio."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from lathe.server.batching.policy import BatchPolicy
from tests.server.api.grpc.wire import grpc_serving, tensor
from tests.server.api.inference.test_triton_client import DATATYPES
from tests.server.fakes import adder, doubler, echo
from tests.server.running import rows, wait_for


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    models = {"doubler": doubler(), "adder": adder()} | {f"echo_{kind}": echo(kind) for kind in DATATYPES}
    with grpc_serving(models) as (_, found):
        yield found


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address) as found:
        yield found


def test_health_metadata_and_configuration(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("adder")
    assert client.is_model_ready("adder", "1")
    assert not client.is_model_ready("nobody")
    server = client.get_server_metadata()
    assert server.name == "lathe"
    assert "classification" in server.extensions
    metadata = client.get_model_metadata("adder")
    assert list(metadata.versions) == ["1"]
    assert [(found.name, found.datatype, list(found.shape)) for found in metadata.inputs] == [
        ("a", "INT32", [-1, 16]),
        ("b", "INT32", [-1, 16]),
    ]
    config = client.get_model_config("adder").config
    assert (config.name, config.backend, config.max_batch_size) == ("adder", "lathe", 8)
    assert list(config.input[0].dims) == [16]


def test_the_configuration_shows_the_owners_settings() -> None:
    with grpc_serving({"m": doubler()}) as (running, address), triton.InferenceServerClient(address) as client:
        policy = BatchPolicy(preferred=(2, 4), max_delay=0.001, priority_levels=3, default_priority=2, instances=2)
        loop = running.server.servers[0].get_loop()
        loop.call_soon_threadsafe(running.registry.resolve("m").configure, policy, None, None, 1000)
        wait_for(lambda: running.registry.resolve("m").lookup is not None)
        config = client.get_model_config("m").config
        batching = config.dynamic_batching
        assert (list(batching.preferred_batch_size), batching.max_queue_delay_microseconds) == ([2, 4], 1000)
        assert (batching.priority_levels, batching.default_priority_level) == (3, 2)
        assert [(group.count, group.kind) for group in config.instance_group] == [(2, 2)]
        assert config.response_cache.enable


@pytest.mark.parametrize("kind", DATATYPES)
def test_every_datatype(client: triton.InferenceServerClient, kind: str) -> None:
    array = DATATYPES[kind]
    answer = client.infer(f"echo_{kind}", [tensor("x", array, kind)]).as_numpy("y")
    if kind == "BYTES":
        assert [element.decode() for element in answer.ravel()] == array.ravel().tolist()
    else:
        assert answer.dtype == array.dtype
        assert answer.tobytes() == array.tobytes()


def test_several_inputs_and_outputs_in_any_order(client: triton.InferenceServerClient) -> None:
    a, b = np.arange(32, dtype=np.int32).reshape(2, 16), np.ones((2, 16), np.int32)
    wanted = [triton.InferRequestedOutput("difference"), triton.InferRequestedOutput("total")]
    inputs = [tensor("b", b, "INT32"), tensor("a", a, "INT32")]
    result = client.infer("adder", inputs, outputs=wanted, request_id="seven", model_version="1")
    np.testing.assert_array_equal(result.as_numpy("total"), a + b)
    np.testing.assert_array_equal(result.as_numpy("difference"), a - b)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("seven", "adder", "1")
    assert [output.name for output in response.outputs] == ["difference", "total"]


def test_a_request_larger_than_a_batch_and_an_empty_one(client: triton.InferenceServerClient) -> None:
    for count in (37, 0):
        x = rows(count)
        np.testing.assert_array_equal(client.infer("doubler", [tensor("x", x)]).as_numpy("y"), x * 2)


def test_classification(client: triton.InferenceServerClient) -> None:
    x = np.array([[1, 4, 2, 3], [9, 0, 0, 8]], np.float32)
    wanted = [triton.InferRequestedOutput("y", class_count=2)]
    answer = client.infer("doubler", [tensor("x", x)], outputs=wanted).as_numpy("y")
    assert answer.tolist() == [[b"8.000000:1", b"6.000000:3"], [b"18.000000:0", b"16.000000:3"]]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_requests(client: triton.InferenceServerClient, coding: str) -> None:
    x = rows(2)
    result = client.infer("doubler", [tensor("x", x)], compression_algorithm=coding)
    np.testing.assert_array_equal(result.as_numpy("y"), x * 2)


def test_index_load_unload_and_statistics(client: triton.InferenceServerClient) -> None:
    client.infer("echo_INT8", [tensor("x", DATATYPES["INT8"], "INT8")])
    page = client.get_inference_statistics("echo_INT8", "1").model_stats[0]
    assert (page.name, page.version) == ("echo_INT8", "1")
    assert page.inference_stats.success.count == page.batch_stats[0].compute_infer.count >= 1
    client.unload_model("echo_INT8")
    assert not client.is_model_ready("echo_INT8")
    states = {model.name: model.state for model in client.get_model_repository_index().models}
    assert (states["echo_INT8"], states["adder"]) == ("UNAVAILABLE", "READY")
    client.load_model("echo_INT8")
    assert client.is_model_ready("echo_INT8")


def test_log_and_trace_settings(client: triton.InferenceServerClient) -> None:
    client.update_log_settings({"log_info": True})
    assert client.get_log_settings(as_json=True)["settings"]["log_info"] == {"bool_param": True}
    client.update_log_settings({"log_verbose_level": 1})
    try:
        assert client.get_log_settings().settings["log_verbose_level"].uint32_param == 1
    finally:
        client.update_log_settings({"log_verbose_level": 0})
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    client.update_trace_settings(settings={"trace_rate": None})
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model 'nobody'"):
        client.get_trace_settings("nobody")
    with pytest.raises(InferenceServerException, match="tracing is not supported"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})


@pytest.mark.parametrize("sequence", [7, "a"])
def test_sequences_are_refused_and_not_ignored(client: triton.InferenceServerClient, sequence: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*parameters.sequence_id: sequences are not"):
        client.infer("doubler", [tensor("x", rows(1))], sequence_id=sequence, sequence_start=True)


def test_a_stream_answers_in_order_and_continues_after_errors(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for start in range(20):
        client.async_stream_infer("nobody" if start == 7 else "doubler", [tensor("x", rows(1, start=start))])
    for start in range(20):
        result, error = answers.get(timeout=10)
        if start == 7:
            assert "unknown model 'nobody'" in str(error)
        else:
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("y"), rows(1, start=start) * 2)
    client.stop_stream()


def test_asyncio(address: str) -> None:
    async def both() -> None:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            results = await asyncio.gather(
                *(client.infer("doubler", [tensor("x", rows(1, start=start))]) for start in range(16))
            )
            for start, result in enumerate(results):
                np.testing.assert_array_equal(result.as_numpy("y"), rows(1, start=start) * 2)

            async def requests() -> Any:
                for start in range(3):
                    yield {"model_name": "doubler", "inputs": [tensor("x", rows(1, start=start))]}

            seen = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None
                np.testing.assert_array_equal(result.as_numpy("y"), rows(1, start=seen) * 2)
                seen += 1
            assert seen == 3

    asyncio.run(both())
