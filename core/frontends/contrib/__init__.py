"""Operators of the domain `com.microsoft` that exporters and optimizers write, in terms of ONNX's own; and Gradient."""

from core.frontends.contrib import attention, layers, quantized, recurrent, training
from core.frontends.contrib.table import find_lowering, lowered

__all__ = ["attention", "find_lowering", "layers", "lowered", "quantized", "recurrent", "training"]
