"""What a model file holds, without compiling it: its size, opset, parameters, and the operations of one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from core.frontends.proto import default_domain
from core.ir.graph import Graph, Node, Value
from core.ir.types import TensorType

_RECURRENT = {"RNN", "GRU", "LSTM"}
_BY_SECOND = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}  # which input holds the weights [out, in, kernel...]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the file itself says. `size`: bytes, with the files of its weights. `opsets`: by domain."""

    size: int
    opsets: Mapping[str, int]


def file_facts(path: Path) -> FileFacts:
    """The facts of an ONNX file that `core.load` has read before, so that it is known to be one."""
    model = onnx.load(path, load_external_data=False)
    beside = {ExternalDataInfo(tensor).location for tensor in model.graph.initializer if uses_external_data(tensor)}
    size = path.stat().st_size + sum((path.parent / name).stat().st_size for name in beside)
    return FileFacts(size, {default_domain(each.domain) or "ai.onnx": each.version for each in model.opset_import})


def parameters(graph: Graph) -> int:
    """How many numbers the weights have, those of bodies of loops and branches among them."""
    own = sum(array.size for array in graph.constants.values() if _is_weight(array.dtype.kind, array.dtype.itemsize))
    return own + sum(parameters(body) for node in graph.nodes for body in node.subgraphs)


def _is_weight(kind: str, itemsize: int) -> bool:
    return kind not in "bOSU" and (kind not in "iu" or itemsize <= 2)


def flops(graph: Graph) -> int | None:
    """Operations of a run in which every free size is 1: two per product that is added up, one per element of any other
    result. None where a size is not known before a run, or a loop says how often it runs."""
    sizes = {name: 1 for value in graph.inputs if isinstance(value.type, TensorType) for name in value.type.symbols}
    try:
        return sum(_of_node(node, sizes) for node in graph.nodes)
    except (KeyError, ValueError):
        return None


def _of_node(node: Node, sizes: Mapping[str, int]) -> int:
    if node.subgraphs:
        raise ValueError("a body may run any number of times")
    size = sum(prod(_shape(value, sizes)) for value in node.outputs if isinstance(value.type, TensorType))
    if node.op in ("MatMul", "MatMulInteger", "QLinearMatMul"):
        return 2 * size * _shape(node.inputs[0], sizes)[-1]
    if node.op == "Gemm":
        return 2 * size * _shape(node.inputs[0], sizes)[0 if node.attrs.get("transA") else 1]
    if node.op in _BY_SECOND:
        return 2 * size * prod(_shape(node.inputs[_BY_SECOND[node.op]], sizes)[1:])
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
