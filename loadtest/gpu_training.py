"""Training steps on a GPU: the same as on the CPU, and how long they take beside PyTorch's.

Agreement is that of losses and parameters after a few steps of SGD with momentum, which magnifies no rounding (Adam
divides by what may be next to nothing); speed is that of Adam, as in `loadtest.training`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

import core
from core.train import TrainStep, losses, optimizers, step
from loadtest import build, training
from loadtest.gpu_report import Report

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
_STEPS = 4
_ROUNDS = 5
_SGD = optimizers.SGD(0.02, momentum=0.9)


def agreement(report: Report, device: str, names: Sequence[str]) -> None:
    """Losses relative to the first one, parameters to the largest of each tensor."""
    worst: dict[str, float] = {}
    report.line(f"{'training':20s} {'precision':10s} {'losses':>9s} {'parameters':>11s}")
    for name in names:
        for precision in TOLERANCES:

            def measure(name: str = name, precision: Any = precision) -> None:
                loss, parameters = _disagreement(name, device, precision)
                worst[precision] = max(worst.get(precision, 0.0), loss, parameters)
                report.line(f"{name:20s} {precision:10s} {loss:9.1e} {parameters:11.1e}")

            report.attempt(f"training {name} in {precision}", measure)
    for precision, error in worst.items():
        most = TOLERANCES[precision]
        text = f"training agrees in {precision}: {error:.1e} at most {most:.0e} over {len(names)} models"
        report.conclude(text, error <= most)


def _disagreement(name: str, device: str, precision: Any) -> tuple[float, float]:
    wanted, found = (_after_steps(name, where, kind) for where, kind in (("cpu", "float32"), (device, precision)))
    loss = max(abs(a - b) for a, b in zip(wanted[0], found[0], strict=True)) / abs(wanted[0][0])
    return loss, max(_apart(found[1][key], array) for key, array in wanted[1].items())


def _apart(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-3))


def _is_parameter(name: str, array: Any) -> bool:
    """Not what the optimizer keeps beside them: sums of gradients, which nobody promised anything for."""
    return "." not in name and array.dtype == np.float32


def _after_steps(name: str, device: str, precision: Any) -> tuple[list[float], Mapping[str, Any]]:
    """Every loss, and the parameters at the end."""
    graph = core.load(build.build(name, training.MODELS[name]).SerializeToString())
    learner: TrainStep = step(graph, losses.CrossEntropy(), _SGD, device=device, precision=precision)
    feeds = {"x": training.sample(name), "target": training.targets()}
    try:
        found = [float(learner.run(feeds)["loss"]) for _ in range(_STEPS)]
        return found, {name: np.array(array) for name, array in learner.state().items() if _is_parameter(name, array)}
    finally:
        learner.close()


def _peer(report: Report, who: str, name: str, narrow: bool) -> dict[str, training.Step]:
    """Its step by its name; nothing where it does not run."""
    made: dict[str, training.Step] = {}

    def run() -> None:
        made[who] = training.pytorch(name, 1, who.endswith("compiled"), narrow, "cuda")
        made[who]()

    return made if report.try_peer(f"{who}, training {name}", run) else {}


def speed(report: Report, device: str, names: Sequence[str], seconds: float) -> None:
    """Median milliseconds of a step of 64 rows with Adam, host to host."""
    peers = training.PEERS if device.startswith("cuda") and find_spec("torch") is not None else ()
    ratios: list[float] = []
    for name in names:
        for narrow in (False, True):

            def measure(name: str = name, narrow: bool = narrow) -> None:
                steps = {"lathe": training.lathe(name, 1, narrow, device)}
                for who in peers:
                    steps |= _peer(report, who, name, narrow)
                found = training.rounds(steps, _ROUNDS, seconds)
                times = "  ".join(f"{who} {statistics.median(each):.3f} ms" for who, each in found.items())
                report.line(f"training {name:12s} {'bfloat16' if narrow else 'float32':10s} {times}")
                if len(steps) > 1:
                    rounds = zip(found["lathe"], *(found[who] for who in steps if who != "lathe"), strict=True)
                    ratios.append(statistics.median(min(others) / mine for mine, *others in rounds))

            report.attempt(f"speed of training {name}", measure)
    if ratios:
        mean = statistics.geometric_mean(ratios)
        text = f"training ahead of PyTorch's best by x{mean:.2f} in the geometric mean, worst x{min(ratios):.2f}"
        report.conclude(f"{text}, over {len(ratios)} cases", None)
