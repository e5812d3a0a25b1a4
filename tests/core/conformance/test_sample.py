"""A fixed sample of ONNX's backend test suite, compiled: the part of it that `make test` runs."""

from __future__ import annotations

import pytest

from tests.core.conformance.case_names import case_names
from tests.core.conformance.exclusions import EXCLUSIONS, RANDOM, REASONS
from tests.core.conformance.models import suite_models
from tests.core.conformance.suite import STRIDE, cases

# The suite converts NaN and infinity to integers when it makes its data.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in case_names()[3::STRIDE] if name not in REASONS])
def test_case(name: str) -> None:
    cases()[name]()


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_have_the_type_and_shape_that_is_expected(name: str) -> None:
    try:
        cases()[name]()
    except AssertionError as error:
        if "Mismatched elements" not in str(error):  # the suite's message after element type and shape agree
            raise


def test_exclusions_are_cases_and_have_reasons() -> None:
    assert REASONS.keys() <= cases().keys()
    assert not EXCLUSIONS.keys() & RANDOM.keys()
    assert all(len(reason) > 20 for reason in REASONS.values())


def test_all_of_the_suite_is_collected() -> None:
    """2,033 cases in onnx 1.23.2. If onnx has others, `python -m tests.core.conformance.case_names` records them."""
    assert list(cases()) == case_names() == list(suite_models())
    assert len(case_names()) >= 2033
