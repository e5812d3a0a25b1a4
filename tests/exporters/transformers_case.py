"""A model of Transformers or torchvision to export: how it is built, its inputs, and the sizes to run it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Sizes = tuple[int, int]  # batch size, length of sequences
Axes = Mapping[int, str]  # the free axes of an input, with the names that `torchscript` gives them

BATCH_AND_LENGTH: Axes = {0: "batch", 1: "length"}


@dataclass
class Case:
    """A model to export.

    `inputs` makes its inputs for a batch size and a length. Outputs are compared for `sizes`; the first runs of
    `lengths` are timed."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    axes: Mapping[str, Axes]
    sizes: Sequence[Sizes] = ((1, 7), (3, 12), (8, 16))
    lengths: Sequence[Sizes] = ((1, 9), (1, 14), (1, 23), (8, 11))
    forward: Callable[..., Any] | None = None  # default: the model itself
    example: Sizes = (2, 9)
    exporters: Sequence[str] = ("dynamo", "torchscript")


CASES: dict[str, Case] = {}


def text(batch: int, length: int, names: tuple[str, str] = ("input_ids", "attention_mask")) -> dict[str, Tensor]:
    """Token ids, and a mask that shortens every row but the first by its own number of tokens."""
    ids = torch.randint(3, 90, (batch, length))
    lengths = torch.tensor([max(1, length - row % length) for row in range(batch)])
    return {names[0]: ids, names[1]: (torch.arange(length)[None] < lengths[:, None]).to(torch.int64)}


def images(size: int, name: str = "pixel_values") -> Callable[[int, int], dict[str, Tensor]]:
    return lambda batch, length: {name: torch.randn(batch, 3, size, size)}


def built(model: Any, config: Any, sizes: Mapping[str, Any]) -> nn.Module:
    """A model with these sizes in its configuration."""
    made: nn.Module = model(config(**sizes))
    return made


def add_text(name: str, config: Any, model: Any, forward: Callable[..., Any] | None = None, **sizes: Any) -> None:
    """Add a model that reads token ids and a mask."""
    axes = {"input_ids": BATCH_AND_LENGTH, "attention_mask": BATCH_AND_LENGTH}
    CASES[name] = Case(partial(built, model, config, {**SMALL, **sizes}), text, axes, forward=forward)


def add_images(name: str, build: Callable[[], nn.Module], size: int = 32, input_name: str = "pixel_values") -> None:
    """Add a model that reads images of a fixed size."""
    axes = {input_name: {0: "batch"}}
    CASES[name] = Case(build, images(size, input_name), axes, sizes=((1, 0), (3, 0), (8, 0)), lengths=())


def add_image_sizes(name: str, build: Callable[[], nn.Module], forward: Callable[..., Any] | None = None) -> None:
    """Add a model that reads images of any size: the "length" is the height, and the width is 1.5 times the height."""
    CASES[name] = Case(
        build,
        lambda batch, height: {"pixel_values": torch.randn(batch, 3, height, height * 3 // 2)},
        {"pixel_values": {0: "batch", 2: "height", 3: "width"}},
        sizes=((1, 64), (3, 96), (8, 64)),
        lengths=((1, 128), (1, 192), (8, 96)),
        forward=forward,
        example=(2, 160),
    )


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
