"""Packages of the extra `train`, imported when a dataset needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from core.errors import DataError


def imported(module: str, what: str) -> Any:
    """A module. DataError that names the extra when it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        message = f"{what} are read by a package that is not installed: pip install 'lathe[train]' ({error})"
        raise DataError(message) from None
