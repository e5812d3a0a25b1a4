"""Invalid inference requests: the right status, a helpful message, and the server goes on serving."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.fakes import adder, doubler, echo
from tests.server.running import Answer, Running, infer_request, request, rows, serving, tensor_of


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    models = {"doubler": doubler(), "adder": adder()}
    models |= {"text": echo("BYTES"), "flags": echo("BOOL"), "count": echo("INT8")}
    with serving(models, request.param, max_body=200_000, max_inflated=300_000, max_json=150_000) as running:
        yield running


@pytest.fixture(autouse=True)
def _still_serving(server: Running) -> Iterator[None]:
    yield
    np.testing.assert_array_equal(tensor_of(server.ask_raw(infer_request("doubler", rows(1)))), rows(1) * 2)


def tensor(**changes: Any) -> dict[str, Any]:
    found = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], **changes}
    return {name: value for name, value in found.items() if value is not None}


def blob(**changes: Any) -> dict[str, Any]:
    return tensor(data=None, parameters={"binary_data_size": 16}, **changes)


def deep(levels: int) -> list[Any]:
    """Nested lists: too deep for orjson to write, but not to read."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


BAD_TENSORS = [
    (tensor(name=None), "inputs[0].name: expected a string, got nothing"),
    (tensor(name=7), "inputs[0].name: expected a string, got int"),
    (tensor(name="z"), "inputs: expected ['x'], got ['z']"),
    (tensor(datatype="FP8"), "input 'x'.datatype: expected one of BOOL"),
    (tensor(datatype=None), "input 'x'.datatype: expected a string, got nothing"),
    (tensor(datatype="INT64"), "expected datatype FP32, got INT64"),
    (tensor(shape=[1, 5], data=[1] * 5), "expected shape [-1, 4], got [1, 5]"),
    (tensor(shape=[4]), "expected shape [-1, 4], got [4]"),
    (tensor(shape=[-1, 4]), "expected sizes from 0 to"),
    (tensor(shape=["1", 4]), "input 'x'.shape: expected an integer, got str"),
    (tensor(shape=[True, 4]), "input 'x'.shape: expected an integer, got bool"),
    (tensor(shape=[2**62, 4]), "expected sizes from 0 to"),
    (tensor(shape=[2**40, 4]), "expected 4398046511104 elements for shape"),
    (tensor(shape=[1] * 40), "at most 32 dimensions, got 40"),
    (tensor(data=None), "expected data or parameters.binary_data_size, got neither"),
    (tensor(data=[1, 2, 3]), "expected 4 elements for shape [1, 4], got 3"),
    (tensor(data=[1, 2, 3, 4, 5]), "expected 4 elements for shape [1, 4], got 5"),
    (tensor(data=[[1, 2], [3, 4]]), "expected lists nested as shape [1, 4]"),
    (tensor(data=[[1, 2, 3], [4]], shape=[2, 4]), "expected lists nested as shape [2, 4]"),
    (tensor(data=[[1, 2, 3, 4], 5], shape=[2, 4]), "expected lists nested as shape [2, 4]"),
    (tensor(data=[1, 2, 3, "4"]), "expected FP32 values, got a string"),
    (tensor(data=[1, 2, 3, None]), "expected FP32 values, got null"),
    (tensor(data=[1, 2, 3, True]), "expected FP32 values, got a boolean"),
    (tensor(data={"0": 1}), "expected a list, got an object"),
    (tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16}), "got both"),
    (tensor(parameters={"binary_data_size": 16}), "got both"),
    (tensor(parameters=[]), "parameters: expected an object, got list"),
    (tensor(data=None, parameters={"binary_data_size": 15}), "expected 16 for FP32 [1, 4], got 15"),
    (tensor(data=None, parameters={"binary_data_size": -16}), "expected 16 for FP32 [1, 4], got -16"),
    (tensor(data=None, parameters={"binary_data_size": "16"}), "expected an integer, got str"),
    (tensor(data=None, shape=[2**40, 4], parameters={"binary_data_size": 2**44}), "expected 17592186044416 bytes"),
]


