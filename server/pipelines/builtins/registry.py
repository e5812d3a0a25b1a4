"""The built-in steps by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from lathe.server.pipelines.builtins.base import StepMaker
from lathe.server.pipelines.definition import BadPipeline

_MODULES: Mapping[str, str] = {  # name -> module, imported on demand because some need an extra
    "decode_image": "image",
    "normalize_image": "graphs",
    "tokenize": "text",
    "tokenize_pair": "text",
    "mean_pool": "graphs",
    "sigmoid": "graphs",
    "softmax": "graphs",
    "label": "labels",
}


def find_maker(name: str) -> StepMaker:
    """Return the maker of the built-in step `name`; raises BadPipeline for an unknown one or a missing extra."""
    if name not in _MODULES:
        raise BadPipeline(f"builtin: expected one of {', '.join(sorted(_MODULES))}, got {name!r}")
    module = _MODULES[name]
    try:
        maker: StepMaker = getattr(import_module(f"lathe.server.pipelines.builtins.{module}"), name)
    except ModuleNotFoundError as error:
        raise BadPipeline(
            f"builtin {name!r} needs the extra {module!r} of Lathe: {error.name} is not installed"
        ) from error
    return maker
