"""Operators of your own, and what their definitions need. docs/custom-operators.md has complete examples.

@register_op("com.example")
class SquarePlus(Elementwise):
    attrs = {"b": 4.0}

    def reference(self, c, x):
        return (x + np.sqrt(x * x + c.attr("b"))) / 2

    def scalar(self, e, c, x):
        return e.mul(e.add(x, e.sqrt(e.fma(x, x, c.attr("b")))), 0.5)
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import textwrap
from collections.abc import Callable
from typing import TypeVar

from core.codegen.lang import Kernel
from core.errors import UnsupportedError
from core.ir.types import DType, OptionalType, SequenceType, TensorType
from core.kernels.catalog import custom
from core.kernels.catalog.custom import CustomSpec
from core.ops import registry
from core.ops.backward import Backward, Rewrite
from core.ops.elementwise import Elementwise
from core.ops.registry import Call, Infer, Mixes, NodeView, OpDef, Required
from core.ops.scalar import ScalarOps
from core.runtime.child_python import OPERATORS

__all__ = [
    "Backward", "Call", "CustomSpec", "DType", "Elementwise", "Infer", "Kernel", "Mixes", "NodeView", "OpDef",
    "OptionalType", "Required", "Rewrite", "ScalarOps", "SequenceType", "TensorType", "load_operators", "register_op",
]  # fmt: skip

MODULES = OPERATORS  # environment: what child processes are to import
_TAKEN = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft", "lathe")
_OpClass = TypeVar("_OpClass", bound=type[OpDef])


def register_op(domain: str, *, revision: str = "") -> Callable[[_OpClass], _OpClass]:
    """Class decorator: models may now use the operator, under the class's name (or its `name`) in ONNX domain `domain`.

    The class inherits from `OpDef` (or `Elementwise`) and says at least `infer` and `reference`. Compiled code is kept
    for as long as the source of the class stays the same; where it calls functions of yours, change `revision` with
    them. ValueError for a domain that is not yours, or a name that another operator has; TypeError for a class that
    lacks something.
    """
    if domain in _TAKEN:
        raise ValueError(f"domain '{domain}' is not for custom operators, expected one of your own like 'com.example'")

    def add(cls: _OpClass) -> _OpClass:
        _check(cls)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        cls.domain = domain
        registry.extend(cls, _digest(cls, revision))
        custom.cover(registry.get(cls.name))
        return cls

    return add


def load_operators(modules: str) -> None:
    """Import modules that register operators, named with commas between: here, and in every child process from now on.

    UnsupportedError for one that cannot be imported.
    """
    before = set(registry.names())
    for name in filter(None, map(str.strip, modules.split(","))):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UnsupportedError(f"operators of module '{name}': {type(error).__name__}: {error}") from error
    registry.found_everywhere(set(registry.names()) - before)
    os.environ[MODULES] = modules


def _check(cls: type[OpDef]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, OpDef)):
        raise TypeError(f"{cls!r} is no operator, expected a class that inherits from OpDef or Elementwise")
    for method in ("infer", "reference"):
        if getattr(cls, method) is getattr(OpDef, method):
            raise TypeError(f"operator {cls.__name__} has no method '{method}'")


def _digest(cls: type[OpDef], revision: str) -> str:
    """Of the source of the class and of those it inherits from, as far as they are not Lathe's."""
    ours = [base for base in cls.__mro__ if not base.__module__.startswith("core.") and base is not object]
    return hashlib.sha256("\n".join([revision, *map(_source, ours)]).encode()).hexdigest()[:16]


def _source(cls: type) -> str:
    """The text of a class; what its methods compile to where there is no file to read, as in an interactive session."""
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        codes = [member.__code__ for member in vars(cls).values() if inspect.isfunction(member)]
        plain = {
            key: repr(value) for key, value in vars(cls).items() if not key.startswith("__") and not callable(value)
        }
        return repr([(code.co_name, code.co_code, code.co_consts, code.co_names) for code in codes]) + repr(plain)