@pytest.mark.parametrize(("item", "message"), BAD_TENSORS, ids=[message for _, message in BAD_TENSORS])
def test_bad_tensors_are_refused(server: Running, item: dict[str, Any], message: str) -> None:
    answer = server.infer("doubler", {"inputs": [item]})
    assert message in answer.error
    assert answer.status == 400


BAD_DOCUMENTS = [
    ([], "body: expected an object, got list"),
    ({}, "inputs: expected a list, got nothing"),
    ({"inputs": {}}, "inputs: expected a list, got dict"),
    ({"inputs": [3]}, "inputs[0]: expected an object, got int"),
    ({"inputs": []}, "inputs: expected ['x'], got []"),
    ({"inputs": [tensor(), tensor()]}, "inputs: 'x' is given twice"),
    ({"inputs": [tensor()], "id": 7}, "id: expected a string, got int"),
    ({"inputs": [tensor()], "parameters": 7}, "parameters: expected an object, got int"),
    ({"inputs": [tensor()], "parameters": {"timeout": "1"}}, "parameters.timeout: expected an integer, got str"),
    ({"inputs": [tensor()], "parameters": {"timeout": -1}}, "expected microseconds, 0 or more, got -1"),
    ({"inputs": [tensor()], "outputs": {}}, "outputs: expected a list, got dict"),
    ({"inputs": [tensor()], "id": deep(300)}, "id: expected a string, got list"),
    ({"inputs": [tensor(data=[math.nan] * 4)], "parameters": {"timeout": 10**400}}, "timeout: expected an integer"),
    ({"inputs": [tensor()], "parameters": {"timeout": 1 << 64}}, "timeout: expected an integer, got float"),
    ({"inputs": [tensor()], "outputs": [{"name": "z"}]}, "outputs: expected some of ['y'], got 'z'"),
    ({"inputs": [tensor()], "outputs": [{"name": "y"}, {"name": "y"}]}, "outputs: 'y' is requested twice"),
    (
        {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
        "output 'y'.parameters.binary_data: expected a boolean, got int",
    ),
    (
        {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"classification": -1}}]},
        "classification: expected 0 or more, got -1",
    ),
]


@pytest.mark.parametrize(("document", "message"), BAD_DOCUMENTS, ids=[message for _, message in BAD_DOCUMENTS])
def test_bad_documents_are_refused(server: Running, document: Any, message: str) -> None:
    answer = server.infer("doubler", document)
    assert (answer.status, message in answer.error) == (400, True), answer.error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: expected JSON"),
        (b"{", "body: expected JSON"),
        (b'{"inputs": [NaN', "body: expected JSON"),
        (b'\xff\xfe{"inputs": []}', "body: expected JSON"),
        (b'{"id": "\xc3\x28", "inputs": []}', "body: expected JSON"),
        (b'{"id": "\\ud800", "inputs": []}', "body: expected JSON"),
        (b'{"id": "\\uD800", "inputs": [NaN]}', "body: expected JSON"),
        (b'{"id": "\xed\xa0\x80", "inputs": [NaN]}', "body: expected JSON"),
        (b"[" * 10_000 + b"]" * 10_000, "body: expected JSON"),
        (b"[NaN," + b"[" * 50_000 + b"]" * 50_001, "body: expected JSON"),
        (b'{"inputs":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, "body: expected JSON"),
        (b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.", "body: expected JSON"),
    ],
)
def test_bodies_that_are_not_json_are_refused(server: Running, body: bytes, message: str) -> None:
    answer = server.ask("POST", "/v2/models/doubler/infer", body)
    assert (answer.status, message in answer.error) == (400, True), answer.error


def test_ignored_fields_may_be_nested_to_any_depth(server: Running) -> None:
    for _ in range(2):
        answer = server.infer("doubler", {"inputs": [tensor()], "parameters": {"note": deep(300)}})
        assert answer.json["outputs"][0]["data"] == [2, 4, 6, 8]


def send_blob(server: Running, blobs: bytes, **headers: str) -> Answer:
    return server.infer("doubler", {"inputs": [blob()]}, blobs, **headers)


