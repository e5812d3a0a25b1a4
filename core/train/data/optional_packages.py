"""Imports packages of the extra `train` when a dataset needs them."""

from __future__ import annotations

from typing import Any

from lathe.core.errors import DataError


def arrow() -> Any:
    """pyarrow with its submodules for tables. If it is not installed, a DataError names the extra."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise _missing("CSV and Parquet files", error) from None
    return pyarrow


def pillow() -> Any:
    """Pillow with its submodule `Image`. If it is not installed, a DataError names the extra."""
    try:
        import PIL.Image
    except ImportError as error:
        raise _missing("images", error) from None
    return PIL


def _missing(files: str, error: ImportError) -> DataError:
    return DataError(f"{files} need a package that is not installed: pip install '.[train]' ({error})")
