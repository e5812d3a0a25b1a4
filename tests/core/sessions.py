"""Sessions of models without tuning, and whether their answers are ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

import core
from tests.core.decoders import Feeds
from tests.onnx_runtime import plain_session


def opened(model: onnx.ModelProto | core.Graph, **options: Any) -> core.Session:
    graph = model if isinstance(model, core.Graph) else core.load(model.SerializeToString())
    return core.compile(graph, **{"threads": 1, "tune": "off", **options})


def agree(model: onnx.ModelProto, session: core.Session, feeds: Feeds, tolerance: float = 3e-5) -> dict[str, Any]:
    """The session's answers, which are ONNX Runtime's."""
    oracle = plain_session(model.SerializeToString())
    names, answers = [each.name for each in oracle.get_outputs()], session.run(feeds)
    for name, want in zip(names, oracle.run(None, feeds), strict=True):
        assert answers[name].shape == want.shape
        np.testing.assert_allclose(answers[name], want, rtol=tolerance, atol=tolerance, err_msg=name)
    return answers
