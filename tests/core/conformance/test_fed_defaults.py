"""ONNX's backend test suite with wrong defaults for all inputs but the first: a feed must override its default."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import lathe
from lathe.core.errors import LatheError
from lathe.core.ir.graph import Graph
from tests.core.conformance.case_names import names_with_data
from tests.core.conformance.exclusions import REASONS
from tests.core.conformance.models import suite_models
from tests.each_case import each_case


def tensors(name: str) -> dict[str, np.ndarray]:
    """A case's inputs by name; empty unless there are at least two and all are tensors."""
    case = suite_models()[name]
    inputs, infos = case.data()[0], read(name).graph.input
    plain = len(inputs) > 1 and all(isinstance(array, np.ndarray | np.generic) for array in inputs)
    return {info.name: np.asarray(array) for info, array in zip(infos, inputs, strict=True)} if plain else {}


def read(name: str) -> onnx.ModelProto:
    model = onnx.load_from_string(suite_models()[name].read())
    model.ir_version = max(model.ir_version, 4)  # before, all initializers are constants
    return model


def sample() -> list[str]:
    """Cases of several inputs, all of them tensors, that Lathe passes."""
    names = [name for name in names_with_data() if name not in REASONS][::53]
    return [name for name in names if not read(name).graph.initializer and tensors(name)]


def with_default(model: onnx.ModelProto, name: str, array: np.ndarray) -> Graph:
    """The model with ones as the default of an input; with `array` if ones are invalid (as a shape, for example)."""
    try:
        return lathe.load(_given(model, name, array if array.dtype == object else np.ones_like(array)))
    except LatheError:
        return lathe.load(_given(model, name, array))


def _given(model: onnx.ModelProto, name: str, default: np.ndarray) -> bytes:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.initializer.append(numpy_helper.from_array(default, name))
    return bytes(copy.SerializeToString())


@pytest.mark.filterwarnings("ignore::lathe.core.errors.ShapeWarning")
def test_feeds_override_defaults() -> None:
    names = sample()
    assert len(names) > 20
    with each_case() as case:
        for name in names:
            with case(name):
                check_overridden_defaults(name)


def check_overridden_defaults(name: str) -> None:
    model, feeds = read(name), tensors(name)
    with lathe.compile(lathe.load(model.SerializeToString()), tune="off") as session:
        want = session.run(feeds)
    for input_name in list(feeds)[1:]:
        graph = with_default(model, input_name, feeds[input_name])
        with lathe.compile(graph, tune="off") as session:
            assert list(session.defaults) == [input_name]
            got = session.run(feeds)
        for output, array in want.items():
            assert (got[output].shape, got[output].dtype) == (array.shape, array.dtype)
            assert got[output].tobytes() == array.tobytes()
