"""Operators of the domain `com.microsoft` that exporters and optimizers write, in terms of ONNX's own; and Gradient."""

from core.frontends.contrib import attention, group_query, layers, quantized, recurrent, tables, training
from core.frontends.contrib.table import find_lowering, lowered

__all__ = [
    "attention",
    "find_lowering",
    "group_query",
    "layers",
    "lowered",
    "quantized",
    "recurrent",
    "tables",
    "training",
]
