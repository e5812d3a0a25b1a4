"""Lowerings of ONNX Runtime's contributed operators (domain `com.microsoft`) to ONNX operators.

Also of Gradient, and of experimental operators that ONNX has removed.
"""

from lathe.core.frontends.contrib import (
    attention,
    block_quantized,
    experts,
    gates,
    group_query,
    layers,
    legacy,
    quantized,
    recurrent,
    rotary,
    training,
    variants,
)
from lathe.core.frontends.contrib.adopted import adopted_operators, as_standard
from lathe.core.frontends.contrib.lowering_table import DOMAIN, emit_output, find_lowering, lowered_operators

__all__ = [
    "DOMAIN",
    "adopted_operators",
    "as_standard",
    "attention",
    "block_quantized",
    "emit_output",
    "experts",
    "find_lowering",
    "gates",
    "group_query",
    "layers",
    "legacy",
    "lowered_operators",
    "quantized",
    "recurrent",
    "rotary",
    "training",
    "variants",
]
