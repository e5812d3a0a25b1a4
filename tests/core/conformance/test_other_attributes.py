"""Models of one operator with attributes of other values, and with empty inputs: they run, or errors of Lathe say why.

`lathe.load` and runs turn errors of Python and NumPy into errors of Lathe, whose texts then say little about the model.
For attributes such texts are not accepted."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

import lathe
from lathe.core.errors import LatheError
from tests.core.conformance.attribute_changes import Operator, operators, with_empty_inputs, with_other_attributes

pytestmark = pytest.mark.filterwarnings("ignore::lathe.core.errors.ShapeWarning")


def test_other_attributes_of_every_operator() -> None:
    assert sum(map(check_attributes, operators())) > 2000


def test_empty_inputs_of_every_operator() -> None:
    assert sum(map(check_empty_inputs, operators())) > 500


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute and a half of processor time
def test_all_cases() -> None:
    for operator in operators(all_cases=True):
        check_attributes(operator)
        check_empty_inputs(operator)


def check_attributes(operator: Operator) -> int:
    """The number of changed models, each of which runs or is refused by an error with a text of its own."""
    changes = list(with_other_attributes(operator))
    for change, model in changes:
        error = _error(operator, change, model, operator.feeds)
        cause = error.__cause__ if error is not None else None
        if "is malformed: " in str(error) or not isinstance(cause, LatheError | MemoryError | None):
            pytest.fail(f"{operator.label}, {change}: {error}")
    return len(changes)


def check_empty_inputs(operator: Operator) -> int:
    changes = list(with_empty_inputs(operator))
    for change, model, feeds in changes:
        _error(operator, change, model, feeds)
    return len(changes)


def _error(operator: Operator, change: str, model: onnx.ModelProto, feeds: dict[str, Any]) -> LatheError | None:
    """Load and run a model; the error of Lathe, if there is one. Fails for other errors."""
    try:
        lathe.interpret(lathe.load(model.SerializeToString()), feeds)
    except LatheError as error:
        return error
    except Exception as error:
        pytest.fail(f"{operator.label}, {change}: {type(error).__name__}: {error}")
    return None
