"""Graphs to ONNX bytes: `export`, for graphs of canonical operators (as imported, before fusion)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from core.errors import UnsupportedError
from core.frontends.declared import type_proto
from core.frontends.proto import NEWEST_OPSET, newest_opset
from core.ir.dim import SymDim
from core.ir.graph import Array, Attr, Graph, Node, Value
from core.ir.types import DType, OptionalType, SequenceType, TensorType
from core.ops import registry

_IR_VERSION = 10


def export(graph: Graph, opset: int = NEWEST_OPSET) -> bytes:
    """The graph as an ONNX model. UnsupportedError for what ONNX cannot say: fused operators, layouts, state."""
    if graph.states:
        raise UnsupportedError("has state, which ONNX cannot express", where=f"graph '{graph.name}'")
    proto = _graph(graph)
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(domain, newest_opset(domain)) for domain in sorted(_domains(graph))]
    model = helper.make_model(proto, opset_imports=imports, ir_version=_IR_VERSION)
    return bytes(model.SerializeToString())


def _domains(graph: Graph) -> set[str]:
    """The domains of its operators, besides the default one."""
    domains = {registry.get(node.op).domain for node in graph.nodes} - {""}
    return domains.union(*(_domains(body) for node in graph.nodes for body in node.subgraphs))


def _graph(graph: Graph) -> onnx.GraphProto:
    tensors = [_tensor(array, value.name) for value, array in graph.constants.items()]
    nodes = [_node(node, tensors) for node in graph.nodes]
    return helper.make_graph(
        nodes, graph.name, list(map(_info, graph.inputs)), list(map(_info, graph.outputs)), tensors
    )


def _info(value: Value) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=value.name, type=type_proto(value.type))


def _tensor(array: Array, name: str) -> onnx.TensorProto:
    if DType.from_numpy(array.dtype) is DType.STRING:
        items = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
        return onnx.TensorProto(name=name, dims=array.shape, data_type=DType.STRING.onnx_code, string_data=items)
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def _node(node: Node, tensors: list[onnx.TensorProto]) -> onnx.NodeProto:
    """The node; parameters that became attributes are inputs again, their constants added to `tensors`."""
    op, where = registry.get(node.op), registry.describe(node)
    if op.domain == "lathe":
        raise UnsupportedError(f"is of domain '{op.domain}', which ONNX does not have", where=where)
    if node.attrs.get("layout") == "NHWC":
        raise UnsupportedError("has its channels last, which ONNX does not have", where=where)
    inputs = ["" if value is None else value.name for value in node.inputs]
    attrs = {name: value for name, value in node.attrs.items() if value is not None and name != "layout"}
    for name, index in op.params.items():
        if name in attrs:
            inputs += [""] * (index + 1 - len(inputs))
            inputs[index] = f"{node.outputs[0].name}/{name}"
            tensors.append(_tensor(_parameter(attrs.pop(name), where), inputs[index]))
    proto = helper.make_node(node.op, inputs, [value.name for value in node.outputs], node.name, domain=op.domain)
    proto.attribute.extend(_attribute(name, value, where) for name, value in attrs.items())
    return proto


def _parameter(value: Attr, where: str) -> Array:
    items = value if isinstance(value, tuple) else (value,)
    if any(isinstance(item, SymDim) for item in items):
        raise UnsupportedError(f"has a parameter that depends on symbols: {value!r}", where=where)
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _attribute(name: str, value: Attr, where: str) -> onnx.AttributeProto:
    match value:
        case Graph():
            return helper.make_attribute(name, _graph(value))
        case np.ndarray():
            return helper.make_attribute(name, _tensor(value, name))
        case DType():
            return helper.make_attribute(name, value.onnx_code)
        case TensorType() | SequenceType() | OptionalType():
            return helper.make_attribute(name, type_proto(value))
        case ():
            return helper.make_attribute(name, (), attr_type=onnx.AttributeProto.INTS)
        case int() | float() | str() | bytes() | tuple():
            return helper.make_attribute(name, value)
    raise UnsupportedError(f"attribute '{name}' is {value}, which ONNX cannot express", where=where)
