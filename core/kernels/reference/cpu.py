"""Objects of reference kernels, and their execution on memory like any other kernel.

An object holds the node as text and the strides of its operands. Like native code it can be stored, named by its
content, and loaded by another process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from lathe.core.errors import ArtifactError, FeedError, ModelError
from lathe.core.ir.dim import evaluate, parse_dim
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import KernelSpec, Status
from lathe.core.kernels.reference.spec import ReferenceSpec
from lathe.core.reference import run_node

MAGIC = b"lathe reference\n"

View = Callable[[int, int], NDArray[np.uint8]]  # (address, number of bytes) -> those bytes


def object_of(spec: KernelSpec) -> bytes:
    """The object of a ReferenceSpec as bytes: the node and its strides. Equal specs give equal bytes.

    TypeError for another spec.
    """
    if not isinstance(spec, ReferenceSpec):
        raise TypeError(f"spec: expected a reference kernel, got {spec.key}")
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
    """A loaded reference kernel. All arrays that it reads and writes are views of the memory that `run` receives."""

    def __init__(self, data: bytes) -> None:
        """Load the bytes that `object_of` wrote. ArtifactError for code of another device, and for malformed bytes."""
        if not data.startswith(MAGIC):
            raise ArtifactError("code: expected that of a simulated device, got code for another device")
        header, _, weights = data.removeprefix(MAGIC).partition(b"\n")
        try:
            facts = json.loads(header)
            self.graph: Graph = parse_graph(facts["graph"], weights)
            self.operands = int(facts["operands"])
            self.flagged = bool(facts["flagged"])
            self.kernel = str(facts["kernel"])
            self.strides: list[tuple[Dim, ...]] = [tuple(map(parse_dim, each)) for each in facts["strides"]]
            if len(self.graph.nodes) != 1 or len(self.strides) != len(self.graph.inputs) + len(self.graph.outputs):
                raise ValueError("expected one node, and strides for each of its operands")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ModelError) as error:
            raise ArtifactError(f"code of a simulated device is malformed: {type(error).__name__} {error}") from error

    def run(self, grid: tuple[int, int, int], addresses: Sequence[int], n: int, view: View) -> None:
        """Run the node once on the operands at `addresses`, for a batch of `n`; the grid is ignored.

        `view(address, nbytes)` gives access to memory. If the reference rejects its data, the status flag is set;
        without a flag, the reference's error (FeedError or ModelError) is raised.
        """
        node = self.graph.nodes[0]
        values = [*self.graph.inputs, *self.graph.outputs]
        places = zip(values, addresses, self.strides, strict=False)  # addresses of unused scratch memory follow
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
    """A NumPy array of the type and shape of `value` for a batch of `n`, over the memory at `address`, not copied.

    `strides` are in elements. An array without elements lies elsewhere.
    """
    env, dtype = {"n": n}, value.dtype.numpy
    shape = value.tensor.evaluate(env)
    steps = [evaluate(stride, env) * dtype.itemsize for stride in strides]
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = [(extent - 1) * step for extent, step in zip(shape, steps, strict=True)]
    before, after = sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
    block = view(address + before, after - before + dtype.itemsize)
    return as_strided(np.frombuffer(block.data, dtype, 1, -before), shape, steps, writeable=True)
