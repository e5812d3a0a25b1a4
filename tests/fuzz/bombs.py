"""Small files that demand much memory, time or depth. A child process measures the cost of loading and compiling them.

python -m tests.fuzz.bombs            prints {name: {outcome, seconds of processor time, bytes}}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import lathe
from lathe.core.errors import ModelError
from tests.core.frontends.models import model
from tests.fuzz import worker

N = helper.make_node
_OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
_LONG = "a" * (1 << 20)
_HUGE = 1 << 36  # elements: more bytes than a machine has
_LARGE = 1 << 28  # elements: a gigabyte, which a machine has and the compiler must not touch


def makers(size: int) -> dict[str, tuple[onnx.NodeProto, dict[str, Any]]]:
    """One node per operator that makes `size` elements from almost no input."""
    scalar, side = np.int64(size), int(size**0.5)
    return {
        "ConstantOfShape": (N("ConstantOfShape", ["s"], ["big"]), {"s": np.int64([size])}),
        "Expand": (N("Expand", ["one", "s"], ["big"]), {"s": np.int64([size])}),
        "Tile": (N("Tile", ["one", "s"], ["big"]), {"s": np.int64([size])}),
        "Pad": (N("Pad", ["one", "s"], ["big"]), {"s": np.int64([0, size])}),
        "Range": (N("Range", ["a", "s", "d"], ["big"]), {"a": np.int64(0), "s": scalar, "d": np.int64(1)}),
        "OneHot": (
            N("OneHot", ["i", "s", "v"], ["big"]),
            {"i": np.int64([3]), "s": scalar, "v": np.float32([0, 1])},
        ),
        "Resize": (N("Resize", ["one", "", "", "s"], ["big"], mode="linear"), {"s": np.int64([size])}),
        "Upsample": (N("Resize", ["one", "", "s"], ["big"]), {"s": np.float32([1 << 20])}),
        "Broadcast": (N("Mul", ["row", "column"], ["big"]), {"row": ones(1, 30_000), "column": ones(30_000, 1)}),
        "Product": (N("MatMul", ["column", "row"], ["big"]), {"row": ones(1, 30_000), "column": ones(30_000, 1)}),
        "Einsum": (N("Einsum", ["row", "row"], ["big"], equation="ai,bj->ij"), {"row": ones(1, 30_000)}),
        "HannWindow": (N("HannWindow", ["s"], ["big"]), {"s": scalar}),
        "MelWeightMatrix": (
            N("MelWeightMatrix", ["m", "s", "r", "lo", "hi"], ["big"]),
            {"m": np.int64(64), "s": np.int64(size // 32), "r": np.int64(16000), "lo": ones() * 2, "hi": ones() * 8000},
        ),
        "ConvTranspose": (
            N("ConvTranspose", ["pixel", "pixel"], ["big"], output_shape=[side, side], strides=[side, side]),
            {"pixel": ones(1, 1, 1, 1)},
        ),
        "SpaceOfZeros": (
            N("Col2Im", ["block", "s", "k"], ["big"]),
            {"block": ones(1, 1, 1), "s": np.int64([1, 1]), "k": np.int64([1, 1])},
        ),
    }  # fmt: skip


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def of_size(size: int, reduced: bool) -> dict[str, Callable[[], bytes]]:
    """A model for each maker; `reduced`: the model returns only the maximum, so that no input or output is large."""
    return {name: lambda pair=pair: _around(*pair, reduced) for name, pair in makers(size).items()}  # type: ignore[misc]


def _around(node: onnx.NodeProto, constants: dict[str, Any], reduced: bool) -> bytes:
    end = N("ReduceMax", ["big"], ["y"], keepdims=0) if reduced else N("Identity", ["big"], ["y"])
    used = {"one": ones(1), **constants}
    given = {name: array for name, array in used.items() if name in node.input}
    proto = model([node, end, N("Relu", ["x"], ["z"])], {"x": ["n", 2]}, ("y", "z"), constants=given)
    return bytes(proto.SerializeToString())


def _serialized(nodes: Sequence[onnx.NodeProto], **more: Any) -> bytes:
    return bytes(model(nodes, {"x": [2]}, **more).SerializeToString())


def functions_of_functions() -> bytes:
    """Thirty functions, each calling the previous one twice: 2**30 nodes."""
    functions = [helper.make_function("local", "F0", ["a"], ["b"], [N("Relu", ["a"], ["b"])], _OPSETS)]
    for level in range(1, 30):
        calls = [N(f"F{level - 1}", [a], [b], domain="local") for a, b in (("a", "c"), ("c", "b"))]
        functions.append(helper.make_function("local", f"F{level}", ["a"], ["b"], calls, _OPSETS))
    return _serialized([N("F29", ["x"], ["y"], domain="local")], functions=functions, domains={"local": 1})


def functions_in_bodies() -> bytes:
    """Thirty functions, each calling the previous one in both branches of an If."""
    functions = [helper.make_function("local", "F0", ["a"], ["b"], [N("Relu", ["a"], ["b"])], _OPSETS)]
    for level in range(1, 30):
        body = helper.make_graph([N(f"F{level - 1}", ["a"], ["o"], domain="local")], "g", [],
                                 [onnx.ValueInfoProto(name="o")])  # fmt: skip
        nodes = [N("Constant", [], ["c"], value=helper.make_tensor("", TensorProto.BOOL, [], [True])),
                 N("If", ["c"], ["b"], then_branch=body, else_branch=body)]  # fmt: skip
        functions.append(helper.make_function("local", f"F{level}", ["a"], ["b"], nodes, _OPSETS))
    return _serialized([N("F29", ["x"], ["y"], domain="local")], functions=functions, domains={"local": 1})


def long_chain_of_functions() -> bytes:
    calls = [N(f"F{i}", ["a"], ["b"], domain="local") for i in range(10_001)]
    functions = [helper.make_function("local", f"F{i}", ["a"], ["b"], [calls[i + 1]], _OPSETS) for i in range(10_000)]
    return _serialized([N("F0", ["x"], ["y"], domain="local")], functions=functions, domains={"local": 1})


def doubled_constant() -> bytes:
    """A constant concatenated with itself 34 times: 2**34 elements."""
    nodes = [N("Concat", [f"c{i}", f"c{i}"], [f"c{i + 1}"], axis=0) for i in range(34)]
    return _serialized([*nodes, N("ReduceMax", ["c34"], ["y"], keepdims=0)], constants={"c0": ones(1)})


def sparse_weight() -> bytes:
    """A sparse weight with one of 2**40 elements."""
    proto = model([N("Add", ["x", "w"], ["y"])], {"x": [2]})
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("", TensorProto.INT64, [1], [5])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 20, 1 << 20]))
    return bytes(proto.SerializeToString())


def nested_types() -> bytes:
    """A sequence of sequences of sequences ..."""
    proto = model([N("Relu", ["x"], ["y"])], {"x": [2]})
    type_ = proto.graph.input.add(name="s").type
    for _ in range(90):
        type_ = type_.sequence_type.elem_type
    type_.tensor_type.elem_type = TensorProto.FLOAT
    return bytes(proto.SerializeToString())


BOMBS: dict[str, Callable[[], bytes]] = {
    **{f"huge {name}": make for name, make in of_size(_HUGE, reduced=True).items()},
    **{f"huge {name}, an output": make for name, make in of_size(_HUGE, reduced=False).items()},
    **{f"large {name}": make for name, make in of_size(_LARGE, reduced=True).items()},
    "functions of functions": functions_of_functions,
    "functions in bodies": functions_in_bodies,
    "a long chain of functions": long_chain_of_functions,
    "a constant doubled again and again": doubled_constant,
    "a sparse weight": sparse_weight,
    "a type of ninety levels": nested_types,
    "twenty thousand nodes in a row": lambda: _serialized(
        [N("Neg", [f"h{i}" if i else "x"], [f"h{i + 1}" if i < 19_999 else "y"]) for i in range(20_000)]
    ),
    "fifty thousand inputs of one node": lambda: _serialized([N("Sum", ["x"] * 50_000, ["y"])]),
    "thirty thousand outputs of one node": lambda: _serialized(
        [N("Split", ["w"], ["y", *(f"y{i}" for i in range(29_999))], axis=0)], constants={"w": ones(30_000)}
    ),
    "names of a megabyte": lambda: _serialized([N("Relu", ["x"], [_LONG]), N("Neg", [_LONG], ["y"])]),
    "a million integers": lambda: _serialized([N("Transpose", ["x"], ["y"], perm=[0] * 1_000_000)]),
    "a hundred thousand attributes": lambda: _attributes(100_000),
}  # fmt: skip
NOT_COMPILED = ("twenty thousand nodes in a row",)  # an ordinary model, only long


def _attributes(count: int) -> bytes:
    proto = model([N("Relu", ["x"], ["y"])], {"x": [2]})
    proto.graph.node[0].attribute.extend([helper.make_attribute("alpha", 1.0)] * count)
    return bytes(proto.SerializeToString())


def outcome(name: str, data: bytes) -> str:
    """ "refused", "loaded", "not compiled" (compiling says why) or "compiled"; anything else is an error."""
    try:
        graph = lathe.load(data)
    except ModelError as error:
        return "refused" if error.__cause__ is None else f"refused only after {error.__cause__!r}"
    if name in NOT_COMPILED:
        return "loaded"
    try:
        lathe.compile(graph, threads=1).close()
    except ModelError as error:
        return "not compiled" if error.__cause__ is None else f"not compiled only after {error.__cause__!r}"
    return "compiled"


def measured(name: str) -> dict[str, Any]:
    """The outcome, its processor time, and the memory growth of the forked process that ran it."""
    data = BOMBS[name]()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, json.dumps(_measured_here(name, data)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"outcome": f"ends the process: status {status}", "seconds": 0.0, "bytes": 0}


def _measured_here(name: str, data: bytes) -> dict[str, Any]:
    worker.limit()
    before, start = _peak(), time.process_time()
    try:
        result = outcome(name, data)
    except Exception as error:
        result = worker.describe(error)
    return {"outcome": result, "seconds": time.process_time() - start, "bytes": _peak() - before}


def _peak() -> int:
    """The peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    lathe.compile(model([N("Relu", ["x"], ["y"])], {"x": [2]}).SerializeToString(), threads=1).close()
    print(json.dumps({name: measured(name) for name in sys.argv[1:] or BOMBS}))


if __name__ == "__main__":
    main()
