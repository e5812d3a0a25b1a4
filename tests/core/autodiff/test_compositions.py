"""Gradients of random programs agree with PyTorch's (torch_gradients.json) and with central differences.

`python -m tests.oracle_torch.test_compositions`, where PyTorch is installed, writes that file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.reference import interpret
from tests.core.autodiff.compositions import VOCABULARY, given, program, written
from tests.core.autodiff.harness import assert_gradients

TORCH: list[dict[str, Any]] = json.loads((Path(__file__).parent / "torch_gradients.json").read_text())["gradients"]


def test_programs_use_every_instruction() -> None:
    used = {instruction.name for seed in range(len(TORCH)) for instruction in program(seed)}
    assert used == VOCABULARY.keys()


@pytest.mark.parametrize("seed", range(len(TORCH)))
def test_gradients_agree_with_pytorch(seed: int) -> None:
    graph, feeds = written(seed), given(seed)
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=list(feeds))
    results = interpret(back, feeds)
    for name, expected in TORCH[seed].items():
        np.testing.assert_allclose(results[f"{name}.gradient"].ravel(), expected, 1e-6, 1e-7, err_msg=name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(0, len(TORCH), 5))
def test_second_order_gradients_agree_with_differences(seed: int) -> None:
    """The gradient of a gradient, against central differences."""
    graph, feeds = written(seed), given(seed)
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x0"])
    back.outputs = back.outputs[1:]
    assert_gradients(back, feeds, tolerance=1e-4)
