"""The cases of ONNX's suite with nodes without a kernel are those of `fallbacks.txt`, in every form."""

from __future__ import annotations

import pytest

from tests.core.conformance.fallbacks import FORMS, all_sections, entries, found, names, recorded
from tests.core.conformance.suite import STRIDE

# The suite converts NaN and infinity to integers when it makes its data.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample(2)
def test_a_sample(form: str) -> None:
    known = recorded()[form]
    for name in names()[::STRIDE]:
        expected = {operator for operator, cases in known.items() if name.removeprefix("test_") in cases}
        assert found(name, form) == expected, f"{name}: run python -m tests.core.conformance.fallbacks"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_case() -> None:
    found, known = entries(all_sections()), entries(recorded())
    assert sorted(found - known) == [], "new; run python -m tests.core.conformance.fallbacks"
    assert sorted(known - found) == [], "no longer; run python -m tests.core.conformance.fallbacks"
