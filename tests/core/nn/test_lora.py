"""LoRA: adapters of linear layers."""

from __future__ import annotations

import numpy as np
import pytest

from lathe import nn
from lathe.core.errors import ModelError


class Block(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.second(self.first(x))


def test_new_adapters_change_nothing_and_merged_ones_compute_the_same() -> None:
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    with nn.seeded(1):
        block = nn.Sequential(Block())
        plain = block(x).numpy()
        assert nn.add_lora(block, 2, 8.0, ["second"]) == ["0.second"]
    np.testing.assert_array_equal(block(x).numpy(), plain)
    state = block.state_dict()
    factor = np.random.default_rng(1).standard_normal((4, 2)).astype(np.float32)
    block.load_state_dict({**state, "0.second.lora_b": factor})
    hidden = x @ state["0.first.weight"].T + state["0.first.bias"]
    expected = hidden @ (state["0.second.weight"] + 8.0 / 2 * factor @ state["0.second.lora_a"]).T
    np.testing.assert_allclose(block(x).numpy(), expected, atol=1e-5)
    nn.merge_lora(block)
    np.testing.assert_allclose(block(x).numpy(), expected, atol=1e-5)
    assert set(block.state_dict()) == {"0.first.weight", "0.first.bias", "0.second.weight"}


def test_patterns_and_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'third' matches none of the linear layers first, second"):
        nn.add_lora(Block(), 2, 4.0, ["third"])
    with pytest.raises(ValueError, match="rank: expected 1 to 5"):
        nn.add_lora(Block(), 6, 4.0)
