"""Every case of ONNX's backend test suite, compiled, passes at the suite's tolerances or is excluded with a reason."""

from __future__ import annotations

import pytest

from tests.core.conformance.case_names import case_names
from tests.core.conformance.exclusions import EXCLUSIONS, REASONS
from tests.core.conformance.suite import cases

# The suite converts NaN and infinity to integers when it makes its data.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("name", [name for name in case_names() if name not in REASONS])
def test_case(name: str) -> None:
    cases()[name]()


@pytest.mark.parametrize("name", EXCLUSIONS)
def test_an_excluded_case_still_fails(name: str) -> None:
    """An exclusion whose case passes must be removed."""
    try:
        cases()[name]()
    except Exception:  # a case can raise anything
        return
    pytest.fail(f"{name} passes: take it out of exclusions.py")
