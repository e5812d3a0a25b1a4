"""Checks answers while the live alias moves: which versions may answer, and with which values."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from loadtest.wire import Response, read_inferred

TOLERANCE = 1e-4  # absolute and relative, between the server and the ONNX reference evaluator

Outputs = dict[str, NDArray[Any]]


@dataclass
class Moves:
    """The moves of one alias, in order.

    The new version may answer from the start of the call. After the acknowledgement only the new version may answer.
    """

    versions: list[int]
    started: list[float] = field(default_factory=lambda: [-math.inf])
    acknowledged: list[float] = field(default_factory=lambda: [-math.inf])

    def start(self, version: int, now: float) -> None:
        self.versions.append(version)
        self.started.append(now)
        self.acknowledged.append(math.inf)

    def acknowledge(self, now: float) -> None:
        self.acknowledged[-1] = now

    def allowed(self, sent: float, received: float) -> set[int]:
        """The versions that may answer a request sent and answered at these times (monotonic seconds)."""
        settled = bisect_right(self.acknowledged, sent) - 1
        begun = bisect_right(self.started, received)
        return set(self.versions[settled:begun])


@dataclass
class Oracle:
    """Checks every answer: the version may answer at that time, and the values are what that version computes."""

    moves: Moves
    expected: dict[int, Sequence[Outputs]]  # version -> outputs for each of the rotating inputs
    seen: Counter[int] = field(default_factory=Counter)

    def check(self, number: int, sent: float, received: float, response: Response) -> str | None:
        answer = read_inferred(response)
        version = int(answer.version)
        self.seen[version] += 1
        if version not in self.moves.allowed(sent, received):
            return f"version {version} answered when it was not live"
        if version not in self.expected:
            return f"version {version} answered, which was never uploaded"
        outputs = self.expected[version]
        for name, value in outputs[number % len(outputs)].items():
            if not np.allclose(answer.outputs[name], value, TOLERANCE, TOLERANCE):
                return f"version {version}: output {name!r} is not what this version computes"
        return None


def variant(model: bytes, factor: float) -> bytes:
    """The same model with its first output multiplied by `factor`, so that versions differ in their values."""
    proto = onnx.load_from_string(model)
    output = proto.graph.output[0].name
    inner = f"{output}_before_factor"
    for node in proto.graph.node:
        node.output[:] = [inner if name == output else name for name in node.output]
        node.input[:] = [inner if name == output else name for name in node.input]
    proto.graph.initializer.append(numpy_helper.from_array(np.array(factor, np.float32), "output_factor"))
    proto.graph.node.append(helper.make_node("Mul", [inner, "output_factor"], [output]))
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString())


def reference_outputs(model: bytes, inputs: Sequence[Outputs]) -> list[Outputs]:
    """The outputs of the ONNX reference evaluator, which shares no code with the server, for each of `inputs`."""
    evaluator = ReferenceEvaluator(onnx.load_from_string(model))
    answers = (list(evaluator.run(None, dict(feeds))) for feeds in inputs)
    return [dict(zip(evaluator.output_names, values, strict=True)) for values in answers]
