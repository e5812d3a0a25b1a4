"""Files that are there whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_ASIDE = ".new"


def write_file(path: Path, content: bytes) -> None:
    """Write a file in one step: aside, synchronised, renamed. OSError leaves what was there."""
    aside = path.with_name(path.name + _ASIDE)
    try:
        _write(aside, content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder of files appear in one step, in place of what is there. OSError leaves nothing new behind."""
    aside = path.with_name(path.name + _ASIDE)
    try:
        fresh_folder(aside)
        for name, content in files.items():
            _write(aside / name, content)
        commit_folder(aside, path)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def fresh_folder(path: Path) -> None:
    """An empty folder, whatever was there."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def commit_folder(aside: Path, path: Path) -> None:
    """Give a folder whose files are on the disk its name; what had that name is removed first."""
    sync_folder(aside)
    if path.exists():
        shutil.rmtree(path)
    os.rename(aside, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Names in the folder outlive the machine's stopping."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
