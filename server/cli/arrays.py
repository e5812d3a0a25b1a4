"""Reads files of arrays that an option names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lathe.server.cli.terminal import fail

if TYPE_CHECKING:
    from lathe.server.types import Array, Tensors


def read_arrays(option: str, path: Path, expected: str = "a .npz or .npy file of arrays") -> Tensors | Array:
    """Return the arrays of a .npz file by name, or the array of a .npy file.

    Another file ends the command, with an error that says what was `expected`.
    """
    import numpy as np

    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except Exception as error:  # NumPy raises exceptions of many types for damaged files
        raise fail(f"{option} {path}: expected {expected}, got {_content(error)}") from error


def read_named_arrays(option: str, path: Path) -> Tensors:
    """Return the arrays of a .npz file by name; another file ends the command."""
    expected = "a .npz file of arrays"
    found = read_arrays(option, path, expected)
    if not isinstance(found, dict):
        raise fail(f"{option} {path}: expected {expected}, got a single array")
    return found


def _content(error: Exception) -> str:
    """Return what a file holds that NumPy refused with this error."""
    if isinstance(error, OSError):
        return f"an error: {error.strerror or error}"
    if "pickle" in str(error):
        return "Python objects, or a file of another format"  # NumPy takes other formats for pickles
    return f"a damaged file: {error or type(error).__name__}"
