"""Small ONNX models with sequences or strings, run by Lathe's references, by its compiled path, and by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

import lathe
from lathe.core.ir.types import DType


def model(nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, Any], outputs: Sequence[str], ml: int = 5) -> bytes:
    """A model whose inputs have the types of the feeds; a list is a sequence of tensors, a dictionary a map.

    `ml` is its opset of ai.onnx.ml.
    """
    inputs = [onnx.ValueInfoProto(name=name, type=_type(feed)) for name, feed in feeds.items()]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=name) for name in outputs])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", ml)]
    opsets.append(helper.make_opsetid("com.microsoft", 1))
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def _type(feed: Any) -> onnx.TypeProto:
    if isinstance(feed, dict):
        key, value = next(iter(feed.items()))
        return helper.make_map_type_proto(_scalar_code(key), helper.make_tensor_type_proto(_scalar_code(value), ()))
    if isinstance(feed, list):
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(_code(feed[0]), None))
    return helper.make_tensor_type_proto(_code(feed), feed.shape)


def _code(array: Any) -> int:
    return DType.from_numpy(array.dtype).onnx_code


def _scalar_code(item: Any) -> int:
    return {int: DType.INT64, float: DType.FLOAT32, str: DType.STRING}[type(item)].onnx_code


def ml(op: str, *inputs: str, **attrs: Any) -> onnx.NodeProto:
    """A node of ai.onnx.ml with the output y; arrays among the attributes become tensors."""
    tensors = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    return helper.make_node(op, inputs, ["y"], domain="ai.onnx.ml", **tensors)


def agree(
    nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, Any], *outputs: str, ml: int = 5, rtol: float = 1e-6
) -> list[Any]:
    """Lathe's outputs, interpreted and compiled, which are ONNX Runtime's."""
    data = model(nodes, feeds, outputs, ml)
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    theirs = session.run(list(outputs), dict(feeds))
    interpreted = lathe.interpret(lathe.load(data), feeds)
    compiled = lathe.compile(data, threads=1, tune="off").run(feeds)
    for ours in (interpreted, compiled):
        for name, expected in zip(outputs, theirs, strict=True):
            same(ours[name], expected, rtol)
    return [compiled[name] for name in outputs]


def same(ours: Any, theirs: Any, rtol: float = 1e-6) -> None:
    """Equal values, shapes and element types; sequences element by element."""
    if isinstance(theirs, list):
        assert isinstance(ours, list)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other, rtol)
        return
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose([ours[key] for key in theirs], list(theirs.values()), rtol)
        return
    other = np.asarray(theirs)
    assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
    if other.dtype == object:
        assert ours.tolist() == other.tolist()
    else:
        np.testing.assert_allclose(ours, other, rtol, 1e-7)
