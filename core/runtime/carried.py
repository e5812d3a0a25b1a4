"""What one machine's cache has for GPUs, carried to another one: binaries of kernels, and the tuner's findings.

    objects/<key>.o        a binary (core/kernels/cuda/binary.py), by the key of the cache
    tuning/<digest>.json   findings (core/tune.py)

A binary is machine code, and whoever reads a file of them trusts where it comes from.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from core.errors import ArtifactError
from core.kernels.cuda import Binary
from core.runtime.store import Store

_NAME = re.compile(r"objects/([0-9a-f]{64})\.o|tuning/([0-9a-f]{24}\.json)")
_FORMS = {".gz": "gz", ".xz": "xz", ".bz2": "bz2"}  # of compression, by the end of a file's name


def contents(store: Store) -> Iterator[tuple[str, bytes]]:
    """Names and bytes, in the order of the names. Object code of the host stays where it is."""
    for key in store.objects.names():
        data = store.objects.get(key)
        if data is not None and Binary.is_one(data):
            yield f"objects/{key}.o", data
    for path in sorted(store.tuning.glob("*.json")):
        yield f"tuning/{path.name}", path.read_bytes()


def accept(store: Store, name: str, data: bytes) -> None:
    """Put one of them into a store. ArtifactError for a name that `contents` does not give, or bytes that are no
    binary. Findings that the store has already stay."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ArtifactError(f"'{name}' is no part of a cache, expected objects/<key>.o or tuning/<digest>.json")
    key, findings = match.groups()
    if key is not None:
        Binary.from_bytes(data)
        store.objects.put(key, data)
    elif not (path := store.tuning / findings).exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)


def write_tar(path: Path, store: Store) -> int:
    """All of it as a tar, compressed as the end of the name says (.gz, .xz); the number of binaries. The file is there
    whole or not at all."""
    temporary, count = path.with_name(f".{path.name}.{os.getpid()}"), 0
    try:
        with tarfile.open(temporary, f"w:{_FORMS.get(path.suffix, '')}") as tar:  # type: ignore[call-overload]
            for name, data in contents(store):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                count += name.startswith("objects/")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read_tar(path: Path, store: Store) -> int:
    """Put what `write_tar` wrote into a store; the number of files. ArtifactError for anything else."""
    count = 0
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isreg() else None
                if file is None:
                    raise ArtifactError(f"{path.name}: '{member.name}' is no file")
                accept(store, member.name, file.read())
                count += 1
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ArtifactError(f"{path.name} is no tar of a cache: {error}") from error
    return count
