"""Lathe: a compiler for ONNX models, and a server for the compiled models.

    import lathe
    session = lathe.compile("model.onnx")
    outputs = session.run({"x": array})

`load` parses a model, `load_language_model` reads a decoder from a Hugging Face folder or a GGUF file,
`load_encoder_decoder` reads T5 or Whisper from a folder, `compile` returns a `Session`, `load_compiled` loads a
compiled file, `interpret` runs a graph with the NumPy references, `export` returns the bytes of an ONNX file,
`quantize` and `quantize_dynamic` convert products to int8, `quantize_weights` stores weights in few bits,
`prune_channels` and `prune_weights` prune, `compress` does each of these by a recipe, `gradients` differentiates a
graph, `register_op` adds a custom operator. `Coo`, `Csr` and `Ragged` are sparse and ragged tensors. `lathe.nn` has
layers, `lathe.train` trains them, `lathe.client` calls a server.

Each name is imported at its first use: `import lathe.client` does not import the compiler.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_FOLDER, "core")):
    # In a checkout core/ and server/ are next to this folder. An installed package has them inside it (setup.py).
    __path__.append(os.path.dirname(_FOLDER))

if TYPE_CHECKING:
    from lathe import client, nn, train
    from lathe.core import errors
    from lathe.core.autodiff import gradients
    from lathe.core.compiler.compile import compile, load_compiled
    from lathe.core.compiler.custom_operators import register_op
    from lathe.core.compress.prune import prune_channels, prune_weights
    from lathe.core.compress.quantize import quantize, quantize_dynamic, quantize_weights
    from lathe.core.compress.recipe import compress
    from lathe.core.frontends.export import export
    from lathe.core.frontends.onnx import load
    from lathe.core.ir.graph import Graph
    from lathe.core.language.encoder_decoder import EncoderDecoderModel, load_encoder_decoder
    from lathe.core.language.language_model import LanguageModel, load_language_model
    from lathe.core.nn.sparse import Coo, Csr, Ragged
    from lathe.core.passes.proofs.batch_info import BatchInfo
    from lathe.core.reference import interpret
    from lathe.core.runtime.session.profile import Profile
    from lathe.core.runtime.session.session import Session

__all__ = [
    "BatchInfo", "Coo", "Csr", "EncoderDecoderModel", "Graph", "LanguageModel", "Profile", "Ragged", "Session",
    "client", "compile", "compress", "errors", "export", "gradients", "interpret", "load", "load_compiled",
    "load_encoder_decoder", "load_language_model", "nn", "prune_channels", "prune_weights", "quantize",
    "quantize_dynamic", "quantize_weights", "register_op", "train",
]  # fmt: skip

_MODULES = {"client": "lathe.client", "errors": "lathe.core.errors", "nn": "lathe.nn", "train": "lathe.train"}

_DEFINING_MODULES = {
    "compile": "lathe.core.compiler.compile",
    "load_compiled": "lathe.core.compiler.compile",
    "compress": "lathe.core.compress.recipe",
    "export": "lathe.core.frontends.export",
    "gradients": "lathe.core.autodiff",
    "load": "lathe.core.frontends.onnx",
    "load_encoder_decoder": "lathe.core.language.encoder_decoder",
    "load_language_model": "lathe.core.language.language_model",
    "interpret": "lathe.core.reference",
    "prune_channels": "lathe.core.compress.prune",
    "prune_weights": "lathe.core.compress.prune",
    "quantize": "lathe.core.compress.quantize",
    "quantize_dynamic": "lathe.core.compress.quantize",
    "quantize_weights": "lathe.core.compress.quantize",
    "register_op": "lathe.core.compiler.custom_operators",
    "Coo": "lathe.core.nn.sparse",
    "Csr": "lathe.core.nn.sparse",
    "Ragged": "lathe.core.nn.sparse",
    "Graph": "lathe.core.ir.graph",
    "EncoderDecoderModel": "lathe.core.language.encoder_decoder",
    "LanguageModel": "lathe.core.language.language_model",
    "Profile": "lathe.core.runtime.session.profile",
    "Session": "lathe.core.runtime.session.session",
    "BatchInfo": "lathe.core.passes.proofs.batch_info",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _DEFINING_MODULES:
        raise AttributeError(f"module 'lathe' has no attribute '{name}'")
    importlib.import_module("lathe.core.ops")  # registers the operators and their type inference
    return getattr(importlib.import_module(_DEFINING_MODULES[name]), name)
