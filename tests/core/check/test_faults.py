"""The checker accepts correct plans and finds every injected fault."""

from __future__ import annotations

from random import Random

import pytest

from lathe.core.check.plans import check_plan
from lathe.core.errors import PlanError
from tests.core.check.cases import Case, all_cases, branches, joined, loop
from tests.core.check.faults import FAULTS, Fault, shifted_operand, with_operand

_SEEDS = 3


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases()


def test_correct_plans_are_accepted(cases: list[Case]) -> None:
    for case in cases:
        check_plan(case.graph, case.planned, case.target)


@pytest.mark.sample(5)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_injected_fault_is_found(fault: Fault, cases: list[Case]) -> None:
    """In every plan where it applies, at several places."""
    tried = 0
    for case in cases:
        for seed in range(_SEEDS):
            wrong = fault(case, Random(seed))
            if wrong is None:
                continue
            tried += 1
            try:
                check_plan(case.graph, wrong, case.target)
            except PlanError:
                continue
            pytest.fail(f"{fault.__name__} in '{case.name}' with seed {seed} was not found")
    assert tried >= _SEEDS


def test_errors_name_step_operand_value_bytes_and_batch() -> None:
    case = branches(1)
    with pytest.raises(PlanError, match=r"step \d+ \(\w+ '.+'\), operand \d \((reads|writes) %.+\): bytes .*n = \d+"):
        check_plan(case.graph, shifted_operand(case, Random(0)) or case.planned, case.target)
    address = case.plan.steps[2].operands[0]
    wrong = with_operand(case, (2, 0), type(address)(address.base, case.plan.arena))
    with pytest.raises(PlanError, match=r"step 2 .* of the arena, expected from 0 to \d+, for n = 1"):
        check_plan(case.graph, wrong, case.target)


def test_the_plans_have_all_features_that_faults_need() -> None:
    """Nested values, stages, cut points, copies, fallbacks and bodies: otherwise their faults would not be tested."""
    plans = [case.plan for case in all_cases()]
    assert any(not step.has_barrier for plan in plans for step in plan.steps)
    assert any(plan.cut_points for plan in plans)
    assert any(plan.copies for plan in plans)
    assert any(plan.fallbacks.nodes for plan in plans)
    assert loop().planned.bodies
    assert {"Slice", "Split"} & {node.op for node in joined().graph.nodes}
    assert not {"Slice", "Split"} & {step.op for step in joined().plan.steps}
