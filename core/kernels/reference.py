"""Objects of kernels that are references, and how they run: on memory, like any other kernel.

An object holds the node as text and the strides of its operands, so it can be kept, named by its content, and loaded
by another process, as native code can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from core.errors import ArtifactError, FeedError, ModelError
from core.ir.dim import evaluate, parse_dim
from core.ir.graph import Graph, Value
from core.ir.text import Weights, parse_graph, print_graph
from core.ir.types import Dim
from core.kernels.catalog.base import KernelSpec, Status
from core.kernels.catalog.reference import ReferenceSpec
from core.reference import run_node

MAGIC = b"lathe reference\n"

View = Callable[[int, int], NDArray[np.uint8]]  # bytes from an address on


def object_of(spec: KernelSpec) -> bytes:
    """The node and its strides; equal specs give equal bytes."""
    if not isinstance(spec, ReferenceSpec):
        raise TypeError(f"{spec.key} is no reference")
    weights = Weights()
    facts = {
        "graph": print_graph(spec.graph, weights),
        "strides": [list(map(str, each)) for each in spec.strides],
        "operands": len(spec.strides) + spec.scratch + spec.flagged,
        "flagged": spec.flagged,
        "kernel": spec.kernel,
    }
    return MAGIC + json.dumps(facts).encode() + b"\n" + weights.tobytes()


class ReferenceKernel:
    """A loaded one. Every array it sees is a view of the memory that `run` is given."""

    def __init__(self, data: bytes) -> None:
        """ArtifactError for anything but what `object_of` wrote."""
        if not data.startswith(MAGIC):
            raise ArtifactError("a simulated device was given code for another one")
        header, _, weights = data.removeprefix(MAGIC).partition(b"\n")
        facts = json.loads(header)
        self.graph: Graph = parse_graph(facts["graph"], weights)
        self.operands: int = facts["operands"]
        self.flagged: bool = facts["flagged"]
        self.kernel: str = facts["kernel"]
        self.strides: list[tuple[Dim, ...]] = [tuple(map(parse_dim, each)) for each in facts["strides"]]

    def run(self, grid: tuple[int, int, int], addresses: Sequence[int], n: int, view: View) -> None:
        """The grid only says that there is something to do. FeedError as from the reference, where there is no flag for
        what it refuses."""
        node = self.graph.nodes[0]
        values = [*self.graph.inputs, *self.graph.outputs]
        places = zip(values, addresses, self.strides, strict=False)  # behind them scratch memory, which no one needs
        arrays = {value: array_in(view, address, value, strides, n) for value, address, strides in places}
        arguments = [arrays[value] if value is not None else None for value in node.inputs]
        try:
            results = run_node(node, arguments, arrays, {"n": n})
        except (FeedError, ModelError):
            if not self.flagged:
                raise
            view(addresses[-1], 4).view(np.int32)[0] = Status.INDEX_OUT_OF_RANGE
            return
        for value, result in zip(node.outputs, results, strict=True):
            np.copyto(arrays[value], result)


def array_in(view: View, address: int, value: Value, strides: Sequence[Dim], n: int) -> NDArray[Any]:
    """The elements of a value, which may lie apart, as an array over them."""
    env, dtype = {"n": n}, value.dtype.numpy
    shape = value.tensor.evaluate(env)
    steps = [evaluate(stride, env) * dtype.itemsize for stride in strides]
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = [(extent - 1) * step for extent, step in zip(shape, steps, strict=True)]
    before, after = sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
    block = view(address + before, after - before + dtype.itemsize)
    return as_strided(np.frombuffer(block.data, dtype, 1, -before), shape, steps, writeable=True)
