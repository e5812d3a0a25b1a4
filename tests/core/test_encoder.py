"""A transformer layer, compiled, against the reference executor."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.compiler.compile import compile
from lathe.core.reference import interpret
from tests.core.passes.test_pipeline import encoder


@pytest.mark.parametrize("threads", [1, 2])
def test_agrees_with_the_reference(threads: int) -> None:
    graph = encoder()
    session = compile(graph, threads=threads)
    assert "FusedAttention" in session.explain()
    for batch in (1, 3, 40):
        x = np.random.default_rng(batch).standard_normal((batch, 12, 8)).astype(np.float32)
        np.testing.assert_allclose(session.run({"x": x})["y"], interpret(graph, {"x": x})["y"], rtol=1e-4, atol=1e-5)
