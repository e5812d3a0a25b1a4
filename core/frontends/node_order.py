"""The topological order of the nodes of an ONNX file, and the names that they read and define."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import onnx

from lathe.core.errors import ModelError
from lathe.core.frontends.annotations import names_after


def topological_order(nodes: Sequence[onnx.NodeProto], where: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes in topological order; of several nodes that may come next, the first in the file.

    A node needs its inputs, the values that its bodies capture, and those of its control edges. ModelError if two nodes
    define one name, and on a cycle, after all nodes that do not depend on it. The algorithm is that of Kahn (1962).
    """
    producers = _producers(nodes, where)
    waiting: list[int] = []
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        needs = reads(node) | set(names_after(node, f"node '{_label(node)}' ({node.op_type})"))
        sources = {producers[name] for name in needs if name in producers}
        waiting.append(len(sources))
        for source in sources:
            readers.setdefault(source, []).append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    placed = 0
    while ready:
        index = heapq.heappop(ready)
        placed += 1
        yield nodes[index]
        for reader in readers.get(index, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if placed < len(nodes):
        stuck = next(node for node, count in zip(nodes, waiting, strict=True) if count)
        raise ModelError("is part of a cycle or reads from one", where=f"node '{_label(stuck)}' ({stuck.op_type})")


def _producers(nodes: Sequence[onnx.NodeProto], where: str) -> dict[str, int]:
    producers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in producers:
                first = nodes[producers[name]]
                raise ModelError(f"'{name}' is an output of '{_label(first)}' and of '{_label(node)}'", where=where)
            producers[name] = index
    return producers


def reads(node: onnx.NodeProto) -> set[str]:
    """The names that a node reads from its graph: its inputs, and the values that its bodies capture."""
    names = set(filter(None, node.input))
    for body in bodies(node):
        names |= _captured_names(body)
    return names


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _captured_names(body: onnx.GraphProto) -> set[str]:
    names = {info.name for info in body.output}
    own = {info.name for info in body.input} | {tensor.name for tensor in body.initializer}
    own |= {sparse.values.name for sparse in body.sparse_initializer}
    for node in body.node:
        names |= reads(node)
        own.update(node.output)
    return names - own


def defined_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name that a graph or a graph nested in it gives to a value; "" for outputs without a name."""
    yield from (info.name for info in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output
        for body in bodies(node):
            yield from defined_names(body)


def _label(node: onnx.NodeProto) -> str:
    return node.name or next(filter(None, node.output), "unnamed")