@pytest.mark.parametrize("size", [1, 15, 17, 1000])
def test_missing_or_extra_bytes_are_refused(server: Running, size: int) -> None:
    answer = send_blob(server, b"x" * size)
    assert answer.status == 400
    assert "expected 16 bytes of binary data" in answer.error
    assert f"got {size}" in answer.error


@pytest.mark.parametrize("value", ["x", "-1", "1e3", "1" * 30, "99999"])
def test_a_wrong_header_length_is_refused(server: Running, value: str) -> None:
    answer = server.ask("POST", "/v2/models/doubler/infer", b"{}", {"Inference-Header-Content-Length": value})
    assert answer.status == 400
    assert "inference-header-content-length: expected" in answer.error


def test_binary_data_that_do_not_fit_their_datatype_are_refused(server: Running) -> None:
    for data, message in (
        (b"\x05\x00\x00\x00ab", "says 5 bytes, 2 are left"),
        (b"\x01\x00", "needs a 4-byte length, 2 bytes are left"),
        (b"\x01\x00\x00\x00a" * 3, "expected 2 elements for shape [1, 2], got more"),
        (b"\x01\x00\x00\x00a", "expected 2 elements for shape [1, 2], got 1"),
        (b"\xff\xff\xff\xff", "says 4294967295 bytes"),
    ):
        item = tensor(datatype="BYTES", shape=[1, 2], data=None, parameters={"binary_data_size": len(data)})
        answer = server.infer("text", {"inputs": [item]}, data)
        assert (answer.status, message in answer.error) == (400, True), answer.error


def test_nonzero_bytes_count_as_true(server: Running) -> None:
    item = tensor(datatype="BOOL", shape=[1, 4], data=None, parameters={"binary_data_size": 4})
    answer = server.infer("flags", {"inputs": [item]}, b"\x00\x01\x02\xff")
    assert answer.json["outputs"][0]["data"] == [False, True, True, True]


def test_integers_out_of_range_are_refused(server: Running) -> None:
    answer = server.infer("count", {"inputs": [tensor(datatype="INT8", shape=[1, 1], data=[128])]})
    assert "out of the range of INT8" in answer.error
    answer = server.infer("count", {"inputs": [tensor(datatype="INT8", shape=[1, 1], data=[1.5])]})
    assert "expected INT8 values, got a number" in answer.error


def test_inputs_with_different_numbers_of_rows_are_refused(server: Running) -> None:
    inputs = [tensor(name=n, datatype="INT32", shape=[r, 16], data=[0] * 16 * r) for n, r in (("a", 1), ("b", 2))]
    assert "the same number of rows" in server.infer("adder", {"inputs": inputs}).error


