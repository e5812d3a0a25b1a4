"""Models in Python: modules with PyTorch's names and arguments, run eagerly or traced to a graph.

model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
model(array).numpy()                                     # eager: intermediate tensors can be inspected
graph = nn.trace(model, {"x": "float32[n,4]"})           # the same code as a graph: to compile, to train, to export
"""

from lathe.core.nn import functional, init
from lathe.core.nn.activation import (
    ACTIVATIONS,
    ELU,
    GELU,
    SELU,
    Hardsigmoid,
    Hardswish,
    LeakyReLU,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
    Tanh,
)
from lathe.core.nn.annotations import after, device
from lathe.core.nn.attention import MultiheadAttention, TransformerEncoder, TransformerEncoderLayer
from lathe.core.nn.control import cond, while_loop
from lathe.core.nn.conv import Conv1d, Conv2d, ConvTranspose2d
from lathe.core.nn.init import manual_seed, seeded
from lathe.core.nn.linear import Dropout, Embedding, Flatten, Identity, Linear, Unflatten
from lathe.core.nn.lora import LoRALinear, add_lora, merge_lora
from lathe.core.nn.module import Module, ModuleDict, ModuleList, Sequential, recorded
from lathe.core.nn.norm import BatchNorm1d, BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm, RMSNorm
from lathe.core.nn.parameter import Buffer, Parameter
from lathe.core.nn.pool import AdaptiveAvgPool2d, AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d, Upsample, ZeroPad2d
from lathe.core.nn.recurrent import GRU, LSTM
from lathe.core.nn.tensor import Tensor, cat, stack, tensor, where
from lathe.core.nn.trace import trace

__all__ = [
    "ACTIVATIONS",
    "ELU",
    "GELU",
    "GRU",
    "LSTM",
    "SELU",
    "AdaptiveAvgPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Buffer",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "Identity",
    "InstanceNorm2d",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LoRALinear",
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "Mish",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiheadAttention",
    "PReLU",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Softsign",
    "Tanh",
    "Tensor",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "Unflatten",
    "Upsample",
    "ZeroPad2d",
    "add_lora",
    "after",
    "cat",
    "cond",
    "device",
    "functional",
    "init",
    "manual_seed",
    "merge_lora",
    "recorded",
    "seeded",
    "stack",
    "tensor",
    "trace",
    "where",
    "while_loop",
]  # fmt: skip
