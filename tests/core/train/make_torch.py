"""Writes torch_results.json: what PyTorch's optimizers, losses, schedules and autocast compute.

Run by hand with a Python that has PyTorch, from the project's root: `python -m tests.core.train.make_torch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import optim
from torch.nn import functional

from tests.core.train import mixed

SIZE, UPDATES, TOLD = 6, 100, (1, 2, 10, 100)
ROWS, CLASSES = 4, 5

OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "SGD": lambda p: optim.SGD(p, 0.05),
    "SGD momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "SGD dampening": lambda p: optim.SGD(p, 0.05, momentum=0.8, dampening=0.3),
    "SGD nesterov": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.05, lr_decay=0.01, weight_decay=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, 1.0, rho=0.9, weight_decay=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, weight_decay=0.01),
    "RMSprop centered": lambda p: optim.RMSprop(p, 0.01, momentum=0.7, centered=True),
    "Adam": lambda p: optim.Adam(p, 0.02, weight_decay=0.01),
    "AMSGrad": lambda p: optim.Adam(p, 0.02, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 0.02, weight_decay=0.05),
    "AdaMax": lambda p: optim.Adamax(p, 0.02, weight_decay=0.01),
    "NAdam": lambda p: optim.NAdam(p, 0.02, weight_decay=0.01),
}
LOSSES: dict[str, Callable[[Any, Any, Any], Any]] = {  # of outputs, classes and real targets
    "CrossEntropy": lambda y, c, t: functional.cross_entropy(y, c),
    "CrossEntropy smooth": lambda y, c, t: functional.cross_entropy(y, c, label_smoothing=0.1),
    "NegativeLogLikelihood": lambda y, c, t: functional.nll_loss(y, c),
    "MeanSquaredError": lambda y, c, t: functional.mse_loss(y, t),
    "MeanAbsoluteError": lambda y, c, t: functional.l1_loss(y, t),
    "Huber": lambda y, c, t: functional.huber_loss(y, t, delta=0.7),
    "BinaryCrossEntropy": lambda y, c, t: functional.binary_cross_entropy_with_logits(y, t),
    "KullbackLeibler": lambda y, c, t: functional.kl_div(y, t / t.sum(1, keepdim=True), reduction="batchmean"),
}
SCHEDULES: dict[str, tuple[int, Callable[[Any], Any]]] = {  # the number of rates, and the scheduler
    "OneCycle": (19, lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20)),
    "Cosine": (10, lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.01)),
    "Steps": (10, lambda o: optim.lr_scheduler.StepLR(o, 3, gamma=0.5)),
}


def parameters(name: str, start: Any, gradients: Any) -> dict[int, list[float]]:
    """The parameters after the updates in `TOLD`."""
    x = torch.tensor(start, requires_grad=True)
    optimizer, found = OPTIMIZERS[name]([x]), {}
    for step, gradient in enumerate(gradients, 1):
        x.grad = torch.tensor(gradient)
        optimizer.step()
        if step in TOLD:
            found[step] = numbers(x.detach())
    return found


def loss(name: str, outputs: Any, classes: Any, targets: Any) -> dict[str, Any]:
    """A loss, and its gradient with respect to the outputs."""
    y = torch.tensor(outputs, requires_grad=True)
    value = LOSSES[name](y, torch.tensor(classes), torch.tensor(targets))
    value.backward()
    return {"loss": numbers(value.detach())[0], "gradient": numbers(y.grad)}


def rates(name: str) -> list[float]:
    """The rate of every step from the first."""
    count, make = SCHEDULES[name]
    optimizer = optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    schedule, found = make(optimizer), []
    for _ in range(count):
        found.append(float(f"{optimizer.param_groups[0]['lr']:.12g}"))
        optimizer.step()
        schedule.step()
    return found


def curve(precision: str) -> list[float]:
    """The losses of the model of mixed.py, each before its update; products are computed in `precision`."""
    w0, b0, w1, b1, w2 = weights = [torch.tensor(mixed.weight(name), requires_grad=True) for name in mixed.SHAPES]
    optimizer, found = optim.SGD(weights, mixed.RATE, mixed.MOMENTUM), []
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    for seed in range(mixed.STEPS):
        given = {name: torch.tensor(array) for name, array in mixed.batch(seed).items()}
        with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
            hidden = functional.linear(functional.linear(given["x"], w0.T, b0).relu(), w1.T, b1).relu()
            logits = hidden @ w2
        value = functional.cross_entropy(logits.float(), given["target"])
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(numbers(value.detach())[0])
    return found


def scaling(name: str) -> list[Any]:
    """The loss scale and parameters after each update; some gradients are infinite or NaN."""
    x = torch.tensor(mixed.scaled_start(), requires_grad=True)
    optimizer, found = OPTIMIZERS[name]([x]), []
    scaler = torch.amp.GradScaler("cpu", **mixed.SCALING)
    for gradient in mixed.scaled_gradients():
        optimizer.zero_grad()
        scaler.scale((x * torch.tensor(gradient)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append([scaler.get_scale(), *numbers(x.detach())])
    return found


def numbers(tensor: Any) -> list[float]:
    """All elements, as the shortest decimals that are the same float32."""
    return [float(str(number)) for number in tensor.numpy().reshape(-1)]


def results() -> dict[str, Any]:
    """The content of the file."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(0, 0.6, SIZE).astype(np.float32), rng.normal(0, 1, (UPDATES, SIZE)).astype(np.float32)
    outputs, classes = rng.normal(0, 2, (ROWS, CLASSES)).astype(np.float32), rng.integers(0, CLASSES, ROWS)
    targets = rng.uniform(0, 1, (ROWS, CLASSES)).astype(np.float32)
    return {
        "made_by": f"torch {torch.__version__}",
        "start": numbers(torch.tensor(start)),
        "gradients": numbers(torch.tensor(gradients)),
        "outputs": numbers(torch.tensor(outputs)),
        "classes": classes.tolist(),
        "targets": numbers(torch.tensor(targets)),
        "parameters": {name: parameters(name, start, gradients) for name in OPTIMIZERS},
        "losses": {name: loss(name, outputs, classes, targets) for name in LOSSES},
        "schedules": {name: rates(name) for name in SCHEDULES},
        "mixed": {precision: curve(precision) for precision in ("float32", "bfloat16", "float16")},
        "scaling": {name: scaling(name) for name in ("SGD momentum", "AdamW")},
    }


def main() -> None:
    lines = [f' "{name}": {json.dumps(value)}' for name, value in results().items()]
    (Path(__file__).parent / "torch_results.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
