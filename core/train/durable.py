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
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise _named(error, path) from None
    sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder of files appear in one step, in place of what is there. OSError leaves nothing new behind."""
    aside = path.with_name(path.name + _ASIDE)
    try:
        _remove(aside)
        aside.mkdir(parents=True)
        for name, content in files.items():
            _write(aside / name, content)
        sync_folder(aside)
        _remove(path)
        os.rename(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _named(error, path) from None


def sync_folder(path: Path) -> None:
    """Names in the folder outlive the machine's stopping."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(error: OSError, path: Path) -> OSError:
    """The error, saying what could not be written; where that is, is nobody's business who reads it far away."""
    error.filename = path.name
    return error


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
