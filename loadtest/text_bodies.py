"""Requests with string tensors (BYTES), over HTTP, in shared memory and over gRPC.

Empty strings cost the server most per byte. The model takes a list of strings and answers with the first one. gRPC
messages are encoded here field by field, so that they can be invalid in ways that client libraries do not allow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import TensorProto, helper

MIB = 1 << 20
SIZE = 15 * MIB  # bytes of strings: below the server's limit of 16 MiB for JSON
LARGEST = 60 * MIB  # bytes of other messages: below the server's limit of 64 MiB
TEXTS, IN_MEMORY = "loadtest-texts", "loadtest-texts-region"
SHARED = Path("/dev/shm")
METHOD = "/inference.GRPCInferenceService/ModelInfer"

# Numbers of fields in inference.proto.
MODEL_NAME, PARAMETERS, INPUTS, RAW = 1, 4, 5, 7
NAME, DATATYPE, SHAPE, CONTENTS = 1, 2, 3, 5
INT_CONTENTS, FP32_CONTENTS, BYTES_CONTENTS = 2, 6, 8


def first_text() -> bytes:
    """A model that answers with the first of a list of strings."""
    ends = [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in (("begin", 0), ("end", 1))]
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", "begin", "end"], ["y"])],
        "texts",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, [1])],
        ends,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    made: bytes = model.SerializeToString()
    return made


def texts(count: int) -> bytes:
    """`count` empty strings in the binary tensor format (four bytes of length each)."""
    return bytes(4 * count)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def http_bodies() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Name, body and headers of requests to the model `first_text`."""
    count = SIZE // 4
    asked = {"name": "x", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [asked]}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    yield f"{count} texts of no letter, binary", head + texts(count), length
    count = SIZE // 3
    asked = {"name": "x", "datatype": "BYTES", "shape": [count]}
    head = json.dumps({"inputs": [asked]}).encode()[:-3]
    yield f"{count} texts of no letter as JSON", head + b', "data": [' + b'"",' * (count - 1) + b'""]}]}', {}
    yield "texts in shared memory, 16 Mi of no letter", _in_memory(16 * MIB), {}


def _in_memory(count: int) -> bytes:
    place = {"shared_memory_region": IN_MEMORY, "shared_memory_byte_size": 4 * count}
    asked = {"name": "x", "datatype": "BYTES", "shape": [count], "parameters": place}
    return json.dumps({"inputs": [asked]}).encode()


@contextmanager
def shared_texts(count: int = 16 * MIB) -> Iterator[dict[str, object]]:
    """A shared-memory file of empty strings, for the time of the block. Yields the body that registers it."""
    key = f"loadtest-{os.getpid()}"
    path = SHARED / key
    with path.open("wb") as file:
        file.truncate(4 * count)
    try:
        yield {"key": f"/{key}", "offset": 0, "byte_size": 4 * count}
    finally:
        path.unlink()


# -- over gRPC ---------------------------------------------------------------------------------------------------------


def messages(numbers: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of messages to the model `first_text`, and to a model `numbers` that takes rows of 4 FP32."""
    count = SIZE // 4
    yield f"{count} texts of no letter, raw", _message(TEXTS, "BYTES", [count]) + _field(RAW, texts(count))
    count = SIZE // 2
    elements = _field(BYTES_CONTENTS, b"") * count
    yield f"{count} texts of no letter as elements", _message(TEXTS, "BYTES", [count], elements)
    count = LARGEST // 16
    packed = _field(FP32_CONTENTS, bytes(16 * count))
    yield f"{4 * count} numbers as elements, all 0", _message(numbers, "FP32", [count, 4], packed)
    wrong = _field(INT_CONTENTS, bytes(LARGEST))
    yield f"{LARGEST} numbers of the wrong list", _message(numbers, "FP32", [4, 4], wrong)
    count = LARGEST // 2
    yield f"{count} inputs without a name", _field(MODEL_NAME, numbers.encode()) + _field(INPUTS, b"") * count
    entry = _field(PARAMETERS, _field(1, b"k") + _field(2, b"\x08\x01"))
    count = LARGEST // len(entry)
    yield f"{count} parameters of one name", _field(MODEL_NAME, numbers.encode()) + entry * count


def _message(model: str, datatype: str, shape: list[int], contents: bytes = b"") -> bytes:
    sizes = b"".join(map(varint, shape))
    one = _field(NAME, b"x") + _field(DATATYPE, datatype.encode()) + _field(SHAPE, sizes)
    return _field(MODEL_NAME, model.encode()) + _field(INPUTS, one + (_field(CONTENTS, contents) if contents else b""))


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field in Protocol Buffers encoding: https://protobuf.dev/programming-guides/encoding/."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """A non-negative integer of any size as a Protocol Buffers varint: groups of seven bits, lowest first."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def call(address: str, message: bytes, patience: float) -> str:
    """The status of one ModelInfer call over a new connection: "OK", or the name of the error and its details.

    RuntimeError if the call cannot be made.

    A child process makes the call, because gRPC holds the interpreter lock while it copies the message.
    """
    command = [sys.executable, "-m", "loadtest.text_bodies", address, str(patience)]
    done = subprocess.run(command, input=message, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"the gRPC call failed: {done.stderr.decode()[-500:]}")
    return done.stdout.decode().strip()


def _call(address: str, patience: float) -> str:
    import grpc  # imported here: an optional dependency that other scenarios do not need

    message = sys.stdin.buffer.read()
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        send = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
        try:
            send(message, timeout=patience)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


if __name__ == "__main__":
    print(_call(sys.argv[1], float(sys.argv[2])))
