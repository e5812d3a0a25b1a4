"""Gradients of random programs are those that PyTorch computed (torch_gradients.json) and those of differences.

`python -m tests.oracle_torch.test_compositions`, where PyTorch is installed, writes that file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import core
from core.reference import interpret
from tests.core.autodiff.compositions import VOCABULARY, given, program, written
from tests.core.autodiff.harness import assert_gradients

TORCH: list[dict[str, Any]] = json.loads((Path(__file__).parent / "torch_gradients.json").read_text())["gradients"]


def test_programs_use_the_whole_vocabulary() -> None:
    used = {instruction.name for seed in range(len(TORCH)) for instruction in program(seed)}
    assert used == VOCABULARY.keys()


@pytest.mark.parametrize("seed", range(len(TORCH)))
def test_as_in_pytorch(seed: int) -> None:
    graph, feeds = written(seed), given(seed)
    back = core.gradients(graph, of=graph.outputs[0].name, with_respect_to=list(feeds))
    results = interpret(back, feeds)
    for name, expected in TORCH[seed].items():
        np.testing.assert_allclose(results[f"{name}.gradient"].ravel(), expected, 1e-6, 1e-7, err_msg=name)


@pytest.mark.parametrize("seed", range(0, len(TORCH), 5))
def test_second_order(seed: int) -> None:
    """The gradient of a gradient, against differences."""
    graph, feeds = written(seed), given(seed)
    back = core.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x0"])
    back.outputs = back.outputs[1:]
    assert_gradients(back, feeds, tolerance=1e-4)
