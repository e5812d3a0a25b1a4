"""A fixed sample of ONNX's backend test suite, compiled: the part of it that `make test` runs."""

from __future__ import annotations

import pytest

from tests.core.conformance.exclusions import EXCLUSIONS
from tests.core.conformance.suite import cases, sample


@pytest.mark.filterwarnings("ignore")  # the suite's own conversions of NaN and infinity
@pytest.mark.parametrize("name", [name for name in sample(3) if name not in EXCLUSIONS])
def test_case(name: str) -> None:
    cases()[name]()


def test_exclusions_name_cases_and_reasons() -> None:
    assert EXCLUSIONS.keys() <= cases().keys()
    assert all(len(reason) > 20 for reason in EXCLUSIONS.values())


def test_the_suite_is_the_one_counted() -> None:
    """2,033 cases in onnx 1.23.2; fewer means that some were not collected."""
    assert len(cases()) >= 2033
