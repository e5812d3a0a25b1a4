"""Low-rank adaptation of linear layers (Hu et al., 2021: LoRA)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np

from lathe.core.errors import ModelError
from lathe.core.nn import functional as F
from lathe.core.nn import init
from lathe.core.nn.linear import Linear
from lathe.core.nn.module import Module
from lathe.core.nn.parameter import Parameter
from lathe.core.nn.tensor import Tensor


class LoRALinear(Module):
    """x (A + alpha / rank * U V)^T + b: a linear layer and a product of low rank, U `lora_b` [out, rank], V `lora_a`.

    It shares `weight` A and `bias` b with the layer that it replaces, so their paths stay. `lora_b` begins with zeros:
    a new adapter changes nothing.
    """

    def __init__(self, base: Linear, rank: int, alpha: float) -> None:
        if not 1 <= rank <= min(base.in_features, base.out_features):
            most = min(base.in_features, base.out_features)
            raise ValueError(f"rank: expected 1 to {most} for a layer {base.extra_repr()}, got {rank}")
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.scale = rank, alpha / rank
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = init.new_weight(rank, base.in_features)
        self.lora_b = Parameter(np.zeros((base.out_features, rank), np.float32))

    def forward(self, x: Tensor) -> Tensor:
        added = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + added * self.scale

    def merged(self) -> Linear:
        """A linear layer with the sum of both weights, which it does not share with this layer."""
        with init.skipped():
            layer = Linear(self.in_features, self.out_features, bias=False)
        added = self.lora_b.data.astype(np.float64) @ self.lora_a.data.astype(np.float64)
        layer.weight = Parameter((self.weight.data + self.scale * added).astype(self.weight.data.dtype))
        layer.bias = self.bias
        return layer

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, rank={self.rank}, scale={self.scale}"


def add_lora(module: Module, rank: int, alpha: float, layers: Sequence[str] = ("*",)) -> list[str]:
    """Replace the `Linear` layers of `module` whose path matches a pattern by `LoRALinear`; returns their paths.

    A pattern (`*`, `?`) matches a whole path, or its last name: `q_proj`. Train the parameters `*.lora_a` and
    `*.lora_b` alone. ModelError for a pattern that matches no layer; ValueError for a rank that is no rank of a layer.
    """
    places = [place for place in _places(module) if type(place[3]) is Linear]
    for pattern in layers:
        if not any(_matches(path, pattern) for path, *_ in places):
            names = sorted({path.rpartition(".")[2] for path, *_ in places})
            raise ModelError(f"{pattern!r} matches none of the linear layers {', '.join(names[:20])}", where="lora")
    chosen = [place for place in places if any(_matches(place[0], pattern) for pattern in layers)]
    for _, parent, name, layer in chosen:
        assert isinstance(layer, Linear)
        setattr(parent, name, LoRALinear(layer, rank, alpha))
    return [path for path, *_ in chosen]


def merge_lora(module: Module) -> None:
    """Replace each `LoRALinear` of `module` by a `Linear` with the merged weights."""
    for _, parent, name, layer in _places(module):
        if isinstance(layer, LoRALinear):
            setattr(parent, name, layer.merged())


def _places(module: Module) -> list[tuple[str, Module, str, Module]]:
    """Each module inside: its path, the module that holds it, its name there, and itself."""
    found = []
    for path, parent in module.named_modules():
        found += [(f"{path}.{name}" if path else name, parent, name, child) for name, child in parent.named_children()]
    return found


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path.rpartition(".")[2], pattern)
