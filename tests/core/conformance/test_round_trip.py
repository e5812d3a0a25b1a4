"""Import, export, import: every model of ONNX's suite stays the same graph, and its export gives the same answers.

`make test` takes the fixed sample; the slow tests take all of it.
"""

from __future__ import annotations

import pytest

from tests.core.conformance.case_names import case_names, names_with_data
from tests.core.conformance.exclusions import RANDOM
from tests.core.conformance.round_trip import check_answers, check_optimized, check_round_trip
from tests.core.conformance.suite import STRIDE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

IMPORTED = case_names()
WITH_DATA = [name for name in names_with_data() if name not in RANDOM]
# ONNX Runtime 1.31 takes 1,580 models; it refuses the others for want of a kernel, an element type or the opset.
LEAST_ANSWERED = 1550


@pytest.fixture(autouse=True)
def _take_opsets_that_are_not_released_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")


@pytest.mark.parametrize("name", IMPORTED[1::STRIDE])
def test_the_same_graph(name: str) -> None:
    check_round_trip(name)


@pytest.mark.parametrize("name", WITH_DATA[4::STRIDE])  # optimizing whole networks takes seconds
def test_optimized_graphs_can_be_exported(name: str) -> None:
    check_optimized(name)


@pytest.mark.parametrize("optimized", [False, True], ids=["as imported", "optimized"])
@pytest.mark.parametrize("name", WITH_DATA[2 :: 2 * STRIDE])
def test_the_same_answers(name: str, optimized: bool) -> None:
    check_answers(name, optimized=optimized)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_graph_for_every_model() -> None:
    for name in IMPORTED:
        check_round_trip(name)
        check_optimized(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimized", [False, True], ids=["as imported", "optimized"])
def test_the_same_answers_for_every_model_that_onnx_runtime_takes(optimized: bool) -> None:
    answered = sum(check_answers(name, optimized=optimized) for name in WITH_DATA)
    assert answered >= LEAST_ANSWERED
