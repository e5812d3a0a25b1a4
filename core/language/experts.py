"""Mixtures of experts (Shazeer et al., 2017; Jiang et al., 2024: Mixtral): each token has a few networks."""

from __future__ import annotations

from collections.abc import Callable

from lathe.core.language.settings import Experts
from lathe.core.nn import functional as F
from lathe.core.nn import init
from lathe.core.nn.linear import Linear
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor, tensor

Activation = Callable[[Tensor], Tensor]


class Router(Module):
    """Scores of the experts for each token: [..., width] -> the shares and numbers of its experts, [..., chosen].

    Shares are the largest of the softmax over all experts; with `normalized` settings they are divided by their sum.
    """

    def __init__(self, width: int, settings: Experts) -> None:
        self.settings = settings
        self.weight = init.new_weight(settings.count, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).softmax(-1)
        shares, chosen = scores.ops("TopK", tensor([self.settings.chosen]), outputs=2, axis=-1)
        return (shares / shares.sum(-1, keepdim=True) if self.settings.normalized else shares), chosen


class ExpertNetworks(Module):
    """The gated feed-forward networks of all experts, of which each token reads its own.

    Tokens [..., width] and the numbers of their experts [..., chosen] -> [..., chosen, width]. The rows of
    `gate_up_proj` [experts, 2 * hidden, width] are those of the activated projection, then those of the other one.
    """

    def __init__(self, width: int, settings: Experts, activation: Activation) -> None:
        self.activation = activation
        self.gate_up_proj = init.new_weight(settings.count, 2 * settings.width, width)
        self.down_proj = init.new_weight(settings.count, width, settings.width)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        gate, up = x.unsqueeze(-2).op("ExpertProduct", chosen, self.gate_up_proj).chunk(2, -1)
        return (self.activation(gate) * up).op("ExpertProduct", chosen, self.down_proj)


class MixtureOfExperts(Module):
    """The sum of a token's experts times their shares, [..., width] -> same.

    `shared` is a network for all tokens; the sigmoid of a projection to one number is its share.
    """

    def __init__(self, width: int, settings: Experts, activation: Activation, shared: Module | None) -> None:
        self.gate = Router(width, settings)
        self.experts = ExpertNetworks(width, settings, activation)
        self.shared_expert = shared
        self.shared_expert_gate = None if shared is None else Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x)
        found = (self.experts(x, chosen) * shares.unsqueeze(-1)).sum(-2)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return found
        shared: Tensor = self.shared_expert(x)
        return found + self.shared_expert_gate(x).sigmoid() * shared
