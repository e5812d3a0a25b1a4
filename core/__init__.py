"""Lathe's runtime: ONNX graphs in, native code out.

    import core
    session = core.compile("model.onnx")
    outputs = session.run({"x": array})

`load` parses, `export` writes ONNX, `interpret` runs the reference executor, `compile` gives a `Session`,
`load_compiled` loads an artifact, `register_op` adds an operator of your own. `nn` has layers, `train` trains them.
Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from core import errors

if TYPE_CHECKING:
    from core import nn, train
    from core.autodiff import gradients
    from core.compiler import compile, load_compiled
    from core.custom import register_op
    from core.frontends.export import export
    from core.frontends.onnx import load
    from core.ir.graph import Graph
    from core.reference import interpret
    from core.runtime.profile import Profile
    from core.runtime.session import BatchInfo, Session

__all__ = [
    "BatchInfo", "Graph", "Profile", "Session", "compile", "errors", "export", "gradients", "interpret", "load",
    "load_compiled", "nn", "register_op", "train",
]  # fmt: skip

_PACKAGES = ("nn", "onnx_backend", "train")

_HOMES = {
    "compile": "core.compiler",
    "load_compiled": "core.compiler",
    "export": "core.frontends.export",
    "gradients": "core.autodiff",
    "load": "core.frontends.onnx",
    "interpret": "core.reference",
    "register_op": "core.custom",
    "Graph": "core.ir.graph",
    "Profile": "core.runtime.profile",
    "Session": "core.runtime.session",
    "BatchInfo": "core.runtime.session",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"core.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'core' has no attribute '{name}'")
    import core.ops  # noqa: F401  (registers the operators and their inference)

    return getattr(importlib.import_module(_HOMES[name]), name)
