"""Every case of ONNX's backend test suite, compiled, passes at the suite's tolerances or is excluded with a reason."""

from __future__ import annotations

import pytest

from tests.core.conformance.exclusions import EXCLUSIONS
from tests.core.conformance.suite import cases

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")  # the suite's own conversions of NaN and infinity
@pytest.mark.parametrize("name", [name for name in cases() if name not in EXCLUSIONS])
def test_case(name: str) -> None:
    cases()[name]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXCLUSIONS)
def test_excluded_case_still_fails(name: str) -> None:
    with pytest.raises(Exception, match=""):
        cases()[name]()