@pytest.mark.parametrize("wrap", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_compression_bombs_stop_at_the_limit(server: Running, wrap: Any) -> None:
    coding = "gzip" if wrap is gzip.compress else "deflate"
    answer = server.ask("POST", "/v2/models/doubler/infer", wrap(b" " * 50_000_000), {"Content-Encoding": coding})
    assert (answer.status, answer.error) == (413, "body: expected at most 300000 bytes once inflated, got more")


def test_data_that_are_not_compressed_are_refused(server: Running) -> None:
    document = json.dumps({"inputs": [tensor()]}).encode()
    for body, coding, status, message in (
        (document, "gzip", 400, "expected gzip data"),
        (gzip.compress(document)[:-9], "gzip", 400, "expected complete gzip data"),
        (document, "br", 415, "expected gzip or deflate, got 'br'"),
        (gzip.compress(document), "deflate", 400, "expected deflate data"),
    ):
        answer = server.ask("POST", "/v2/models/doubler/infer", body, {"Content-Encoding": coding})
        assert (answer.status, message in answer.error) == (status, True), answer.error
    half = len(document) // 2
    parts = gzip.compress(document[:half]) + gzip.compress(document[half:])
    assert server.ask("POST", "/v2/models/doubler/infer", parts, {"Content-Encoding": "gzip"}).status == 200


def test_bodies_over_the_limit_are_refused(server: Running) -> None:
    answer = server.ask("POST", "/v2/models/doubler/infer", b" " * 200_001)
    assert (answer.status, "at most 200000 bytes" in answer.error) == (413, True)
    assert server.ask("POST", "/v2/repository/index", b" " * 200_001).status == 413


def test_the_refusal_of_large_json_suggests_binary_data(server: Running) -> None:
    text = json.dumps({"inputs": [tensor()]}).encode()
    for body, headers in (
        (text.ljust(150_001), {}),
        (gzip.compress(text.ljust(150_001)), {"Content-Encoding": "gzip"}),
    ):
        answer = server.ask("POST", "/v2/models/doubler/infer", body, headers)
        assert (answer.status, "150000 bytes of JSON, got 150001; send tensors as binary" in answer.error) == (
            413,
            True,
        )
    assert server.ask("POST", "/v2/models/doubler/infer", text.ljust(150_000)).status == 200
    assert server.ask_raw(infer_request("doubler", rows(11_000))).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/doubler/infer", 405),
        ("PUT", "/v2/models/doubler/infer", 405),
        ("POST", "/v2/models/nobody/infer", 404),
        ("POST", "/v2/models/doubler/versions/2/infer", 404),
        ("POST", "/v2/models/..%2f..%2fetc%2fpasswd/infer", 404),
        ("POST", "/v2/models/%2e%2e/infer", 404),
        ("POST", "/v2/models/%252e%252e/infer", 404),
        ("POST", "/v2/models/a%00b/infer", 404),
        ("POST", "/v2/models/%ff%fe/infer", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/config", 404),
        ("GET", "/v2/models/nobody/stats", 404),
        ("GET", "/v2/models/nobody/ready", 404),
        ("POST", "/v2/repository/models/nobody/load", 404),
        ("POST", "/v2/repository/models/nobody/unload", 404),
        ("DELETE", "/v2", 405),
        ("GET", "/v3", 404),
    ],
)
def test_wrong_paths_and_methods_are_refused(server: Running, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path, json.dumps({"inputs": [tensor()]}).encode() if "infer" in path else b"")
    assert answer.status == status
    assert answer.error


@pytest.mark.parametrize("body", [b"[]", b"3", b'{"ready": 1}', b"{", b'{"parameters": []}'])
def test_wrong_bodies_of_repository_calls_are_refused(server: Running, body: bytes) -> None:
    path = "/v2/repository/models/doubler/unload" if b"parameters" in body else "/v2/repository/index"
    answer = server.ask("POST", path, body)
    assert (answer.status, "expected" in answer.error) == (400, True)
    assert server.ask("GET", "/v2/models/doubler/ready").status == 200  # a refused call changes nothing


def test_a_raw_body_is_the_only_row_of_the_only_input(server: Running) -> None:
    header = {"Inference-Header-Content-Length": "0"}
    answer = server.ask("POST", "/v2/models/doubler/infer", rows(1).tobytes(), header)
    np.testing.assert_array_equal(tensor_of(answer), rows(1) * 2)
    answer = server.ask("POST", "/v2/models/doubler/infer", b"12345", header)
    assert (answer.status, "expected 16 bytes" in answer.error) == (400, True)
    answer = server.ask("POST", "/v2/models/adder/infer", b"1234", header)
    assert (answer.status, "a model with one input" in answer.error) == (400, True)


def test_errors_and_management_answers_are_not_compressed(server: Running) -> None:
    accept = {"Accept-Encoding": "gzip"}
    for data in (
        request("POST", "/v2/models/nobody/infer", b"{}", accept),
        request("GET", "/v2/models/doubler", b"", accept),
        request("POST", "/v2/repository/index", b"", accept),
        request("GET", "/v2/models/stats", b"", accept),
    ):
        assert "content-encoding" not in server.ask_raw(data).headers


def test_nan_passes_and_does_not_change_other_values(server: Running) -> None:
    item = tensor(data=[1.0, 2.0, 3.0, 4.0])
    text = json.dumps({"inputs": [item]}).replace("2.0", "NaN").replace("3.0", "-Infinity")
    answer = server.ask("POST", "/v2/models/doubler/infer", text.encode())
    np.testing.assert_array_equal(answer.json["outputs"][0]["data"], [2, np.nan, -np.inf, 8])
