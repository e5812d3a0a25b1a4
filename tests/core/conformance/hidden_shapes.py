"""Models of ONNX's suite with some shape information of their inputs removed, as exporters leave it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

import lathe
from tests.core.conformance.models import suite_models
from tests.core.conformance.round_trip import assert_similar, feeds


def _no_rank(index: int, tensor: onnx.TypeProto.Tensor) -> None:
    tensor.ClearField("shape")


def _no_extent(index: int, tensor: onnx.TypeProto.Tensor) -> None:
    for axis, dim in enumerate(tensor.shape.dim):
        dim.dim_param = f"u{index}_{axis}"


def _no_leading_extent(index: int, tensor: onnx.TypeProto.Tensor) -> None:
    """Name the leading extent; equal extents get one name, so that some models have a batch."""
    if tensor.shape.dim and tensor.shape.dim[0].dim_value:
        tensor.shape.dim[0].dim_param = f"n{tensor.shape.dim[0].dim_value}"


# The functions that remove shape information from an input, given its index and type.
HIDDEN: dict[str, Callable[[int, onnx.TypeProto.Tensor], None]] = {
    "ranks": _no_rank,
    "extents": _no_extent,
    "leading extents": _no_leading_extent,
}


def check_hidden(name: str, what: str) -> None:
    """Check that the model of a case gives the suite's results although its file hides shapes."""
    case = suite_models()[name]
    inputs, expected = case.data()
    model = onnx.ModelProto.FromString(case.read())
    given = feeds(case, inputs)
    for index, info in enumerate(model.graph.input):
        if info.type.HasField("tensor_type"):
            HIDDEN[what](index, info.type.tensor_type)
    for info in model.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    with lathe.compile(model.SerializeToString(), threads=1, tune="off", max_batch=4, new_shapes="wait") as session:
        results: dict[str, Any] = session.run({name: given[name] for name in session.inputs})
    ours = [results[info.name] for info in model.graph.output]
    assert_similar(ours, expected, _tolerances(case.tolerances, expected))


def _tolerances(tolerances: tuple[float, float], expected: list[Any]) -> tuple[float, float]:
    """At least two units in the last place of a narrow type, as the suite's own runner has it for bfloat16."""
    names = {np.asarray(array).dtype.name for array in expected if not isinstance(array, list) and array is not None}
    least = 2.0**-6 if "bfloat16" in names else 2.0**-9 if "float16" in names else 0.0
    return max(tolerances[0], least), tolerances[1]
