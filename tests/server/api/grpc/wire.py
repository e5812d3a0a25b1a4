"""Helpers of the gRPC tests: a server over fakes with gRPC, NVIDIA's client, and hand-written messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.server.fakes import FakeModel
from tests.server.running import Running, serving


@contextmanager
def grpc_serving(models: dict[str, FakeModel], **settings: Any) -> Iterator[tuple[Running, str]]:
    """Serve the models over HTTP and gRPC; yields the server and the gRPC address."""
    with serving(models, grpc_port=0, **settings) as running:
        yield running, f"127.0.0.1:{running.server.config.app.state.grpc.port}"


@contextmanager
def stub(address: str) -> Iterator[Any]:
    """A bare stub, for messages that NVIDIA's client does not send."""
    with grpc.insecure_channel(address, options=[("grpc.enable_retries", 0)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def tensor(name: str, array: np.ndarray, kind: str = "FP32") -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), kind).set_data_from_numpy(array)


def request(array: np.ndarray, model: str = "doubler", kind: str = "FP32", **fields: Any) -> Any:
    """Return a raw request for input x."""
    item = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype=kind, shape=array.shape)
    whole = {"model_name": model, "inputs": [item], "raw_input_contents": [array.tobytes()], **fields}
    return service_pb2.ModelInferRequest(**whole)


def refusal(call: Any, message: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    """Make a call that must fail; return its status and text."""
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=options.pop("timeout", 10), **options)
    error: Any = caught.value
    return error.code(), error.details()
