"""Operators of the domain `com.microsoft` that exporters and optimizers write, in terms of ONNX's own; and Gradient."""

from core.frontends.contrib import (
    attention,
    experts,
    gates,
    group_query,
    layers,
    legacy,
    quantized,
    recurrent,
    rotary,
    same,
    tables,
    training,
)
from core.frontends.contrib.renamed import as_standard, renamed
from core.frontends.contrib.table import DOMAIN, find_lowering, lowered

__all__ = [
    "DOMAIN",
    "as_standard",
    "attention",
    "experts",
    "find_lowering",
    "gates",
    "group_query",
    "layers",
    "legacy",
    "lowered",
    "quantized",
    "recurrent",
    "renamed",
    "rotary",
    "same",
    "tables",
    "training",
]
