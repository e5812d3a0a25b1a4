"""ONNX's backend test suite without the shapes of inputs and outputs: whatever rank comes, the answers are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import core
from core.errors import UnsupportedError
from tests.core.conformance.exclusions import REASONS
from tests.core.conformance.models import suite_models
from tests.core.conformance.round_trip import assert_similar

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::core.errors.ShapeWarning"),
]

REFUSED = {
    "test_gradient_of_add": "a gradient is summed to the shape of what it is of",
    "test_gradient_of_add_and_mul": "a gradient is summed to the shape of what it is of",
}
_STEP = 37


def cases() -> list[str]:
    return [name for name, case in suite_models().items() if case.has_data and name not in REASONS]


def shapeless(name: str) -> onnx.ModelProto:
    """A case's model without the shapes of tensors."""
    model = onnx.ModelProto.FromString(suite_models()[name].read())
    for info in (*model.graph.input, *model.graph.output):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return model


def check(name: str) -> None:
    case, model = suite_models()[name], shapeless(name)
    inputs, expected = case.data()
    session = core.compile(core.load(model.SerializeToString()), threads=1, tune="off")
    fed = zip([info.name for info in model.graph.input], inputs, strict=False)
    given = {key: np.asarray(x) if isinstance(x, np.generic) else x for key, x in fed if key in session.inputs}
    results = session.run(given)
    for info, wanted in zip(model.graph.output, expected, strict=True):
        assert_similar(results[info.name], wanted, _tolerances(wanted, case.tolerances))


def _tolerances(expected: Any, given: tuple[float, float]) -> tuple[float, float]:
    """Numbers of 16 bits: the definitions of operators round them after every step, the expected ones were once."""
    is_half = getattr(expected, "dtype", np.dtype(np.float32)).itemsize == 2
    return (max(given[0], 1e-2), max(given[1], 1e-2)) if is_half else given


@pytest.mark.parametrize("name", [name for name in cases() if name not in REFUSED][::_STEP])
def test_a_case(name: str) -> None:
    check(name)


@pytest.mark.slow
def test_all_cases() -> None:
    failed = []
    for name in cases():
        try:
            check(name)
        except UnsupportedError as error:
            if name not in REFUSED:
                failed.append(f"{name}: {error}")
        except Exception as error:  # all are told at once
            failed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            assert name not in REFUSED
    assert failed == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_value(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"value '[cd]': the rank of float32\[\*\] is not known"):
        core.load(shapeless(name).SerializeToString())
