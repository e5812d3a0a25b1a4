"""Sessions without tuning, and their comparison with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

import lathe
from tests.core.decoders import Feeds
from tests.onnx_runtime import plain_session


def opened(model: onnx.ModelProto | lathe.Graph, **options: Any) -> lathe.Session:
    graph = model if isinstance(model, lathe.Graph) else lathe.load(model.SerializeToString())
    return lathe.compile(graph, **{"threads": 1, "tune": "off", **options})


def agree(model: onnx.ModelProto, session: lathe.Session, feeds: Feeds, tolerance: float = 3e-5) -> dict[str, Any]:
    """Run the session, compare with ONNX Runtime, and return the outputs."""
    oracle = plain_session(model.SerializeToString())
    names, answers = [each.name for each in oracle.get_outputs()], session.run(feeds)
    for name, want in zip(names, oracle.run(None, feeds), strict=True):
        assert answers[name].shape == want.shape
        np.testing.assert_allclose(answers[name], want, rtol=tolerance, atol=tolerance, err_msg=name)
    return answers
