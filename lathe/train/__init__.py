"""Training, with the formulas of PyTorch: see `lathe.core.train`. Each name is imported at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lathe.core.train as _train
from lathe.core.train import __all__ as __all__

if TYPE_CHECKING:
    from lathe.core.train import *  # noqa: F403


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lathe.train' has no attribute '{name}'")
    return getattr(_train, name)
