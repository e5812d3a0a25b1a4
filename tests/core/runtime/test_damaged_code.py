"""Readers of stored code, damaged in its bytes or in its JSON, read it or raise ArtifactError."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lathe.core.codegen.target import host
from lathe.core.errors import ArtifactError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.cuda.binary import Binary
from lathe.core.kernels.gemm.cublaslt_spec import LibrarySpec, Matrix, TunedAlgorithm
from lathe.core.kernels.reference.cpu import ReferenceKernel, object_of
from lathe.core.kernels.reference.spec import ReferenceSpec
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.plan.planner import make_plan
from lathe.core.plan.serialize import plan_from_json, plan_to_json
from lathe.core.runtime.artifact.artifact import _description_from_json, _description_to_json
from lathe.core.runtime.session.session import Description

ROUNDS = 200
OTHERS: tuple[Any, ...] = (None, True, -1, 2.5, "?", [], [[]], {}, 10**30)  # in place of a part of JSON


def _graph() -> Graph:
    graph = Graph("g")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 8)))
    graph.outputs = [b("Softmax", b("Relu", x), axis=1)]
    return graph


def _binary() -> bytes:
    return Binary("lathe_x", 90, 8, 1024, b"\x7fELF...", ".entry läthe_x", "triton 3.0").to_bytes()


def _library() -> bytes:
    matrix = Matrix(DType.FLOAT32, False, 8, 0)
    facts = (matrix, matrix, None, matrix, False, "Relu", False, 64, (TunedAlgorithm(1, "0a", 64),))
    return LibrarySpec(1, symbol("n"), 8, 8, *facts).to_bytes()


def _reference() -> bytes:
    graph = _graph()
    graph.nodes, graph.outputs = graph.nodes[:1], graph.nodes[0].outputs
    return object_of(ReferenceSpec(graph, ((8, 1), (8, 1)), 0, False, "elementwise"))


def _plan() -> bytes:
    return json.dumps(plan_to_json(make_plan(_graph(), host()).plan)).encode()


def _description() -> bytes:
    graph = _graph()
    inputs, outputs = ({value.name: value.tensor for value in values} for values in (graph.inputs, graph.outputs))
    batching = BatchInfo(True, "rows", "n", (symbol("n") - 1,))
    return json.dumps(_description_to_json(Description("g", inputs, outputs, batching, 8))).encode()


READERS: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]] = {
    "binary": (_binary, Binary.from_bytes),
    "library": (_library, LibrarySpec.from_bytes),
    "reference": (_reference, ReferenceKernel),
    "plan": (_plan, lambda data: plan_from_json(json.loads(data), Graph())),
    "description": (_description, lambda data: _description_from_json(json.loads(data))),
}


@pytest.mark.parametrize("kind", ["binary", "library", "reference"])
def test_damaged_bytes(kind: str) -> None:
    make, read = READERS[kind]
    good, rng = make(), random.Random(kind)
    read(good)
    for _ in range(ROUNDS):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        _check(read, bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data))]))


@pytest.mark.parametrize("kind", READERS)
def test_other_json(kind: str) -> None:
    make, read = READERS[kind]
    good = make()
    read(good)
    begin, end = _json_span(good)
    changed = list(_changed(json.loads(good[begin:end])))
    assert len(changed) > 50
    for each in changed:
        text = json.dumps(each).encode()
        head = good[:begin]
        if kind == "binary":  # the sizes are in the head
            head = head[:4] + len(text).to_bytes(4, "little") + head[8:]
        _check(read, head + text + good[end:])


def _check(read: Callable[[bytes], Any], data: bytes) -> None:
    try:
        read(data)
    except ArtifactError:
        pass
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error} for {data[:400]!r}")


def _json_span(data: bytes) -> tuple[int, int]:
    """Where the JSON begins and ends in the data."""
    begin = min(at for at in (data.find(b"["), data.find(b"{")) if at >= 0)
    _, size = json.JSONDecoder().raw_decode(data[begin:].decode("latin-1"))
    return begin, begin + size


def _changed(value: Any) -> Iterator[Any]:
    """The value with each of its parts, itself included, replaced by each of `OTHERS`, or removed."""
    yield from OTHERS
    if isinstance(value, dict):
        for key, part in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield from ({**value, key: other} for other in _changed(part))
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield value[:index] + value[index + 1 :]
            yield from ([*value[:index], other, *value[index + 1 :]] for other in _changed(part))
