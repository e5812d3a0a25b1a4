"""A portable cache for GPUs: kernel binaries and the tuner's findings of one machine, for use on another one.

    objects/<key>.o        a binary (core/kernels/cuda/binary.py), by its cache key
    tuning/<digest>.json   findings (core/compiler/tuner.py)

A binary is machine code, so a reader has to trust the source of such a file.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from lathe.core.errors import ArtifactError
from lathe.core.files import replacing
from lathe.core.kernels.cuda import Binary
from lathe.core.runtime.artifact.store import Store

_NAME = re.compile(r"objects/([0-9a-f]{64})\.o|tuning/([0-9a-f]{24}\.json)")
_COMPRESSIONS = {".gz": "gz", ".xz": "xz", ".bz2": "bz2"}  # compression by file suffix


def contents(store: Store) -> Iterator[tuple[str, bytes]]:
    """The name and bytes of each GPU binary, then of each file of findings, both in order of name.

    The host's object code is left out, but not its files of findings.
    """
    for key in store.objects.names():
        data = store.objects.get(key)
        if data is not None and Binary.is_one(data):
            yield f"objects/{key}.o", data
    for path in sorted(store.tuning_folder.glob("*.json")):
        yield f"tuning/{path.name}", path.read_bytes()


def add(store: Store, name: str, data: bytes) -> None:
    """Put one file into a store; a file of findings that the store has already is left as it is.

    ArtifactError for a name that `contents` does not give, or for an object that is no GPU binary.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ArtifactError(f"'{name}' is no part of a cache, expected objects/<key>.o or tuning/<digest>.json")
    key, findings = match.groups()
    if key is not None:
        Binary.from_bytes(data)
        store.objects.put(key, data)
    elif not (path := store.tuning_folder / findings).exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)


def write_tar(path: Path, store: Store) -> int:
    """Write the `contents` of a store to a tar file atomically; returns the number of binaries.

    The suffix of `path` gives the compression (.gz, .xz, .bz2); none for any other suffix.
    """
    count, form = 0, f"w:{_COMPRESSIONS.get(path.suffix, '')}"
    with replacing(path) as file, tarfile.open(fileobj=file, mode=form) as tar:  # type: ignore[call-overload]
        for name, data in contents(store):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            count += name.startswith("objects/")
    return count


def read_tar(path: Path, store: Store) -> int:
    """Put the files of a tar by `write_tar` into a store, as `add` does; returns how many the tar has.

    ArtifactError for any other file, or if a file cannot be read or written; the files before it stay in the store.
    """
    count = 0
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isreg() else None
                if file is None:
                    raise ArtifactError(f"{path.name}: '{member.name}' is no file")
                add(store, member.name, file.read())
                count += 1
    except (tarfile.TarError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0].removesuffix(":")  # the lines that follow list all compressions
        raise ArtifactError(f"{path.name} is no tar of a cache: {reason}") from error
    return count
