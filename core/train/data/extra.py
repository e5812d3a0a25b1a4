"""Packages of the extra `train`, imported when a dataset needs them."""

from __future__ import annotations

from typing import Any

from core.errors import DataError


def arrow() -> Any:
    """pyarrow, with its parts that read tables. DataError that names the extra when it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise _missing("CSV and Parquet files", error) from None
    return pyarrow


def pillow() -> Any:
    """Pillow, with its parts that read images. DataError that names the extra when it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise _missing("images", error) from None
    return PIL


def _missing(what: str, error: ImportError) -> DataError:
    return DataError(f"{what} are read by a package that is not installed: pip install 'lathe[train]' ({error})")
