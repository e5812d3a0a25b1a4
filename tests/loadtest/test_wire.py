from __future__ import annotations

import numpy as np
import orjson
import pytest

from loadtest.wire import Response, infer_request, read_inferred

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_requests_equal_those_of_tritonclient() -> None:
    from tritonclient.http import InferenceServerClient, InferInput

    tensor = InferInput("x", [2, 3], "FP32")
    tensor.set_data_from_numpy(X)
    body, json_length = InferenceServerClient.generate_request_body([tensor])
    head, _, ours = infer_request("host:1", "m", {"x": X}).partition(b"\r\n\r\n")

    assert head.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: host:1\r\n")
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert int(fields[b"Content-Length"]) == len(ours)
    our_length = int(fields[b"Inference-Header-Content-Length"])
    assert orjson.loads(ours[:our_length]) == orjson.loads(body[:json_length])
    assert ours[our_length:] == body[json_length:] == X.tobytes()


def test_model_names_are_quoted_and_versions_named() -> None:
    assert b"POST /v2/models/a%2Fb/versions/3/infer " in infer_request("h", "a/b", {"x": X}, version="3")


def test_a_timeout_travels_in_microseconds() -> None:
    body = infer_request("h", "m", {"x": X}, timeout_us=500_000).split(b"\r\n\r\n", 1)[1]
    assert b'"timeout":500000' in body


def answer(*outputs: dict[str, object], blob: bytes = b"", binary: bool = True) -> Response:
    head = orjson.dumps({"model_name": "m", "model_version": "7", "outputs": outputs})
    headers = {b"inference-header-content-length": str(len(head)).encode()} if binary else {}
    return Response(200, headers, head + blob)


def test_binary_outputs_are_read_in_order() -> None:
    y, label = np.array([[1.5, 2.5]], np.float32), np.array([4], np.int64)
    response = answer(
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        {"name": "label", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}},
        blob=y.tobytes() + label.tobytes(),
    )
    inferred = read_inferred(response)
    assert inferred.version == "7"
    assert inferred.outputs["y"].tolist() == y.tolist()
    assert inferred.outputs["label"].tolist() == [4]


def test_json_outputs_are_read() -> None:
    response = answer({"name": "y", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}, binary=False)
    assert read_inferred(response).outputs["y"].tolist() == [[1], [2]]


def test_undeclared_bytes_are_refused() -> None:
    output = {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
    with pytest.raises(ValueError, match="describes"):
        read_inferred(answer(output, blob=b"12345678"))
