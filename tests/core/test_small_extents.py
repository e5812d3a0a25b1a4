"""Kernels rely on relations of extents, such as K results of at least K elements. Runs that violate them are refused.

Compiled code of every operator runs on inputs with few elements or none, in a child process: a kernel that reads beyond
its operands may end the process."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from lathe.core.kernels.elementwise.spec import OPS as ELEMENTWISE
from lathe.core.kernels.kernel_table import TABLE

OTHERS = {
    "Identity": "is elementwise: its kernel copies",
    "Iota": "has no inputs",
    "GuardedSoftmax": "has the kernel of Softmax",
    "SVMRegressor": "has the kernel of SVMClassifier",
    "TreeEnsemble": "has the kernel of TreeEnsembleRegressor",
}


def _operators(*arguments: str) -> set[str]:
    """Run `tests.core.small_extents`; the operators that it ran."""
    command = [sys.executable, "-m", "tests.core.small_extents", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"status {done.returncode} in {lines[-1:]}: {done.stderr[-2000:]}"
    wrong = [f"{before}\n{line}" for before, line in pairwise(lines) if line.startswith("WRONG")]
    assert not wrong, "\n".join(wrong)
    return set(lines[-1].split()[1:])


@pytest.mark.slow
def test_first_case_of_every_operator() -> None:
    assert set(TABLE) - set(ELEMENTWISE) - _operators("0", "1", "--first") == set(OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_all_cases(part: int) -> None:
    _operators(str(part), "12")
