"""What a client uploads for a dataset: its file as it is, or a folder as a zip of it.

The same folder makes the same bytes, whenever and wherever: entries are sorted, stored as they are, and bear no time.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.archive import Body

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip can say


@contextmanager
def dataset_body(content: Path | bytes) -> Iterator[Body]:
    """What to upload for a dataset, as long as the block lasts; raises OSError when it cannot be read."""
    if isinstance(content, bytes) or content.is_file():
        yield Body((content,))
        return
    if not content.is_dir():
        raise FileNotFoundError(f"{content}: no such file or folder")
    with tempfile.TemporaryDirectory(prefix="lathe-") as scratch:
        packed = Path(scratch) / "folder.zip"
        pack(content, packed)
        yield Body((packed,))


def pack(folder: Path, target: Path) -> None:
    """Write a folder's files into a zip; hidden ones and links are left out."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_file() and not path.is_symlink() and not any(part.startswith(".") for part in parts):
                entry = zipfile.ZipInfo("/".join(parts), _EPOCH)
                entry.file_size = path.stat().st_size  # so that large ones get the larger headers
                with path.open("rb") as source, archive.open(entry, "w") as into:
                    shutil.copyfileobj(source, into)
