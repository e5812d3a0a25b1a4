"""Facts about a model, without compiling it: size of the file, opsets, parameters, and operations per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx

from lathe.core.frontends.external import extent_of, is_external
from lathe.core.frontends.proto import all_messages, default_domain
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import TensorType

_RECURRENT = {"RNN", "GRU", "LSTM"}
_WEIGHT_INPUT = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}  # the index of the weights, [out, in, kernel...]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The size of a model in bytes, with the files of its external data, and its opsets.

    `opsets` maps domains to opsets; "ai.onnx" is the default domain.
    """

    size: int
    opsets: Mapping[str, int]


def file_facts(path: Path) -> FileFacts:
    """The facts of an ONNX file. `lathe.load` must have accepted it before: the file is not checked here.

    Files with external data count as a whole, also those of tensors in attributes, bodies and functions.
    """
    model = onnx.load(path, load_external_data=False)
    tensors = (each for each in all_messages(model) if isinstance(each, onnx.TensorProto) and is_external(each))
    external = {extent_of(tensor, f"tensor '{tensor.name}'").location for tensor in tensors}
    size = path.stat().st_size + sum((path.parent / name).stat().st_size for name in external)
    return FileFacts(size, {default_domain(each.domain) or "ai.onnx": each.version for each in model.opset_import})


def count_parameters(graph: Graph) -> int:
    """The number of elements of all weights, including those of control-flow bodies.

    Constants of integers of more than 2 bytes, booleans and strings count as no weights.
    """
    own = sum(array.size for array in graph.constants.values() if _is_weight(array.dtype.kind, array.dtype.itemsize))
    return own + sum(count_parameters(body) for node in graph.nodes for body in node.subgraphs)


def _is_weight(kind: str, itemsize: int) -> bool:
    return kind not in "bOSU" and (kind not in "iu" or itemsize <= 2)


def count_flops(graph: Graph) -> int | None:
    """The number of operations of a run in which every symbolic size is 1.

    None if sizes depend on data, or if a node has a body. Matrix products, convolutions and recurrent layers count two
    operations per multiply-add; every other operator counts one per element of its results.
    """
    sizes = {name: 1 for value in graph.inputs if isinstance(value.type, TensorType) for name in value.type.symbols}
    try:
        return sum(_node_flops(node, sizes) for node in graph.nodes)
    except (KeyError, ValueError):
        return None


def _node_flops(node: Node, sizes: Mapping[str, int]) -> int:
    if node.subgraphs:
        raise ValueError("a body may run any number of times")
    size = sum(prod(_shape(value, sizes)) for value in node.outputs if isinstance(value.type, TensorType))
    if node.op in ("MatMul", "MatMulInteger", "QLinearMatMul"):
        return 2 * size * _shape(node.inputs[0], sizes)[-1]
    if node.op == "Gemm":
        return 2 * size * _shape(node.inputs[0], sizes)[0 if node.attrs.get("transA") else 1]
    if node.op in _WEIGHT_INPUT:
        return 2 * size * prod(_shape(node.inputs[_WEIGHT_INPUT[node.op]], sizes)[1:])
    if node.op == "ConvTranspose":
        return 2 * prod(_shape(node.inputs[0], sizes)) * prod(_shape(node.inputs[1], sizes)[1:])
    if node.op in _RECURRENT:
        steps, rows = _shape(node.inputs[0], sizes)[:2]  # in either order
        weights = prod(_shape(node.inputs[1], sizes)) + prod(_shape(node.inputs[2], sizes))
        return 2 * steps * rows * weights
    return size


def _shape(value: Value | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if value is None or not isinstance(value.type, TensorType):
        raise ValueError("not a tensor")
    return value.type.evaluate(sizes)
