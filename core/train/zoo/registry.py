"""The table of architectures, and how their graphs are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field

from lathe import nn
from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType, symbol
from lathe.core.train.zoo.convnet import ConvNet
from lathe.core.train.zoo.decoder import Decoder
from lathe.core.train.zoo.lenet import LeNet5
from lathe.core.train.zoo.mlp import MLP
from lathe.core.train.zoo.resnet import ResNetSmall
from lathe.core.train.zoo.settings import Row, Settings
from lathe.core.train.zoo.transformer import TransformerEncoder

ARCHITECTURES: dict[str, type[Settings]] = {
    "lenet5": LeNet5,
    "mlp": MLP,
    "resnet-small": ResNetSmall,
    "transformer-encoder": TransformerEncoder,
    "decoder": Decoder,
    "convnet": ConvNet,
}

# The type of a field of a recipe, discriminated by `architecture`.
Architecture: TypeAlias = Annotated[
    LeNet5 | MLP | ResNetSmall | TransformerEncoder | Decoder | ConvNet, Field(discriminator="architecture")
]


def architecture(
    settings: Settings, inputs: Mapping[str, Row], outputs: int, *, output: str = "logits", seed: int = 0
) -> Graph:
    """A model with initial weights drawn with `seed`: one input [batch, row...], one output float32[batch, outputs].

    ModelError for several inputs, or for rows that the architecture cannot take.
    """
    if len(inputs) != 1:
        name = type(settings).__name__
        raise ModelError(f"expected one input, the data have {len(inputs)}: {', '.join(inputs)}", where=name)
    ((_, row),) = inputs.items()
    with nn.seeded(seed):
        module = settings.module(row, outputs)
    batch = symbol("batch")
    types = {name: TensorType(each.dtype, (batch, *each.shape)) for name, each in inputs.items()}
    return nn.trace(module, types, [output], name=settings.architecture)
