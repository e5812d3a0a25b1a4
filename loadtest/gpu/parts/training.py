"""Training steps on the device: agreement with the CPU, and speed compared with PyTorch.

Agreement compares losses and parameters after a few steps of SGD with momentum, which does not magnify rounding errors
(Adam divides by values near zero). Speed is that of Adam, from host memory and back, as in `loadtest.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

import lathe
from lathe.core.train import TrainStep, step
from lathe.core.train.training_step import losses, optimizers
from loadtest import model_builder as build
from loadtest import training
from loadtest.gpu import torch_training
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.comparison import OURS, time_in_turns
from loadtest.gpu.pytorch_peers import torch_is_usable

SHARE = 0.1
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
_OF_REFERENCES = 1.5  # times the references' own error: a rounding error at 0 changes the slope of Relu
SGD = optimizers.SGD(0.02, momentum=0.9)
_STEPS = 4

_Outcome: TypeAlias = tuple[list[float], Mapping[str, Any]]  # of training: the loss of every step, and the parameters


def cases(options: Options) -> list[Case]:
    agree = [Case("training", f"agreement/{name}/{kind}") for kind in TOLERANCES for name in options.trained]
    fast = [
        Case("training", f"speed/{name}/{kind}", 90.0) for kind in ("float32", "bfloat16") for name in options.trained
    ]
    return [*agree, *fast]


def measure(case: Case, bench: Bench) -> Finding:
    what, name, precision = case.words
    return (_agreement if what == "agreement" else _speed)(name, precision, bench)


def _agreement(name: str, precision: str, bench: Bench) -> Finding:
    """The largest error of losses, relative to the first loss, and of parameters, relative to each tensor's largest.

    The NumPy references may differ from the CPU's code as much: the residual network magnifies rounding errors.
    """
    wanted = _after_steps(name, "cpu", "float32")
    loss, parameters = _errors(wanted, _after_steps(name, bench.options.device, precision))
    most = TOLERANCES[precision]
    if max(loss, parameters) > most:
        most = max(most, _OF_REFERENCES * max(_errors(wanted, _after_steps(name, "simulated", "float32"))))
    text = f"training {name} in {precision}: losses {loss:.1e}, parameters {parameters:.1e}, at most {most:.0e}"
    return Finding(text, max(loss, parameters) <= most, {"losses": loss, "parameters": parameters})


def _errors(wanted: _Outcome, found: _Outcome) -> tuple[float, float]:
    """The errors of the losses and of the parameters, as `_agreement` defines them."""
    loss = max(abs(a - b) for a, b in zip(wanted[0], found[0], strict=True)) / abs(wanted[0][0])
    return loss, max(_relative_error(found[1][key], array) for key, array in wanted[1].items())


def _after_steps(name: str, device: str, precision: Any) -> _Outcome:
    """The loss of every step, and the final parameters."""
    graph = lathe.load(build.build(name, training.MODELS[name]).SerializeToString())
    learner: TrainStep = step(graph, losses.CrossEntropy(), SGD, device=device, precision=precision)
    feeds = {"x": training.sample(name), "target": training.targets()}
    try:
        found = [float(learner.run(feeds)["loss"]) for _ in range(_STEPS)]
        return found, {name: np.array(array) for name, array in learner.state().items() if _is_parameter(name, array)}
    finally:
        learner.close()


def _relative_error(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-3))


def _is_parameter(name: str, array: Any) -> bool:
    """True for parameters, false for the optimizer's own state, which has no promise."""
    return "." not in name and array.dtype == np.float32


def _speed(name: str, precision: str, bench: Bench) -> Finding:
    """Milliseconds of a training step of 64 rows, compared with PyTorch's."""
    options, narrow = bench.options, precision == "bfloat16"
    usable = torch_is_usable(options.device)
    steps: dict[str, Callable[[], float]] = {OURS: training.lathe(name, 1, narrow, options.device)}
    refused: dict[str, str] = {}
    for engine, make in torch_training.PEERS.items() if usable else ():
        try:
            steps[engine] = make(name, narrow)
            steps[engine]()
        except Exception as error:  # any kind: the peer is another project
            steps.pop(engine, None)
            refused[engine] = f"{type(error).__name__}: {str(error)[:200]}"
    times = time_in_turns(steps, options.rounds, options.slice)
    line = ", ".join(f"{engine} {'x' if engine == 'ahead' else ''}{value:.3f}" for engine, value in times.items())
    why = "".join(f"; {engine}: {text}" for engine, text in refused.items())
    figures = {"ms": times, "refused": refused}
    return Finding(f"training {name}, {training.ROWS} rows, {precision} [ms]: {line}{why}", None, figures)
