"""Sets random weights of such sizes that outputs depend on inputs.

With the initial weights of training libraries many outputs are nearly constant: after some layers every value is as
small as rounding, layer scales begin at 1e-5, attention is uniform. Two engines agree on such outputs whatever they
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

_LEAST, _SPREAD = 1e-2, 1e-3  # minima of an output's largest element, and of its deviation relative to that


def make_lively(model: nn.Module, example: Sequence[Tensor]) -> None:
    """Set weights that keep the sizes of values, and let batch normalization measure them on the example."""
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            _set(weight.data)
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # statistics are the mean over all batches
        norm.train()
    with torch.no_grad():
        model(*example)
    for norm in norms:
        norm.eval()


def _set(weight: Tensor) -> None:
    """Set weights of products with a deviation by their fan-in, and vectors of equal elements to random ones."""
    if weight.dim() >= 2:
        gain = 2.0 if weight.dim() > 2 else 1.0  # convolutions are followed by activations that halve the variance
        weight.normal_(std=(gain / max(prod(weight.shape[1:]), 1)) ** 0.5)
    elif weight.dim() == 1 and torch.equal(weight, weight[:1].expand_as(weight)):
        if weight[0] == 0:
            weight.normal_(std=0.1)
        else:
            weight.uniform_(0.5, 1.5)


def is_nearly_constant(outputs: Sequence[Tensor]) -> bool:
    """True if an output of several numbers is nearly zero or nearly constant."""
    numbers = [each for each in outputs if each.is_floating_point() and each.numel() > 1]
    return any(each.abs().max() < _LEAST or each.std() < _SPREAD * each.abs().max() for each in numbers)
