"""The layers compared with PyTorch's: settings, inputs and weights, the same for both.

`make_torch.py` runs this table through PyTorch and writes the results to torch_layers.npz.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layer:
    """A layer and its inputs: "2,3" are real numbers of that shape, "i5:2,3" integers below 5, "b:2,3" booleans."""

    kind: str
    settings: dict[str, Any]
    inputs: tuple[str, ...]
    named: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(
            [self.kind, *(f"{k}={v}" for k, v in self.settings.items()), *(f"{k}={v}" for k, v in self.specs().items())]
        )

    def feeds(self) -> dict[str, Any]:
        """Inputs by name: those without one are x0, x1..."""
        return {label: _drawn(spec, f"{self.name}/{label}") for label, spec in self.specs().items()}

    def specs(self) -> dict[str, str]:
        return {**{f"x{i}": spec for i, spec in enumerate(self.inputs)}, **self.named}

    def weight(self, name: str, shape: tuple[int, ...]) -> Any:
        """Random numbers for the parameter or buffer of this name; running variances are at least 0.5."""
        if name.endswith("num_batches_tracked"):
            return np.zeros(shape, np.int64)
        array = _rng(f"{self.name}/{name}").normal(0, 0.5, shape).astype(np.float32)
        return np.abs(array) + np.float32(0.5) if name.endswith("running_var") else array


def _rng(label: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(label.encode()))


def _drawn(spec: str, label: str) -> Any:
    kind, _, shape = spec.rpartition(":")
    sizes = tuple(map(int, shape.split(",")))
    if kind == "b":
        marked = _rng(label).random(sizes) < 0.4
        marked[..., 0] = False  # every query has a key
        return marked
    if kind:
        return _rng(label).integers(0, int(kind[1:]), sizes)
    return _rng(label).normal(0, 1, sizes).astype(np.float32)


ENCODER = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0}

LAYERS = [
    Layer("Linear", {"in_features": 4, "out_features": 3}, ("2,4",)),
    Layer("Linear", {"in_features": 4, "out_features": 3, "bias": False}, ("2,3,4",)),
    Layer("Conv1d", {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 1}, ("2,2,7",)),
    Layer("Conv2d", {"in_channels": 2, "out_channels": 3, "kernel_size": (3, 2), "stride": (2, 1)}, ("2,2,7,6",)),
    Layer("Conv2d", {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2, "padding": (1, 2)},
          ("1,4,5,4",)),
    Layer("Conv2d", {"in_channels": 1, "out_channels": 2, "kernel_size": 3, "dilation": 2, "bias": False},
          ("2,1,7,7",)),
    Layer("Conv2d", {"in_channels": 1, "out_channels": 2, "kernel_size": (4, 3), "padding": "same"}, ("2,1,5,5",)),
    Layer("ConvTranspose2d", {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "stride": 2, "padding": 1,
                              "output_padding": 1}, ("2,2,4,3",)),
    Layer("ConvTranspose2d", {"in_channels": 4, "out_channels": 4, "kernel_size": 2, "groups": 2}, ("1,4,3,3",)),
    Layer("MaxPool2d", {"kernel_size": 2}, ("2,3,6,5",)),
    Layer("MaxPool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, ("1,2,6,6",)),
    Layer("AvgPool2d", {"kernel_size": 3, "stride": 2, "padding": 1}, ("1,2,7,7",)),
    Layer("AvgPool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}, ("1,2,7,7",)),
    Layer("AdaptiveAvgPool2d", {"output_size": 1}, ("2,3,5,4",)),
    Layer("AdaptiveAvgPool2d", {"output_size": (2, 3)}, ("2,3,4,6",)),
    Layer("AdaptiveAvgPool2d", {"output_size": (3, 2)}, ("2,3,5,7",)),
    Layer("BatchNorm1d", {"num_features": 3}, ("4,3",)),
    Layer("BatchNorm1d", {"num_features": 3, "affine": False}, ("4,3,2",)),
    Layer("BatchNorm2d", {"num_features": 3, "eps": 1e-3}, ("2,3,2,2",)),
    Layer("LayerNorm", {"normalized_shape": 5}, ("2,3,5",)),
    Layer("LayerNorm", {"normalized_shape": (3, 5), "bias": False}, ("2,3,5",)),
    Layer("LayerNorm", {"normalized_shape": 5, "elementwise_affine": False}, ("2,5",)),
    Layer("RMSNorm", {"normalized_shape": 5}, ("2,3,5",)),
    Layer("GroupNorm", {"num_groups": 2, "num_channels": 4}, ("2,4,3,2",)),
    Layer("Embedding", {"num_embeddings": 7, "embedding_dim": 3}, ("i7:2,4",)),
    Layer("Embedding", {"num_embeddings": 5, "embedding_dim": 3, "padding_idx": 0}, ("i5:3,4",)),
    Layer("MultiheadAttention", {"embed_dim": 6, "num_heads": 2}, ("4,2,6", "5,2,6", "5,2,6")),
    Layer("MultiheadAttention", {"embed_dim": 6, "num_heads": 3, "batch_first": True, "bias": False},
          ("2,4,6", "2,5,6", "2,5,6"), {"key_padding_mask": "b:2,5"}),
    Layer("MultiheadAttention", {"embed_dim": 6, "num_heads": 2}, ("4,2,6", "5,2,6", "5,2,6"), {"attn_mask": "4,5"}),
    Layer("MultiheadAttention", {"embed_dim": 6, "num_heads": 2}, ("4,2,6", "5,2,6", "5,2,6"),
          {"attn_mask": "b:4,4,5"}),
    Layer("TransformerEncoderLayer", ENCODER, ("4,2,8",)),
    Layer("TransformerEncoderLayer", {**ENCODER, "batch_first": True, "norm_first": True, "activation": "gelu"},
          ("2,4,8",), {"src_key_padding_mask": "b:2,4"}),
    Layer("GRU", {"input_size": 4, "hidden_size": 3}, ("5,2,4",)),
    Layer("GRU", {"input_size": 4, "hidden_size": 3, "num_layers": 2, "bidirectional": True}, ("5,2,4", "4,2,3")),
    Layer("GRU", {"input_size": 4, "hidden_size": 3, "bias": False, "batch_first": True}, ("2,5,4",)),
    Layer("LSTM", {"input_size": 4, "hidden_size": 3}, ("5,2,4",)),
    Layer("LSTM", {"input_size": 4, "hidden_size": 3, "num_layers": 2, "bidirectional": True, "batch_first": True},
          ("2,5,4",)),
    Layer("MaxPool1d", {"kernel_size": 3, "stride": 2, "padding": 1}, ("2,2,9",)),
    Layer("AvgPool1d", {"kernel_size": 2}, ("2,2,7",)),
    Layer("InstanceNorm2d", {"num_features": 3}, ("2,3,4,5",)),
    Layer("InstanceNorm2d", {"num_features": 3, "affine": True, "eps": 1e-3}, ("2,3,4,5",)),
    Layer("ZeroPad2d", {"padding": (1, 0, 2, 3)}, ("2,3,2,3",)),
    Layer("Upsample", {"scale_factor": 2}, ("2,3,3,2",)),
    Layer("Upsample", {"size": (5, 7)}, ("1,2,3,4",)),
    Layer("Upsample", {"scale_factor": 2.0, "mode": "bilinear"}, ("2,3,3,4",)),
    Layer("Upsample", {"size": 7, "mode": "bilinear", "align_corners": True}, ("1,2,3,4",)),
    Layer("PReLU", {}, ("2,3,4",)),
    Layer("PReLU", {"num_parameters": 3, "init": 0.1}, ("2,3,4",)),
    Layer("Unflatten", {"dim": 1, "unflattened_size": (2, -1)}, ("3,6,2",)),
    Layer("Flatten", {}, ("2,3,4",)),
    Layer("Flatten", {"start_dim": 0, "end_dim": 1}, ("2,3,4",)),
    *(Layer(kind, {}, ("3,4",)) for kind in (
        "ReLU", "ReLU6", "Tanh", "Sigmoid", "Softplus", "Softsign", "Mish", "Hardswish", "Hardsigmoid", "SELU", "SiLU",
        "GELU", "LeakyReLU", "ELU", "Identity",
    )),
    Layer("GELU", {"approximate": "tanh"}, ("3,4",)),
    Layer("Softmax", {"dim": 1}, ("3,4",)),
    Layer("LogSoftmax", {"dim": -1}, ("3,4",)),
]  # fmt: skip
