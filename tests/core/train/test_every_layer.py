"""A training step of any layer is all native code, in place, for any batch size, and agrees with the references."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from tests.core.train.layers import LAYERS, feeds
from tests.core.train.test_step import reference


@pytest.mark.sample(4)
@pytest.mark.parametrize("rows", [3, pytest.param(19, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_no_step_leaves_native_code(name: str, rows: int) -> None:
    graph, optimizer = LAYERS[name], optimizers.SGD(0.1)
    batches = [feeds(graph, rows)]
    learner = step(graph, losses.CrossEntropy(), optimizer, threads=1)
    for batch in batches:
        learner.run(batch)
    assert "FALLBACK" not in learner.explain()
    assert [ready.plan.copies for ready in learner._executables.values()] == [()], "states are not updated in place"
    found = learner.state()
    for state, expected in reference(graph, optimizer, batches).items():
        np.testing.assert_allclose(found[state], expected, 1e-3, 1e-5, err_msg=state)
