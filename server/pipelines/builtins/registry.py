"""The built-in steps by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from server.pipelines.builtins.base import Maker
from server.pipelines.definition import BadPipeline

_HOMES: Mapping[str, str] = {  # what needs an extra is imported only when it is asked for
    "decode_image": "image",
    "normalize_image": "graphs",
    "tokenize": "text",
    "mean_pool": "graphs",
    "softmax": "graphs",
    "label": "labels",
}


def find(name: str) -> Maker:
    """Return what makes a step of this name; raises BadPipeline listing those there are."""
    if name not in _HOMES:
        raise BadPipeline(f"builtin: expected one of {', '.join(sorted(_HOMES))}, got {name!r}")
    home = _HOMES[name]
    try:
        maker: Maker = getattr(import_module(f"server.pipelines.builtins.{home}"), name)
    except ModuleNotFoundError as error:
        raise BadPipeline(
            f"builtin {name!r} needs the extra {home!r} of Lathe: {error.name} is not installed"
        ) from error
    return maker
