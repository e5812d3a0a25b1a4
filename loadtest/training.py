"""Compares a training step with PyTorch's, eager and compiled: `python -m loadtest.training` (needs PyTorch).

Adam on a batch of 64 with cross-entropy, for four models: the zoo's LeNet and MLP, a residual network for images of 32
x 32 pixels, and a transformer encoder with two layers for 32 tokens. As in `loadtest.engine` all take turns in short
slices, and "ahead" is the median over rounds of (PyTorch's time / Lathe's). Memory is measured in a separate process
for each: its peak, and how much of that was added by the model and its training. With `--bfloat16` both multiply in
bfloat16 (for PyTorch: autocast).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np

from loadtest import model_builder as build
from loadtest import zoo
from loadtest.model_builder import Builder, Entry

PEERS = ("torch eager", "torch compiled")
ROWS, CLASSES, RATE = 64, 10, 1e-3
WIDTH, HEADS, LENGTH, LAYERS = 128, 4, 32, 2  # of the transformer
CHANNELS = ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1))  # (channels, stride) of the residual network's blocks
Step = Callable[[], float]


def residual(b: Builder, x: str) -> str:
    """A ResNet of 14 layers for small images (He et al. 2015, section 4.2), two blocks per image size."""
    x, channels = b.op("Relu", b.batchnorm(b.conv(x, 3, 16, 3), 16)), 16
    for width, stride in CHANNELS:
        x, channels = zoo.residual_block(b, x, channels, width, stride), width
    return b.pool_and_classify(x, channels, CLASSES)


def transformer(b: Builder, x: str) -> str:
    for _ in range(LAYERS):
        x = b.layernorm(b.op("Add", x, zoo.attention(b, x, WIDTH, HEADS, LENGTH)), WIDTH)
        x = b.layernorm(b.op("Add", x, zoo.feed_forward(b, x, WIDTH)), WIDTH)
    return b.linear(b.op("ReduceMean", x, axes=[1], keepdims=0), WIDTH, CLASSES)


MODELS = {
    "lenet": zoo.ZOO["lenet"],
    "mlp": zoo.ZOO["mlp"],
    "resnet": Entry((3, 32, 32), residual, (CLASSES,)),
    "transformer": Entry((LENGTH, WIDTH), transformer, (CLASSES,)),
}


def sample(name: str) -> Any:
    return build.feeds(MODELS[name], ROWS)["x"]


def lathe(name: str, threads: int, narrow: bool, device: str = "cpu") -> Step:
    import lathe
    from lathe.core.train import step
    from lathe.core.train.training_step import losses, optimizers

    graph = lathe.load(build.build(name, MODELS[name]).SerializeToString())
    precision: Literal["float32", "bfloat16"] = "bfloat16" if narrow else "float32"
    loss, optimizer = losses.CrossEntropy(), optimizers.Adam(RATE)
    learner = step(graph, loss, optimizer, device=device, precision=precision, threads=threads)
    feeds = {"x": sample(name), "target": targets()}
    return lambda: float(learner.run(feeds)["loss"])


def pytorch(name: str, threads: int, compiled: bool, narrow: bool, device: str = "cpu") -> Step:
    """PyTorch's step: each call copies the batch from the host and returns the loss to the host."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = module(name).train().to(device)
    x, target = torch.from_numpy(sample(name)), torch.from_numpy(targets())
    optimizer = torch.optim.Adam(model.parameters(), RATE, foreach=True)

    def forward() -> Any:
        with torch.autocast(device, torch.bfloat16) if narrow else nullcontext():
            return F.cross_entropy(model(x.to(device)).float(), target.to(device))

    run = torch.compile(forward) if compiled else forward

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = run()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def _lenet() -> Any:
    from torch import nn

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


def _resnet() -> Any:
    from torch import nn

    def conv(inputs: int, outputs: int, size: int, stride: int) -> Any:
        layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs))

    class Block(nn.Module):  # type: ignore[misc]  # PyTorch need not be installed
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first, self.second = conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3, 1)
            self.short = conv(inputs, outputs, 1, stride) if stride != 1 else nn.Identity()

        def forward(self, x: Any) -> Any:
            return (self.short(x) + self.second(self.first(x).relu())).relu()

    widths = [16, *(width for width, _ in CHANNELS)]
    blocks = [Block(inputs, *block) for inputs, block in zip(widths, CHANNELS, strict=False)]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)]
    return nn.Sequential(conv(3, 16, 3, 1), nn.ReLU(), *blocks, *ends)


def _transformer() -> Any:
    from torch import nn

    class Mean(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x.mean(1)

    layers = [
        nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*layers, Mean(), nn.Linear(WIDTH, CLASSES))


_MODULES: dict[str, Callable[[], Any]] = {
    "lenet": _lenet,
    "mlp": _mlp,
    "resnet": _resnet,
    "transformer": _transformer,
}


def module(name: str) -> Any:
    """The model in PyTorch."""
    return _MODULES[name]()


def targets() -> Any:
    return np.random.default_rng(0).integers(0, CLASSES, ROWS)


def make_step(engine: str, name: str, threads: int, narrow: bool) -> Step:
    if engine == "lathe":
        return lathe(name, threads, narrow)
    return pytorch(name, threads, engine.endswith("compiled"), narrow)


def rounds(steps: dict[str, Step], count: int, seconds: float) -> dict[str, list[float]]:
    """Median milliseconds of each step, one value per round."""
    for step in steps.values():
        for _ in range(5):
            step()
    found: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(count):
        for engine, step in steps.items():
            found[engine].append(_slice(step, seconds))
    return found


def _slice(step: Step, seconds: float) -> float:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def memory_kib() -> dict[str, int]:
    """Resident memory of this process now (VmRSS) and at its peak (VmHWM), in KiB."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {name: int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM")}


def memory(engine: str, name: str, threads: int, narrow: bool) -> None:
    """Print the peak KiB of this process, and how much of it training added. Run it in a process of its own."""
    if engine == "lathe":
        import lathe.core.train  # noqa: F401
    else:
        import torch  # noqa: F401
    before = memory_kib()["VmRSS"]
    step = make_step(engine, name, threads, narrow)
    for _ in range(10):
        step()
    most = memory_kib()["VmHWM"]
    print(most, most - before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=tuple(MODELS))
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16, in Lathe and in PyTorch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a slice")
    parser.add_argument("--memory", choices=("lathe", *PEERS), help="print the memory of one engine instead")
    given = parser.parse_args(arguments)
    if given.memory:
        memory(given.memory, given.models[0], given.threads, given.bfloat16)
        return
    for name in given.models:
        steps = {engine: make_step(engine, name, given.threads, given.bfloat16) for engine in ("lathe", *given.peers)}
        found = rounds(steps, given.rounds, given.seconds)
        for engine, times in found.items():
            ahead = statistics.median(b / a for a, b in zip(found["lathe"], times, strict=True))
            command = [sys.executable, "-m", "loadtest.training", "--memory", engine, "--models", name]
            command += ["--bfloat16"] if given.bfloat16 else []
            most, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            figures = f"{statistics.median(times):8.3f} ms  ahead {ahead:5.2f}"
            print(
                f"{name:12s} {engine:15s} {figures}  {int(most) >> 10:5d} MiB, {int(grown) >> 10} of them to train",
                flush=True,
            )


if __name__ == "__main__":
    main()
