"""Writes PyTorch's results for the layers in `layers.py` and the models in `models.py`.

torch_layers.npz has outputs and gradients of the layers, torch_models.npz losses and weights of the trained models.

Run by hand with a Python that has PyTorch, from the project's root: `python -m tests.core.nn.make_torch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.core.nn.layers import LAYERS, Layer
from tests.core.nn.models import MODELS, MOMENTUM, RATE, Model


def tensors(results: Any) -> list[Any]:
    """All tensors of a result, in order."""
    if results is None:
        return []
    return [results] if torch.is_tensor(results) else [each for part in results for each in tensors(part)]


def run(layer: Layer) -> dict[str, Any]:
    """Parameters' names, outputs, and the gradients of the first output, weighed, by input and parameter."""
    module = getattr(torch.nn, layer.kind)(**layer.settings).eval()
    state = {name: torch.tensor(layer.weight(name, tuple(each.shape))) for name, each in module.state_dict().items()}
    module.load_state_dict(state)
    feeds = {name: torch.tensor(array) for name, array in layer.feeds().items()}
    real = {name: each.requires_grad_() for name, each in feeds.items() if each.is_floating_point()}
    positional = [feeds[f"x{i}"] for i in range(len(layer.inputs))]
    results = tensors(module(*positional, **{name: feeds[name] for name in layer.named}))
    weights = torch.tensor(layer.weight("weigh", tuple(results[0].shape)))
    (results[0] * weights).sum().backward()
    found: dict[str, Any] = {f"output {i}": each.detach().numpy() for i, each in enumerate(results)}
    found["names"] = np.array(list(state))
    found |= {f"gradient {name}": each.grad.numpy() for name, each in real.items()}
    found |= {f"gradient layer.{name}": each.grad.numpy() for name, each in module.named_parameters()}
    return found


def train(model: Model) -> dict[str, Any]:
    """The loss before each update, and the parameters after all of them."""
    module = model.make(torch.nn).train()
    state = {name: torch.tensor(model.weight(name, tuple(each.shape))) for name, each in module.state_dict().items()}
    module.load_state_dict(state)
    optimizer = torch.optim.SGD(module.parameters(), RATE, MOMENTUM)
    losses = []
    for x, target in model.batches():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(target))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = {name: each.detach().numpy() for name, each in module.named_parameters()}
    return {"loss": np.array(losses), **parameters}


def main() -> None:
    folder = Path(__file__).parent
    layers = {f"{layer.name}/{key}": array for layer in LAYERS for key, array in run(layer).items()}
    np.savez_compressed(folder / "torch_layers.npz", **layers)
    models = {f"{model.make.__name__}/{key}": array for model in MODELS for key, array in train(model).items()}
    np.savez_compressed(folder / "torch_models.npz", **models)


if __name__ == "__main__":
    main()
