"""The Open Inference Protocol on the wire: encodes requests and decodes responses. Opens no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import ml_dtypes
import numpy as np
import orjson
from numpy.typing import NDArray

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Response:
    """A complete HTTP response; header names are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body) if self.body else None


@dataclass(frozen=True, slots=True)
class Inferred:
    """A decoded infer response."""

    version: str
    outputs: dict[str, NDArray[Any]]


def http_request(
    method: str, path: str, host: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    fields = {"Host": host, **(headers or {}), "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def infer_path(model: str, version: str = "") -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version else "") + "/infer"


def infer_body(inputs: Tensors, timeout_us: int = 0) -> tuple[bytes, int]:
    """`(body, length of its JSON part)` with binary inputs, asking for binary outputs. `timeout_us` 0: no timeout."""
    described = [
        {
            "name": name,
            "shape": list(value.shape),
            "datatype": DATATYPES[value.dtype],
            "parameters": {"binary_data_size": value.nbytes},
        }
        for name, value in inputs.items()
    ]
    parameters = {"binary_data_output": True} | ({"timeout": timeout_us} if timeout_us else {})
    head = orjson.dumps({"inputs": described, "parameters": parameters})
    return head + b"".join(np.ascontiguousarray(value).tobytes() for value in inputs.values()), len(head)


def infer_request(host: str, model: str, inputs: Tensors, version: str = "", timeout_us: int = 0) -> bytes:
    """The bytes of a whole request, which can be written to a socket any number of times."""
    body, json_length = infer_body(inputs, timeout_us)
    headers = {"Inference-Header-Content-Length": str(json_length)}
    return http_request("POST", infer_path(model, version), host, body, headers)


def read_inferred(response: Response) -> Inferred:
    """Decode an infer response. ValueError if its length does not match its JSON part."""
    json_length = int(response.headers.get(b"inference-header-content-length", len(response.body)))
    head = orjson.loads(response.body[:json_length])
    outputs, position = {}, json_length
    for output in head["outputs"]:
        dtype = DTYPES[output["datatype"]]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            flat = np.array(output["data"], dtype)
        else:
            flat = np.frombuffer(response.body[position : position + size], dtype)
            position += size
        outputs[output["name"]] = flat.reshape(output["shape"])
    if position != max(json_length, len(response.body)):
        raise ValueError(f"answer has {len(response.body)} bytes, its JSON part describes {position}")
    return Inferred(head["model_version"], outputs)
