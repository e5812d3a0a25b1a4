"""Nodes for every family of CPU kernels, in the element types that have their own instructions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import KernelSpec, Request
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.target import Target
from lathe.core.passes.fusion.conv_chain import ChainConvolutions
from lathe.core.passes.pipeline import optimize
from lathe.core.plan.planner import make_plan
from tests.core.kernels.harness import scalar_body, single_node
from tests.core.kernels.sweep import floats, normal, tensor
from tests.core.kernels.test_svm import machine_attributes
from tests.core.kernels.test_trees import tree_attributes
from tests.core.passes.examples import chosen_branch, loop_with_a_body

OWN = {"custom": "the definition of a custom operator writes its kernel itself"}  # families without a case here

_SIGNAL = {"layout": "NHWC", "pads": (1, 1)}
_HEADS = {"perm_q": (0, 2, 1, 3), "perm_k": (0, 2, 3, 1), "perm_v": (0, 2, 1, 3), "perm_y": (0, 2, 1, 3)}
_IMAGE: dict[str, Any] = {"pads": (1,) * 4, "layout": "NHWC"}
_BATCH: dict[str, Any] = {"pads": (1,) * 4, "layout": "CHWN"}
_SIGNED = normal(DType.INT8, (64, 48))


def specs(target: Target) -> dict[str, KernelSpec]:
    """The first kernel of each family that the catalog offers for each case on `target`, by key."""
    found: dict[str, KernelSpec] = {}
    for graph in graphs():
        if len(graph.nodes) == 1 and graph.nodes[0].op not in ("Loop", "If"):
            calls = candidates(Request(graph.nodes[0], graph.constants, target))
            first = {call.spec.family: call.spec for call in reversed(calls)}
            found |= {spec.key: spec for spec in first.values()}
        else:
            found |= {spec.key: spec for spec in make_plan(optimize(graph)[0], target).specs.values()}
    return found


def families() -> set[str]:
    """The names of all families that have a generator for CPUs."""
    found = {spec.family for spec in subclasses(KernelSpec) if spec.generator.endswith("cpu")}
    return {family for family in found if family}


def subclasses(base: type[KernelSpec]) -> Iterator[type[KernelSpec]]:
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)


def graphs() -> Iterator[Graph]:
    """Graphs of one node, in order of the families that cover them."""
    summed = scalar_body(1, lambda b, x: b("Mul", x, b.constant(np.float32(0.3))))
    relu = scalar_body(1, lambda b, x: b("Relu", x))
    for op in ("Exp", "Tanh", "Erf", "Log", "Sin", "Sqrt", "Round", "Sign"):
        yield _node(op, "float32[n,37]")
    for op, dtype in (("Pow", "float32"), ("Div", "int32"), ("Mul", "int64"), ("Max", "uint8"), ("Less", "float64")):
        yield _node(op, f"{dtype}[n,37]", f"{dtype}[n,37]")
    for source in ("float32", "float16", "bfloat16", "uint8", "int64", "bool"):
        for to in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT8, DType.FLOAT64):
            yield _node("Cast", f"{source}[n,37]", to=to.onnx_code)
    for dtype in ("float32", "bfloat16", "float16"):
        yield _node("FusedMatMul", f"{dtype}[n,64]", floats(64, 48))
        yield _node("FusedConv", f"{dtype}[n,14,14,32]", floats(32, 32, 3, 3), floats(32), **_IMAGE)
        yield _node("FusedConv", f"{dtype}[n,14,14,32]", floats(48, 32, 3, 3), strides=(2, 2), **_IMAGE)
        for length in (5, 16):
            yield _node("FusedAttention", *[f"{dtype}[n,{length},2,16]"] * 3, epilogue=summed, **_HEADS)
        yield _node("MaxPool", f"{dtype}[n,9,9,20]", kernel_shape=(3, 3), **_IMAGE)
    yield _node("RoiAlign", "float32[2,9,9,n]", "float32[n,4]", "int64[n]", output_height=7, output_width=7)
    for stride in (1, 2, 3):
        yield single_node("MaxPool", tensor("float32[n,3,9,20]"), outputs=2, kernel_shape=(3, 3), strides=(stride,) * 2)
        yield _node("LayerNormalization", f"{dtype}[n,9,20]", floats(20), floats(20))
    yield _node("FusedMatMul", "uint8[n,64]", _SIGNED)
    for numbers in (np.arange(16) - 8, np.sin(np.arange(16))):
        codes, scales = normal(DType.INT8, (64, 48)).astype(np.uint8) & 15, np.abs(floats(2, 48))
        yield _node("DequantizedMatMul", "float32[n,64]", codes, scales, block=32, numbers=tuple(map(float, numbers)))
    for weights in (floats(6, 40, 20), "float32[6,40,20]"):
        yield _node("ExpertProduct", "float32[n,1,20]", "int64[n,2]", weights)
    yield _node("FusedMatMul", "float32[size0,20]", "float32[20,size1]")
    for dtype in ("float64", "int32", "int64"):
        yield _node("FusedMatMul", f"{dtype}[n,20]", f"{dtype}[20,n]")
    yield _node("FusedConv", "uint8[n,9,9,16]", normal(DType.INT8, (32, 16, 3, 3)), pad_value=7, **_IMAGE)
    yield _node("FusedMatMul", "float32[n,70,384]", floats(384, 384))
    yield _node("FusedMatMul", "float32[n,70,96]", floats(96, 90) * (np.arange(90) % 10 == 0))
    yield _node("FusedConv", "float32[n,9,7,20]", floats(20, 1, 3, 3), floats(20), group=20, **_IMAGE)
    yield _node("FusedConv", "float32[n,20,22,3]", floats(64, 3, 7, 7), layout="NHWC", pads=(3,) * 4, strides=(2, 2))
    yield _node("FusedConv", "float32[n,28,28,3]", floats(6, 3, 5, 5), floats(6), layout="NHWC")
    yield _node("PooledConv", "float32[n,28,28,2]", floats(6, 2, 3, 3), floats(6), pool="max", epilogue=relu, **_IMAGE)
    yield _node("FusedMatMul", "float32[n,9,64]", "float32[n,64,20]")
    yield _node("FusedConv", "float32[3,7,9,64]", "float32[6,3,3,2]", "float32[6]", **_BATCH)
    yield _node("ConvWeightGradient", "float32[3,7,9,64]", "float32[6,7,10,64]", kernel_shape=(3, 2), **_BATCH)
    yield _node("ConvTranspose", "float32[7,6,7,41]", "float32[7,3,3,2]", "float32[3]", **_BATCH)
    for layout in ("NHWC", "CHWN"):
        window = {"kernel_shape": (2, 2), "strides": (2, 2), "layout": layout}
        x, dy = ("[8,9,8,16]", "[8,4,4,16]") if layout == "NHWC" else ("[3,8,8,16]", "[3,4,4,16]")
        yield _node("MaxPoolGradient", f"float32{x}", f"float32{dy}", **window)
        overlapping = {**window, "kernel_shape": (3, 3), "pads": (0, 0, 1, 1)}
        yield _node("MaxPoolGradient", f"float32{x}", f"float32{dy}", **overlapping)
        yield _node("AveragePool", f"float32{x}", **window)
    yield _node("MaxPool", "float32[size0,size1,size2,20]", kernel_shape=(3, 3), **_IMAGE)
    yield _node("FusedConv", "float32[size0,size1,20]", floats(20, 1, 3), floats(20), group=20, **_SIGNAL)
    yield _node("FusedConv", "float32[size0,size1,20]", floats(24, 20, 3), floats(24), **_SIGNAL)
    yield _node("FusedAttention", *["float32[size0,size1,2,16]"] * 3, **_HEADS)
    for mode in ("nearest", "linear"):
        yield _node("Resize", "float32[size0,size1,size2,20]", mode=mode, scales=(1.0, 1.0, 2.0, 2.0), layout="NHWC")
    yield _node("Softmax", "float32[n,37]", axis=-1)
    yield _node("LogSoftmax", "float32[n,37,5]", axis=1)
    yield _node("GroupNormalization", "float32[n,8,6,6]", floats(8), floats(8), num_groups=4)
    yield _node("ArgMax", "float32[n,37]", axis=1, keepdims=0)
    for op, dtype in (("ReduceSum", "float32"), ("ReduceMax", "int8"), ("ReduceMean", "bfloat16")):
        yield _node(op, f"{dtype}[n,9,37]", axes=(2,), keepdims=0)
    yield _node("Transpose", "float32[n,33,17]", perm=(0, 2, 1))
    yield _node("Transpose", "uint8[n,33,17]", perm=(0, 2, 1))
    yield _node("Concat", "float32[n,3]", "float32[n,5]", axis=1)
    for mode in ("constant", "edge", "reflect", "wrap"):
        yield _node("Pad", "float32[size0,size1,20]", pads=(0, 3, 0, 0, 2, 1), mode=mode)
    yield _node("Gather", "float32[n,9]", "int64[4]", axis=1)
    yield _node("GatherElements", "float32[n,9]", "int64[n,4]", axis=1)
    yield _node("GatherND", "float32[n,9,5]", "int64[n,2]")
    yield _node("CumSum", "float32[n,9]", axis=(1,))
    yield single_node("TopK", tensor("float32[n,37]"), outputs=2, K=(5,))
    yield _node("GridSample", "float32[n,3,7,20]", "float32[n,5,9,2]")
    yield _node("FusedMatMul", "float32[2,3,9]", "float32[2,n,9]", perm_b=(0, 2, 1))
    yield _node("Iota", dtype=DType.INT64, shape=(symbol("n"),), start=symbol("n"), steps=(1,))
    yield _node("ScatterElements", "float32[n,9]", "int64[n,4]", "float32[n,4]", axis=1)
    yield _node("ScatterND", "float32[9,n]", "int64[4,1]", "float32[4,n]", reduction="add")
    yield _node("Resize", "float32[n,3,7,20]", mode="linear", scales=(1.0, 1.0, 2.0, 3.0))
    yield _node("Resize", "float32[n,7,5,19]", mode="cubic", scales=(1.0, 1.0, 1.5, 0.8), layout="NHWC")
    yield single_node("RecurrentSteps", *_recurrent(), outputs=3, cell="LSTM", direction="forward")
    yield _node("SegmentAttention", *["float32[1,n,2,16]"] * 3, "int64[n+1]", epilogue=summed, **_HEADS)
    yield _node("SegmentReduce", "float32[n,8]", "int64[n+1]", axis=0, mode="mean")
    pages = ("float32[6,2,16,32]", "float32[6,2,32,16]")
    yield _node("CacheWrite", pages[0], "float32[n,2,16]", "int64[n]", transposed=1)
    yield _node("CachedAttention", "float32[n,4,16]", *pages, "int64[n]", "int64[n]", "int64[n,4]", scale=0.25)
    codes, scales = (each.replace("float32", "int8") for each in pages), ("float32[6,2,32,1]",) * 2
    yield _node("CachedAttention", "float32[n,4,16]", *codes, "int64[n]", "int64[n]", "int64[n,4]", *scales, scale=0.25)
    yield single_node("TreeEnsembleRegressor", tensor("float32[n,5]"), **tree_attributes(0, trees=6, targets=2))
    yield single_node(
        "SVMClassifier", tensor("float32[n,5]"), outputs=2, **machine_attributes("RBF", 9, 20, 3, probable=True)
    )
    yield _chain()
    yield loop_with_a_body()
    yield chosen_branch()


def _node(op: str, *inputs: str | Array, **attrs: Any) -> Graph:
    return single_node(op, *(tensor(value) if isinstance(value, str) else value for value in inputs), **attrs)


def _recurrent() -> list[TensorType | Array | None]:
    state = tensor("float32[1,n,20]")
    return [tensor("float32[4,n,80]"), floats(1, 80, 20), floats(1, 80), None, state, state, floats(1, 60)]


def _chain() -> Graph:
    """An expanding, a depthwise and a projecting convolution as one node."""
    graph, relu = Graph("chain"), scalar_body(1, lambda b, x: b("Relu", x))
    b = Builder(graph)
    y = b.input("x", tensor("float32[n,12,12,8]"))
    for shape, attrs in (((48, 8, 1, 1), {}), ((48, 1, 3, 3), {"group": 48, "pads": (1,) * 4}), ((8, 48, 1, 1), {})):
        y = b("FusedConv", y, b.constant(floats(*shape)), b.constant(floats(shape[0])), layout="NHWC",
              **attrs, **({} if shape[0] == 8 else {"epilogue": relu}))  # fmt: skip
    graph.outputs = [y]
    assert ChainConvolutions(least_bytes=0, worthwhile=0).run(graph).changed == 1
    return graph
