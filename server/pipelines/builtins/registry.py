"""The built-in steps by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from server.pipelines.builtins.base import Maker
from server.pipelines.definition import BadPipeline

_HOMES: Mapping[str, str] = {}


def find(name: str) -> Maker:
    """Return what makes a step of this name; raises BadPipeline listing those there are."""
    if name not in _HOMES:
        raise BadPipeline(f"builtin: expected one of {', '.join(sorted(_HOMES))}, got {name!r}")
    maker: Maker = getattr(import_module(f"server.pipelines.builtins.{_HOMES[name]}"), name)
    return maker
