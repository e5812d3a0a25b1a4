"""The protocol's routes as OpenAPI describes them. They read and write their own JSON, so nothing derives this: tests
hold it against the table of routes and against what the server answers."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias

Schema: TypeAlias = dict[str, Any]

_BINARY: Schema = {"type": "string", "format": "binary"}
_TEXT: Schema = {"type": "string"}
_STRINGS: Schema = {"type": "array", "items": _TEXT}
_SHAPE: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _object(properties: Schema, required: tuple[str, ...] = (), *, closed: bool = False, **more: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, **more}
    if required:
        schema["required"] = list(required)
    if closed:
        schema["additionalProperties"] = False
    return schema


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_PARAMETERS: Schema = {"type": "object", "description": "Beside those named here, any: they are not looked at."}
_TENSOR = _object(
    {"name": _TEXT, "datatype": _TEXT, "shape": _list({"type": "integer", "minimum": -1})},
    ("name", "datatype", "shape"),
)
_DATATYPES = ["BOOL", "BYTES", "BF16", "FP16", "FP32", "FP64"]
_DATATYPES += [f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)]

SCHEMAS: dict[str, Schema] = {
    "ProtocolError": _object(
        {"error": {**_TEXT, "description": "What was expected and what came."}, "code": _TEXT}, ("error",)
    ),
    "ServerMetadata": _object(
        {"name": _TEXT, "version": _TEXT, "extensions": _STRINGS}, ("name", "version", "extensions")
    ),
    "TensorMetadata": _TENSOR,
    "ModelMetadata": _object(
        {
            "name": _TEXT,
            "versions": {**_STRINGS, "description": "Those in memory."},
            "platform": _TEXT,
            "inputs": _list(_ref("TensorMetadata")),
            "outputs": _list(_ref("TensorMetadata")),
        },
        ("name", "versions", "platform", "inputs", "outputs"),
    ),
    "ModelConfiguration": _object(
        {
            "name": _TEXT,
            "platform": _TEXT,
            "backend": _TEXT,
            "max_batch_size": {"type": "integer", "minimum": 0},
            "input": _list({"type": "object"}),
            "output": _list({"type": "object"}),
        },
        ("name", "platform", "max_batch_size", "input", "output"),
        description="As Triton writes it; with a batch axis, `dims` leave it out.",
    ),
    "Statistics": _object(
        {"model_stats": _list(_object({"name": _TEXT, "version": _TEXT}, ("name", "version")))}, ("model_stats",)
    ),
    "InferInput": _object(
        {
            "name": _TEXT,
            "datatype": {"type": "string", "enum": _DATATYPES},
            "shape": _SHAPE,
            "data": {"type": "array", "description": "Flat or nested; absent where the tensor travels in binary."},
            "parameters": {**_PARAMETERS, "properties": {"binary_data_size": {"type": "integer", "minimum": 0}}},
        },
        ("name", "datatype", "shape"),
    ),
    "InferOutputAsked": _object(
        {
            "name": _TEXT,
            "parameters": {
                **_PARAMETERS,
                "properties": {
                    "binary_data": {"type": "boolean"},
                    "classification": {"type": "integer", "minimum": 1},
                },
            },
        },
        ("name",),
    ),
    "InferRequest": _object(
        {
            "id": _TEXT,
            "inputs": _list(_ref("InferInput")),
            "outputs": {**_list(_ref("InferOutputAsked")), "description": "Absent: all outputs."},
            "parameters": {
                **_PARAMETERS,
                "properties": {
                    "timeout": {"type": "integer", "minimum": 0, "description": "Microseconds."},
                    "priority": {"type": "integer", "minimum": 0},
                    "binary_data_output": {"type": "boolean"},
                },
            },
        },
        ("inputs",),
    ),
    "InferOutput": _object(
        {
            "name": _TEXT,
            "datatype": _TEXT,
            "shape": _SHAPE,
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
        ("name", "datatype", "shape"),
    ),
    "InferResponse": _object(
        {"id": _TEXT, "model_name": _TEXT, "model_version": _TEXT, "outputs": _list(_ref("InferOutput"))},
        ("model_name", "model_version", "outputs"),
    ),
    "LogSettings": _object(
        {
            "log_file": {"type": "string", "enum": [""]},
            "log_info": {"type": "boolean"},
            "log_warning": {"type": "boolean"},
            "log_error": {"type": "boolean"},
            "log_verbose_level": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            "log_format": {"type": "string", "enum": ["default"]},
        },
        closed=True,
        description="What is to change, or all of them. One that cannot be changed has one value.",
    ),
    "TraceSettings": _object(
        {
            "trace_level": {"enum": [["OFF"], None]},
            "trace_rate": {"enum": ["1000", None]},
            "trace_count": {"enum": ["-1", None]},
            "log_frequency": {"enum": ["0", None]},
            "trace_file": {"enum": ["", None]},
            "trace_mode": {"enum": ["triton", None]},
        },
        closed=True,
        description="Tracing of this kind is off, and stays so.",
    ),
    "IndexAsked": _object({"ready": {"type": "boolean", "description": "Only versions that answer."}}),
    "IndexLine": _object(
        {
            "name": _TEXT,
            "version": _TEXT,
            "state": {"type": "string", "enum": ["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]},
            "reason": _TEXT,
        },
        ("name", "version", "state"),
    ),
    "LoadAsked": _object(
        {"parameters": {"type": ["object", "null"], "description": "Neither `config` nor `file:...`."}}
    ),
    "UnloadAsked": _object(
        {"parameters": {"type": ["object", "null"], "properties": {"unload_dependents": {"type": "boolean"}}}}
    ),
    "RegionAsked": _object(
        {
            "key": {**_TEXT, "pattern": "^/[^/]+$", "description": "The object's name."},
            "offset": {"type": "integer", "minimum": 0},
            "byte_size": {"type": "integer", "minimum": 1},
        },
        ("key", "byte_size"),
    ),
    "Region": _object(
        {"name": _TEXT, "key": _TEXT, "offset": {"type": "integer"}, "byte_size": {"type": "integer"}},
        ("name", "key", "offset", "byte_size"),
    ),
}

INFER_EXAMPLE: Schema = {
    "id": "42",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}],
    "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
}


class Described(NamedTuple):
    """One method of one path."""

    summary: str
    answers: Schema | None = None  # by kind of content; None: nothing
    body: Schema | None = None  # likewise; None: what is sent is not read
    needs_body: bool = False
    statuses: tuple[int, ...] = ()  # beside 200 and those of every route
    headers: tuple[Schema, ...] = ()


def _json(schema: Schema, example: object = None) -> Schema:
    return {"application/json": {"schema": schema} | ({} if example is None else {"example": example})}


_MODEL, _VERSION = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
_INFER = Described(
    "Run a model; without a version the one that the alias live names",
    answers={**_json(_ref("InferResponse")), "application/octet-stream": {"schema": _BINARY}},
    body={**_json(_ref("InferRequest"), INFER_EXAMPLE), "application/octet-stream": {"schema": _BINARY}},
    needs_body=True,
    statuses=(404, 413, 415, 429, 507),
    headers=(
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "required": False,
            "schema": {"type": "integer", "minimum": 0},
            "description": "Bytes of JSON at the body's beginning; binary tensors follow.",
        },
    ),
)
_SETTING = _json(_ref("TraceSettings"))
_REGIONS = Described("The regions of shared memory", _json(_list(_ref("Region"))))
_PAGE = {"text/html": {"schema": _TEXT}}

ROUTES: dict[tuple[str, str], Described] = {
    ("GET", "/v2"): Described("What the server is", _json(_ref("ServerMetadata"))),
    ("GET", "/metrics"): Described("Metrics as Prometheus reads them", {"text/plain": {"schema": _TEXT}}),
    ("GET", "/openapi.json"): Described("This description", _json({"type": "object"})),
    ("GET", "/docs"): Described("This description for people", _PAGE),
    ("GET", "/v2/logging"): Described("What is logged", _json(_ref("LogSettings"))),
    ("POST", "/v2/logging"): Described(
        "Change what is logged", _json(_ref("LogSettings")), _json(_ref("LogSettings")), statuses=(413,)
    ),
    **{
        ("GET", f"{base}/trace/setting"): Described("Trace settings", _SETTING, statuses=more)
        for base, more in (("/v2", ()), (_MODEL, (404,)))
    },
    **{
        ("POST", f"{base}/trace/setting"): Described(
            "Leave trace settings as they are", _SETTING, _SETTING, False, more
        )
        for base, more in (("/v2", (413,)), (_MODEL, (404, 413)))
    },
    ("POST", "/v2/repository/index"): Described(
        "All versions and their states", _json(_list(_ref("IndexLine"))), _json(_ref("IndexAsked")), statuses=(413,)
    ),
    ("POST", "/v2/repository/models/{model}/load"): Described(
        "Load or reload a model", body=_json(_ref("LoadAsked")), statuses=(404, 409, 413, 422, 507)
    ),
    ("POST", "/v2/repository/models/{model}/unload"): Described(
        "Take a model out of service", body=_json(_ref("UnloadAsked")), statuses=(404, 409, 413)
    ),
    ("GET", "/v2/models/stats"): Described("Statistics of all versions", _json(_ref("Statistics"))),
    **{
        ("GET", base + tail): Described(text, _json(_ref(name)) if name else None, statuses=(404,))
        for base in (_MODEL, _VERSION)
        for tail, text, name in (
            ("", "Inputs and outputs of a model", "ModelMetadata"),
            ("/config", "The configuration of a model", "ModelConfiguration"),
            ("/stats", "Statistics of a model", "Statistics"),
            ("/ready", "Whether a model answers", ""),
        )
    },
    ("POST", f"{_MODEL}/infer"): _INFER,
    ("POST", f"{_VERSION}/infer"): _INFER,
    **{("GET", f"/v2/{kind}sharedmemory/status"): _REGIONS for kind in ("system", "cuda")},
    **{
        ("GET", f"/v2/{kind}sharedmemory/region/{{region}}/status"): _REGIONS._replace(statuses=(404,))
        for kind in ("system", "cuda")
    },
    ("POST", "/v2/systemsharedmemory/region/{region}/register"): Described(
        "Register a region of shared memory", None, _json(_ref("RegionAsked")), True, (404, 409, 413)
    ),
    ("POST", "/v2/cudasharedmemory/region/{region}/register"): Described("Not supported"),
    **{
        ("POST", f"/v2/{kind}sharedmemory{tail}/unregister"): Described("Forget regions of shared memory")
        for kind in ("system", "cuda")
        for tail in ("", "/region/{region}")
    },
}


def operation(method: str, path: str, described: Described) -> Schema:
    """Return OpenAPI's object for a route but for what all routes have in common."""
    names = re.findall(r"{(\w+)}", path)
    made: Schema = {
        "tags": ["v2" if path.startswith("/v2") else path.strip("/").partition(".")[0]],
        "summary": described.summary,
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "responses": {"200": {"description": "Done"}},
    }
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    if parameters or described.headers:
        made["parameters"] = [*parameters, *described.headers]
    if described.answers is not None:
        made["responses"]["200"]["content"] = described.answers
    if described.body is not None:
        made["requestBody"] = {"required": described.needs_body, "content": described.body}
    return made
