"""A training step beside PyTorch's, eager and compiled: `python -m loadtest.training`, with PyTorch installed.

Adam on a batch of 64, cross-entropy, the zoo's LeNet and MLP. As in `loadtest.engine` all take turns in short slices,
and "ahead" is the median over rounds of (PyTorch's time / Lathe's). Memory is that of a process of its own for each:
the most it ever held, and how much of that came with the model and its training.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loadtest import zoo

MODELS = ("lenet", "mlp")
PEERS = ("torch eager", "torch compiled")
ROWS, CLASSES, RATE = 64, 10, 1e-3
Step = Callable[[], float]


def lathe(name: str, threads: int) -> Step:
    import core
    from core.train import losses, optimizers, step

    learner = step(
        core.load(zoo.model(name).SerializeToString()), losses.CrossEntropy(), optimizers.Adam(RATE), threads=threads
    )
    feeds = {"x": zoo.sample(name, ROWS), "target": targets()}
    return lambda: float(learner.run(feeds)["loss"])


def pytorch(name: str, threads: int, compiled: bool) -> Step:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = _module(name).train()
    x, target = torch.from_numpy(zoo.sample(name, ROWS)), torch.from_numpy(targets())
    optimizer = torch.optim.Adam(model.parameters(), RATE, foreach=True)

    def forward() -> Any:
        return F.cross_entropy(model(x), target)

    run = torch.compile(forward) if compiled else forward

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = run()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _module(name: str) -> Any:
    from torch import nn

    if name == "mlp":
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    images = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    rows = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*images, nn.Flatten(), *rows)


def targets() -> Any:
    return np.random.default_rng(0).integers(0, CLASSES, ROWS)


def made(who: str, name: str, threads: int) -> Step:
    return lathe(name, threads) if who == "lathe" else pytorch(name, threads, who.endswith("compiled"))


def rounds(steps: dict[str, Step], count: int, seconds: float) -> dict[str, list[float]]:
    """Median milliseconds of each one's step, round after round."""
    for step in steps.values():
        for _ in range(5):
            step()
    found: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(count):
        for who, step in steps.items():
            found[who].append(_slice(step, seconds))
    return found


def _slice(step: Step, seconds: float) -> float:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def held() -> dict[str, int]:
    """KiB that this process holds now, and the most it ever did."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {name: int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM")}


def memory(who: str, name: str, threads: int) -> None:
    """In a process of its own: print the most KiB it held, and how much of it training took."""
    if who == "lathe":
        import core.train  # noqa: F401
    else:
        import torch  # noqa: F401
    before = held()["VmRSS"]
    step = made(who, name, threads)
    for _ in range(50):
        step()
    most = held()["VmHWM"]
    print(most, most - before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one slice")
    parser.add_argument("--memory", choices=("lathe", *PEERS), help="print the memory of one of them instead")
    given = parser.parse_args(arguments)
    if given.memory:
        memory(given.memory, given.models[0], given.threads)
        return
    for name in given.models:
        steps = {who: made(who, name, given.threads) for who in ("lathe", *PEERS)}
        found = rounds(steps, given.rounds, given.seconds)
        for who, times in found.items():
            ahead = statistics.median(b / a for a, b in zip(found["lathe"], times, strict=True))
            command = [sys.executable, "-m", "loadtest.training", "--memory", who, "--models", name]
            most, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            figures = f"{statistics.median(times):8.3f} ms  ahead {ahead:5.2f}"
            print(
                f"{name:8s} {who:15s} {figures}  {int(most) >> 10:5d} MiB, {int(grown) >> 10} of them to train",
                flush=True,
            )


if __name__ == "__main__":
    main()
