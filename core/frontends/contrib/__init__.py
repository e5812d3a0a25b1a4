"""Operators of the domain `com.microsoft` that exporters and optimizers write, in terms of ONNX's own; and Gradient."""

from core.frontends.contrib import attention, layers, quantized, training
from core.frontends.contrib.table import find_lowering

__all__ = ["attention", "find_lowering", "layers", "quantized", "training"]
