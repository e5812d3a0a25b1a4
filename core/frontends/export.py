"""The exporter: from graphs, imported or optimized, to the bytes of ONNX models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx import helper, numpy_helper

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.annotations import ROWS, annotate
from lathe.core.frontends.declared_types import type_proto
from lathe.core.frontends.lower import lower
from lathe.core.frontends.opset_support import min_inputs, oldest_opset
from lathe.core.frontends.sparse_initializers import sparse_initializer
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType, MapType, OptionalType, SequenceType, TensorType
from lathe.core.ops.opdef import registry

_IR_VERSION = 10  # the oldest version that is written: all runtimes of recent years read it


def export(graph: Graph, opset: int | None = None, sparse: bool = False) -> bytes:
    """The graph as an ONNX model of standard operators. Fused operators are written as the operators that they fuse.

    `opset` is that of the default domain; by default the oldest one from 21 on that has all operators in the form that
    the graph uses. A state becomes an input with an initializer, and its next value an output. A default that a run may
    replace also becomes an input with an initializer. UnsupportedError for graphs that ONNX, or that opset, cannot
    express, and for models larger than the 2 GiB of an ONNX file. Annotations, control edges, and the permission to
    round rows become metadata of nodes (`annotations.py`).

    With `sparse`, float32 and float64 constants become sparse initializers where that makes the file smaller. Lathe and
    ONNX Runtime read them, OpenVINO does not.
    """
    lowered = lower(graph)
    proto = _graph(lowered)
    if sparse:
        _make_sparse(proto, lowered)
    imports = [helper.make_opsetid(*entry) for entry in _opsets(lowered, opset).items()]
    version = max(_IR_VERSION, helper.find_min_ir_version_for(imports, ignore_unknown=True))
    model = helper.make_model(proto, opset_imports=imports, ir_version=version, producer_name="lathe")
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise UnsupportedError(f"does not fit into an ONNX file: {error}", where=f"graph '{graph.name}'") from None


def _opsets(graph: Graph, given: int | None) -> Mapping[str, int]:
    """The opset of each domain of the graph's operators: the oldest possible, but `given` for the default domain."""
    domains: dict[str, list[Node]] = {"": []}
    for node in _all_nodes(graph):
        domains.setdefault(registry.get(node.op).domain, []).append(node)
    return {domain: oldest_opset(domain, nodes, None if domain else given) for domain, nodes in sorted(domains.items())}


def _all_nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.subgraphs:
            yield from _all_nodes(body)


def _graph(graph: Graph) -> onnx.GraphProto:
    states = [state.value for state in graph.states]
    updates = [state.update for state in graph.states if state.update not in graph.outputs]
    tensors = [_tensor(state.initial, state.value.name) for state in graph.states]
    tensors += [_tensor(array, value.name) for value, array in graph.constants.items()]
    defaults = [onnx.ValueInfoProto(name=v.name, type=type_proto(type_)) for v, type_ in graph.defaults.items()]
    inner = [value for node in graph.nodes for value in node.outputs if value not in graph.outputs]
    return helper.make_graph(
        list(map(_node, graph.nodes)),
        graph.name,
        [*map(_info, [*graph.inputs, *states]), *defaults],
        list(map(_info, dict.fromkeys([*graph.outputs, *updates]))),
        tensors,
        value_info=list(map(_info, inner)),
    )


def _make_sparse(proto: onnx.GraphProto, graph: Graph) -> None:
    """Replace initializers of constants by sparse ones where those are smaller."""
    found = ((value.name, sparse_initializer(array, value.name)) for value, array in graph.constants.items())
    smaller = {name: sparse for name, sparse in found if sparse is not None}
    kept = [tensor for tensor in proto.initializer if tensor.name not in smaller]
    del proto.initializer[:]
    proto.initializer.extend(kept)
    proto.sparse_initializer.extend(smaller.values())


def _info(value: Value) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=value.name, type=type_proto(value.type))


def _tensor(array: Array, name: str) -> onnx.TensorProto:
    if DType.from_numpy(array.dtype) is DType.STRING:
        items = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
        return onnx.TensorProto(name=name, dims=array.shape, data_type=DType.STRING.onnx_code, string_data=items)
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def _node(node: Node) -> onnx.NodeProto:
    op, where = registry.get(node.op), registry.describe(node)
    if op.domain == "lathe":
        raise UnsupportedError("is an internal operator of Lathe that ONNX cannot express", where=where)
    inputs = ["" if value is None else value.name for value in node.inputs]
    inputs += [""] * (min_inputs(node.op, op.domain) - len(inputs))
    proto = helper.make_node(node.op, inputs, [value.name for value in node.outputs], node.name, domain=op.domain)
    proto.attribute.extend(_attribute(name, value, where) for name, value in node.attrs.items() if name != ROWS)
    annotate(proto, node)
    return proto


def _attribute(name: str, value: Attr, where: str) -> onnx.AttributeProto:
    match value:
        case Graph():
            return helper.make_attribute(name, _graph(value))
        case np.ndarray():
            return helper.make_attribute(name, _tensor(value, name))
        case DType():
            return helper.make_attribute(name, value.onnx_code)
        case TensorType() | SequenceType() | OptionalType() | MapType():
            return helper.make_attribute(name, type_proto(value))
        case ():
            return helper.make_attribute(name, (), attr_type=onnx.AttributeProto.INTS)
        case int() | float() | str() | bytes() | tuple():
            return helper.make_attribute(name, value)
    raise UnsupportedError(f"attribute '{name}' is {value}, which ONNX cannot express", where=where)
