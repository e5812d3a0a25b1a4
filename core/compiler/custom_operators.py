"""The API for operators of your own. docs/custom-operators.md has complete examples.

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

from lathe.core.codegen.lang import Kernel
from lathe.core.errors import UnsupportedError
from lathe.core.ir.types import DType, OptionalType, SequenceType, TensorType
from lathe.core.kernels.custom import spec as custom
from lathe.core.kernels.custom.spec import CustomSpec
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required
from lathe.core.ops.opdef.scalar import ScalarOps
from lathe.core.ops.tensor.elementwise import Elementwise
from lathe.core.runtime.host.child_python import OPERATORS

__all__ = [
    "Backward", "Call", "CustomSpec", "DType", "Elementwise", "Infer", "Kernel", "MixesRows", "NodeView", "OpDef",
    "OptionalType", "Required", "Rewrite", "ScalarOps", "SequenceType", "TensorType", "load_operators", "register_op",
]  # fmt: skip

MODULES = OPERATORS  # environment variable: the modules that child processes import
_RESERVED_DOMAINS = (
    "",
    "ai.onnx",
    "ai.onnx.ml",
    "ai.onnx.preview",
    "ai.onnx.preview.training",
    "com.microsoft",
    "lathe",
)
_OpClass = TypeVar("_OpClass", bound=type[OpDef])


def register_op(domain: str, *, revision: str = "") -> Callable[[_OpClass], _OpClass]:
    """Class decorator: models can use the operator, under the class's name (or its `name`) in ONNX domain `domain`.

    The class inherits from `OpDef` (or `Elementwise`) and defines at least `infer` and `reference`. Compiled code stays
    cached as long as the source of the class is unchanged. If the class calls other functions of yours, change
    `revision` whenever those change. ValueError for a domain that is reserved, or a name that another operator has;
    TypeError for a class that is no `OpDef`, or lacks one of the two methods.
    """
    if domain in _RESERVED_DOMAINS:
        raise ValueError(f"domain '{domain}' is not for custom operators, expected one of your own like 'com.example'")

    def add(cls: _OpClass) -> _OpClass:
        _check(cls)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        cls.domain = domain
        registry.register_external(cls, _digest(cls, revision))
        custom.register_kernels(registry.get(cls.name))
        return cls

    return add


def load_operators(modules: str) -> None:
    """Import modules that register operators, given as names separated by commas, here and in later child processes.

    The names are added to the environment variable LATHE_OPERATORS, which child processes read. UnsupportedError for a
    module that cannot be imported.
    """
    before = set(registry.names())
    names = _module_names(modules)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UnsupportedError(f"operators of module '{name}': {type(error).__name__}: {error}") from error
    registry.mark_known_to_children(set(registry.names()) - before)
    loaded = _module_names(os.environ.get(MODULES, ""))  # by calls before this one
    os.environ[MODULES] = ",".join(dict.fromkeys([*loaded, *names]))


def _module_names(modules: str) -> list[str]:
    """The names in a text that separates them by commas."""
    return [name for name in map(str.strip, modules.split(",")) if name]


def _check(cls: type[OpDef]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, OpDef)):
        raise TypeError(f"{cls!r} is no operator, expected a class that inherits from OpDef or Elementwise")
    for method in ("infer", "reference"):
        if getattr(cls, method) is getattr(OpDef, method):
            raise TypeError(f"operator {cls.__name__} has no method '{method}'")


def _digest(cls: type[OpDef], revision: str) -> str:
    """16 hex digits: a digest of `revision` and the source of the class and its base classes, except for Lathe's."""
    ours = [base for base in cls.__mro__ if not base.__module__.startswith("lathe.core.") and base is not object]
    return hashlib.sha256("\n".join([revision, *map(_source, ours)]).encode()).hexdigest()[:16]


def _source(cls: type) -> str:
    """The source text of a class; without a source file, as in an interactive session, its bytecode and attributes."""
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        codes = [member.__code__ for member in vars(cls).values() if inspect.isfunction(member)]
        plain = {
            key: repr(value) for key, value in vars(cls).items() if not key.startswith("__") and not callable(value)
        }
        return repr([(code.co_name, code.co_code, code.co_consts, code.co_names) for code in codes]) + repr(plain)
