"""Every case of ONNX's backend test suite gives the same results without declared ranks or extents."""

from __future__ import annotations

import pytest

from lathe.core.errors import UnsupportedError
from tests.core.conformance.case_names import names_with_data
from tests.core.conformance.exclusions import REASONS
from tests.core.conformance.hidden_shapes import HIDDEN, check_hidden

# The suite converts NaN and infinity to integers when it makes its data.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

_GRADIENT = "the inputs of a gradient need their ranks: what they are broadcast along is summed"

# Cases that need the removed information, each with its reason.
NEEDS: dict[tuple[str, str], str] = {
    ("test_gradient_of_add", "ranks"): _GRADIENT,
    ("test_gradient_of_add_and_mul", "ranks"): _GRADIENT,
}


WITH_DATA = [name for name in names_with_data() if name not in REASONS]


@pytest.mark.parametrize("what", HIDDEN)
@pytest.mark.parametrize("name", WITH_DATA)
def test_case(name: str, what: str) -> None:
    if (name, what) in NEEDS:
        with pytest.raises(UnsupportedError, match="the rank of"):
            check_hidden(name, what)
    else:
        check_hidden(name, what)
