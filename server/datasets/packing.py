"""The body of a dataset's upload: a file unchanged, or a folder as a zip.

Equal folders make equal bytes: the entries are sorted, stored uncompressed, and have a constant timestamp.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lathe.server.archive import UploadBody

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest timestamp of a zip entry


@contextmanager
def dataset_body(content: Path | bytes) -> Iterator[UploadBody]:
    """Yield the body to upload for a dataset, valid until the context is left; raises OSError."""
    if isinstance(content, bytes) or content.is_file():
        yield UploadBody((content,))
        return
    if not content.is_dir():
        raise FileNotFoundError(f"{content}: no such file or folder")
    with tempfile.TemporaryDirectory(prefix="lathe-") as scratch:
        packed = Path(scratch) / "folder.zip"
        write_zip(content, packed)
        yield UploadBody((packed,))


def write_zip(folder: Path, target: Path) -> None:
    """Write a folder's files into a zip, without hidden files and folders and without links; raises OSError."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_file() and not path.is_symlink() and not any(part.startswith(".") for part in parts):
                entry = zipfile.ZipInfo("/".join(parts), _EPOCH)
                entry.file_size = path.stat().st_size  # lets zipfile choose ZIP64 headers for large files
                with path.open("rb") as source, archive.open(entry, "w") as into:
                    shutil.copyfileobj(source, into)
