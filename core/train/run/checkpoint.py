"""Checkpoints: the complete state of a training in a folder. A resumed training ends with bit-identical weights.

    checkpoints/<steps>/state.safetensors     parameters, moments, averages; the best weights so far
    checkpoints/<steps>/state.json            counters; digests of recipe, data and of both files

A folder appears by one rename after its files are synced to the disk. The newest two are kept: if the newest is
damaged, the training resumes from the one before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.core.errors import LatheError
from lathe.core.ir.graph import Array
from lathe.core.train.run.durable_files import write_folder

FOLDER = "checkpoints"
_TENSORS, _RECORD = "state.safetensors", "state.json"
_FORMAT = 1
_CHECKPOINTS_KEPT = 2


class DamagedCheckpoint(LatheError):
    """A checkpoint that cannot be read, has another format, or whose content does not match its digest."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: `record` is JSON, `tensors` are named arrays."""

    record: Mapping[str, Any]
    tensors: Mapping[str, Array]


def save(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a training's folder, then remove all but the newest two; returns its path.

    `step` is the number of steps of the training so far, which names the checkpoint. After an OSError the earlier
    checkpoints are unchanged.
    """
    from safetensors.numpy import save as serialize

    tensors = serialize(dict(checkpoint.tensors))
    record = {"format": _FORMAT, "tensors": _digest(tensors), "record": checkpoint.record}
    text = json.dumps({"digest": _digest(_canonical(record)), **record}, indent=1).encode()
    path = folder / FOLDER / str(step)
    path.parent.mkdir(exist_ok=True)
    write_folder(path, {_TENSORS: tensors, _RECORD: text})
    _remove_old(path.parent)
    return path


def steps(folder: Path) -> list[int]:
    """The numbers of steps of the checkpoints in a folder, newest first."""
    if not (folder / FOLDER).is_dir():
        return []
    return sorted((int(path.name) for path in (folder / FOLDER).iterdir() if path.name.isdecimal()), reverse=True)


def load(folder: Path, step: int) -> Checkpoint:
    """Read the checkpoint after `step` steps. DamagedCheckpoint if it is missing, incomplete or damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as parse

    path = folder / FOLDER / str(step)
    try:
        tensors, text = (path / _TENSORS).read_bytes(), (path / _RECORD).read_bytes()
        content = json.loads(text)
        digest = content.pop("digest")
        if content.get("format") != _FORMAT:
            raise DamagedCheckpoint(f"checkpoint {step}: expected format {_FORMAT}, got {content.get('format')}")
        if digest != _digest(_canonical(content)) or content["tensors"] != _digest(tensors):
            raise DamagedCheckpoint(f"checkpoint {step}: its content does not match its digest")
        return Checkpoint(content["record"], parse(tensors))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"checkpoint {step}: cannot be read: {error!r}") from None


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, None if there is none, and the errors of damaged ones that are newer."""
    errors: list[str] = []
    for step in steps(folder):
        try:
            return load(folder, step), errors
        except DamagedCheckpoint as error:
            errors.append(str(error))
    return None, errors


def _remove_old(checkpoints: Path) -> None:
    """Remove all but the newest two checkpoints, and incomplete folders that a crash has left."""
    newest_names = {str(step) for step in steps(checkpoints.parent)[:_CHECKPOINTS_KEPT]}
    for path in checkpoints.iterdir():
        if path.name not in newest_names:
            shutil.rmtree(path, ignore_errors=True)


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
