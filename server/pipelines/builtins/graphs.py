"""Arithmetic steps: small ONNX graphs, compiled and batched like any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from pydantic import Field

from lathe.server.datatypes import NUMPY_OF
from lathe.server.pipelines.builtins.base import Options, StepRequest
from lathe.server.pipelines.definition import BadPipeline
from lathe.server.types import Array, TensorSpec

_OPSET = 21
_TINY = 1e-12  # lower bound of a norm, against division by zero

Numbers = Annotated[tuple[float, ...], Field(strict=False)]


class NormalizeOptions(Options):
    """`(pixel * scale - mean) / std`; `mean` and `std` have one number, or one per channel."""

    scale: float = 1 / 255
    mean: Numbers = (0.0,)
    std: Numbers = (1.0,)
    layout: Literal["NCHW", "NHWC"] = "NCHW"  # of the result


def normalize_image(request: StepRequest) -> bytes:
    """The ONNX file of a step: `pixels` [n, height, width, channels] of any number type -> `image` FP32, normalized.

    `image` is in the `layout` of the options, by default NCHW. Raises BadPipeline for invalid options, and if `pixels`
    has another rank or type.
    """
    options, pixels = request.read(NormalizeOptions), request.type_of("pixels")
    if len(pixels.shape) != 4 or pixels.datatype == "BYTES":
        raise BadPipeline(f"input 'pixels': expected numbers [n, height, width, channels], got {_shown(pixels)}")
    channels = pixels.shape[3]
    factor, offset = _affine(options, channels)
    is_nchw = options.layout == "NCHW"
    shape = (pixels.shape[0], channels, *pixels.shape[1:3]) if is_nchw else pixels.shape
    last = "affine" if is_nchw else "image"
    nodes = [
        helper.make_node("Cast", ["pixels"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["number", "factor"], ["scaled"]),
        helper.make_node("Add", ["scaled", "offset"], [last]),
    ]
    nodes += [helper.make_node("Transpose", [last], ["image"], perm=[0, 3, 1, 2])] if is_nchw else []
    return _graph(nodes, [pixels], [TensorSpec("image", "FP32", shape)], {"factor": factor, "offset": offset})


def _affine(options: NormalizeOptions, channels: int) -> tuple[Array, Array]:
    """Return factor and offset of the normalization, each [1] or [channels] FP32; raises BadPipeline."""
    for name, numbers in (("mean", options.mean), ("std", options.std)):
        if len(numbers) not in (1, channels):
            raise BadPipeline(f"options.{name}: expected 1 or {channels} numbers, got {len(numbers)}")
    if 0.0 in options.std:
        raise BadPipeline("options.std: expected numbers other than 0")
    mean, std = np.asarray(options.mean, np.float64), np.asarray(options.std, np.float64)
    return (options.scale / std).astype(np.float32), (-mean / std).astype(np.float32)


class PoolOptions(Options):
    """`normalize`: scale embeddings to L2 norm 1."""

    normalize: bool = True


def mean_pool(request: StepRequest) -> bytes:
    """The ONNX file of a step: `hidden` FP32 [n, length, width] and `mask` -> `embedding` FP32 [n, width].

    `mask` is INT64 [n, length]. The embedding is the mean over the positions where the mask is 1: the text embedding of
    Sentence-BERT (Reimers and Gurevych, 2019). With `normalize` it has L2 norm 1, so that dot products are cosines.
    Raises BadPipeline.
    """
    options, hidden = request.read(PoolOptions), request.type_of("hidden")
    if len(hidden.shape) != 3 or hidden.datatype != "FP32":
        raise BadPipeline(f"input 'hidden': expected FP32 [n, length, width], got {_shown(hidden)}")
    rows, length, width = hidden.shape
    mean = "mean" if options.normalize else "embedding"
    nodes = [
        helper.make_node("Cast", ["mask"], ["weight"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weight", "last"], ["weights"]),
        helper.make_node("Mul", ["hidden", "weights"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "places"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["weights", "places"], ["present"], keepdims=0),
        helper.make_node("Max", ["present", "one"], ["count"]),
        helper.make_node("Div", ["total", "count"], [mean]),
    ]
    if options.normalize:
        nodes += [
            helper.make_node("ReduceL2", ["mean", "places"], ["length"], keepdims=1),
            helper.make_node("Max", ["length", "tiny"], ["divisor"]),
            helper.make_node("Div", ["mean", "divisor"], ["embedding"]),
        ]
    constants: dict[str, Array] = {
        "last": np.array([2], np.int64),
        "places": np.array([1], np.int64),
        "one": np.array(1, np.float32),
        "tiny": np.array(_TINY, np.float32),
    }
    inputs = [hidden, TensorSpec("mask", "INT64", (rows, length))]
    return _graph(nodes, inputs, [TensorSpec("embedding", "FP32", (rows, width))], constants)


def softmax(request: StepRequest) -> bytes:
    """The ONNX file of a step: `logits` FP32 [n, ..., classes] -> `probabilities` of the same shape (last axis).

    Raises BadPipeline.
    """
    request.read(Options)
    logits = request.type_of("logits")
    if len(logits.shape) < 2 or logits.datatype != "FP32":
        raise BadPipeline(f"input 'logits': expected FP32 [n, ..., classes], got {_shown(logits)}")
    node = helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1)
    return _graph([node], [logits], [TensorSpec("probabilities", "FP32", logits.shape)], {})


def sigmoid(request: StepRequest) -> bytes:
    """The ONNX file of a step: `logits` FP32 -> `probabilities` of the same shape, each 1 / (1 + exp(-logit)).

    Raises BadPipeline.
    """
    request.read(Options)
    logits = request.type_of("logits")
    if logits.datatype != "FP32":
        raise BadPipeline(f"input 'logits': expected FP32, got {_shown(logits)}")
    node = helper.make_node("Sigmoid", ["logits"], ["probabilities"])
    return _graph([node], [logits], [TensorSpec("probabilities", "FP32", logits.shape)], {})


def _graph(
    nodes: Sequence[NodeProto], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], constants: dict[str, Array]
) -> bytes:
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "step",
        [_info(spec) for spec in inputs],
        [_info(spec) for spec in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
    return bytes(model.SerializeToString(deterministic=True))


def _info(spec: TensorSpec) -> ValueInfoProto:
    """The ONNX value info of a tensor; dynamic sizes are named by axis, so all tensors of a step agree on them."""
    shape = [size if size >= 0 else f"axis{axis}" for axis, size in enumerate(spec.shape)]
    return helper.make_tensor_value_info(spec.name, helper.np_dtype_to_tensor_dtype(NUMPY_OF[spec.datatype]), shape)


def _shown(spec: TensorSpec) -> str:
    return spec.text
