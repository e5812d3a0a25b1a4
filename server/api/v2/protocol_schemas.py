"""OpenAPI descriptions of the protocol's routes.

FastAPI cannot derive them, because these routes read and write their own JSON. Tests compare them with the table of
routes and with the server's answers.
"""

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


_PARAMETERS: Schema = {"type": "object", "description": "Other parameters are ignored."}
_TENSOR = _object(
    {"name": _TEXT, "datatype": _TEXT, "shape": _list({"type": "integer", "minimum": -1})},
    ("name", "datatype", "shape"),
)
_DATATYPES = ["BOOL", "BYTES", "BF16", "FP16", "FP32", "FP64"]
_DATATYPES += [f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)]

SCHEMAS: dict[str, Schema] = {
    "ProtocolError": _object(
        {"error": {**_TEXT, "description": "What was expected and what was given."}, "code": _TEXT}, ("error",)
    ),
    "ServerMetadata": _object(
        {"name": _TEXT, "version": _TEXT, "extensions": _STRINGS}, ("name", "version", "extensions")
    ),
    "TensorMetadata": _TENSOR,
    "ModelMetadata": _object(
        {
            "name": _TEXT,
            "versions": {**_STRINGS, "description": "The versions in memory."},
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
        description="In Triton's format; with a batch axis, `dims` omit it.",
    ),
    "Statistics": _object(
        {"model_stats": _list(_object({"name": _TEXT, "version": _TEXT}, ("name", "version")))}, ("model_stats",)
    ),
    "InferInput": _object(
        {
            "name": _TEXT,
            "datatype": {"type": "string", "enum": _DATATYPES},
            "shape": _SHAPE,
            "data": {"type": "array", "description": "Flat or nested; absent if the tensor is sent as binary data."},
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
        description="The settings to change, or all of them. A setting with one allowed value cannot be changed.",
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
        description="This kind of tracing is off and cannot be switched on.",
    ),
    "IndexAsked": _object({"ready": {"type": "boolean", "description": "Only versions that are ready."}}),
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
        {"parameters": {"type": ["object", "null"], "description": "`config` and `file:...` are not supported."}}
    ),
    "UnloadAsked": _object(
        {
            "parameters": {
                "type": ["object", "null"],
                "properties": {"unload_dependents": {"type": "boolean", "description": "Has no effect."}},
            }
        }
    ),
    "RegionAsked": _object(
        {
            "key": {**_TEXT, "pattern": "^/[^/]+$", "description": "The name of the shared memory object."},
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


class RouteDescription(NamedTuple):
    """The description of one method of one path."""

    summary: str
    answers: Schema | None = None  # by media type; None: an empty answer
    body: Schema | None = None  # by media type; None: the body is ignored
    needs_body: bool = False
    statuses: tuple[int, ...] = ()  # in addition to 200 and the statuses of all routes
    headers: tuple[Schema, ...] = ()


def _json(schema: Schema, example: object = None) -> Schema:
    return {"application/json": {"schema": schema} | ({} if example is None else {"example": example})}


_MODEL, _VERSION = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
_INFER = RouteDescription(
    "Run a model; without a version, the one of the alias `live`",
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
            "description": "Bytes of JSON at the start of the body; binary tensors follow.",
        },
    ),
)
_SETTING = _json(_ref("TraceSettings"))
_REGIONS = RouteDescription("The regions of shared memory", _json(_list(_ref("Region"))))
_PAGE = {"text/html": {"schema": _TEXT}}

ROUTES: dict[tuple[str, str], RouteDescription] = {
    ("GET", "/v2"): RouteDescription("Server metadata", _json(_ref("ServerMetadata"))),
    ("GET", "/metrics"): RouteDescription("Metrics in the Prometheus format", {"text/plain": {"schema": _TEXT}}),
    ("GET", "/openapi.json"): RouteDescription("This description", _json({"type": "object"})),
    ("GET", "/docs"): RouteDescription("This description as a page", _PAGE),
    ("GET", "/v2/logging"): RouteDescription("Log settings", _json(_ref("LogSettings"))),
    ("POST", "/v2/logging"): RouteDescription(
        "Change log settings", _json(_ref("LogSettings")), _json(_ref("LogSettings")), statuses=(413,)
    ),
    **{
        ("GET", f"{base}/trace/setting"): RouteDescription("Trace settings", _SETTING, statuses=more)
        for base, more in (("/v2", ()), (_MODEL, (404,)))
    },
    **{
        ("POST", f"{base}/trace/setting"): RouteDescription(
            "Change trace settings (not supported)", _SETTING, _SETTING, False, more
        )
        for base, more in (("/v2", (413,)), (_MODEL, (404, 413)))
    },
    ("POST", "/v2/repository/index"): RouteDescription(
        "All versions and their states", _json(_list(_ref("IndexLine"))), _json(_ref("IndexAsked")), statuses=(413,)
    ),
    ("POST", "/v2/repository/models/{model}/load"): RouteDescription(
        "Load or reload a model", body=_json(_ref("LoadAsked")), statuses=(404, 409, 413, 422, 507)
    ),
    ("POST", "/v2/repository/models/{model}/unload"): RouteDescription(
        "Unload a model", body=_json(_ref("UnloadAsked")), statuses=(404, 409, 413)
    ),
    ("GET", "/v2/models/stats"): RouteDescription("Statistics of all versions", _json(_ref("Statistics"))),
    **{
        ("GET", base + tail): RouteDescription(text, _json(_ref(name)) if name else None, statuses=(404,))
        for base in (_MODEL, _VERSION)
        for tail, text, name in (
            ("", "Inputs and outputs of a model", "ModelMetadata"),
            ("/config", "The configuration of a model", "ModelConfiguration"),
            ("/stats", "Statistics of a model", "Statistics"),
            ("/ready", "Whether a model is ready", ""),
        )
    },
    ("POST", f"{_MODEL}/infer"): _INFER,
    ("POST", f"{_VERSION}/infer"): _INFER,
    **{("GET", f"/v2/{kind}sharedmemory/status"): _REGIONS for kind in ("system", "cuda")},
    **{
        ("GET", f"/v2/{kind}sharedmemory/region/{{region}}/status"): _REGIONS._replace(statuses=(404,))
        for kind in ("system", "cuda")
    },
    ("POST", "/v2/systemsharedmemory/region/{region}/register"): RouteDescription(
        "Register a region of shared memory", None, _json(_ref("RegionAsked")), True, (404, 409, 413)
    ),
    ("POST", "/v2/cudasharedmemory/region/{region}/register"): RouteDescription("Not supported"),
    **{
        ("POST", f"/v2/{kind}sharedmemory{tail}/unregister"): RouteDescription("Unregister regions of shared memory")
        for kind in ("system", "cuda")
        for tail in ("", "/region/{region}")
    },
}


def operation(method: str, path: str, described: RouteDescription) -> Schema:
    """The OpenAPI operation object of a route, without the parts that `Application` adds to all routes."""
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
