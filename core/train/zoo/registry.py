"""Which architectures there are, and their way to a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field

from core import nn
from core.errors import ModelError
from core.ir.graph import Graph
from core.ir.types import TensorType, symbol
from core.train.zoo.lenet import LeNet5
from core.train.zoo.mlp import MLP
from core.train.zoo.resnet import ResNetSmall
from core.train.zoo.settings import Row, Settings
from core.train.zoo.transformer import TransformerEncoder

ARCHITECTURES: dict[str, type[Settings]] = {
    "lenet5": LeNet5,
    "mlp": MLP,
    "resnet-small": ResNetSmall,
    "transformer-encoder": TransformerEncoder,
}

# As a field of a recipe: `architecture` says which settings there are.
Architecture: TypeAlias = Annotated[
    LeNet5 | MLP | ResNetSmall | TransformerEncoder, Field(discriminator="architecture")
]


def architecture(
    settings: Settings, inputs: Mapping[str, Row], outputs: int, *, output: str = "logits", seed: int = 0
) -> Graph:
    """A model with fresh weights, decided by `seed`: inputs [batch, row...] under their names, one output
    float32[batch, outputs]. ModelError for rows that the architecture cannot take."""
    if len(inputs) != 1:
        name = type(settings).__name__
        raise ModelError(f"takes one input, the data have {len(inputs)}: {', '.join(inputs)}", where=name)
    ((_, row),) = inputs.items()
    with nn.seeded(seed):
        module = settings.module(row, outputs)
    batch = symbol("batch")
    types = {name: TensorType(each.dtype, (batch, *each.shape)) for name, each in inputs.items()}
    return nn.trace(module, types, [output], name=settings.architecture)
