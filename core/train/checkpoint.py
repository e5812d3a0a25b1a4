"""Checkpoints: the whole state of a training in a folder of its own, from which it goes on bit by bit.

    checkpoints/<steps>/state.safetensors     parameters, moments, averages; the best weights so far
    checkpoints/<steps>/state.json            counters, what the state belongs to, digests of both

A folder appears by one rename, after its files are on the disk. The newest two are kept: where the newest turns out to
be damaged, the one before it serves.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import LatheError
from core.ir.graph import Array
from core.train.durable import write_folder

FOLDER = "checkpoints"
_TENSORS, _RECORD = "state.safetensors", "state.json"
_FORMAT = 1
_KEPT = 2


class DamagedCheckpoint(LatheError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """`record` is JSON; `tensors` are named arrays."""

    record: Mapping[str, Any]
    tensors: Mapping[str, Array]


def save(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a job's folder and forget old ones. OSError leaves the earlier ones as they were."""
    from safetensors.numpy import save as serialised

    tensors = serialised(dict(checkpoint.tensors))
    record = {"format": _FORMAT, "tensors": _digest(tensors), "record": checkpoint.record}
    text = json.dumps({"digest": _digest(_canonical(record)), **record}, indent=1).encode()
    path = folder / FOLDER / str(step)
    path.parent.mkdir(exist_ok=True)
    write_folder(path, {_TENSORS: tensors, _RECORD: text})
    _forget(path.parent)
    return path


def steps(folder: Path) -> list[int]:
    """After how many steps there are checkpoints, newest first."""
    if not (folder / FOLDER).is_dir():
        return []
    return sorted((int(path.name) for path in (folder / FOLDER).iterdir() if path.name.isdecimal()), reverse=True)


def load(folder: Path, step: int) -> Checkpoint:
    """Read a checkpoint. DamagedCheckpoint when anything about it is not as it was written."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as parsed

    path = folder / FOLDER / str(step)
    try:
        tensors, text = (path / _TENSORS).read_bytes(), (path / _RECORD).read_bytes()
        content = json.loads(text)
        digest = content.pop("digest")
        if content.get("format") != _FORMAT:
            raise DamagedCheckpoint(f"checkpoint {step}: has format {content.get('format')}, expected {_FORMAT}")
        if digest != _digest(_canonical(content)) or content["tensors"] != _digest(tensors):
            raise DamagedCheckpoint(f"checkpoint {step}: its content does not have the digest it was written with")
        return Checkpoint(content["record"], parsed(tensors))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"checkpoint {step}: cannot be read: {error!r}") from None


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, if there is any, and what is wrong with those that are newer."""
    complaints: list[str] = []
    for step in steps(folder):
        try:
            return load(folder, step), complaints
        except DamagedCheckpoint as error:
            complaints.append(str(error))
    return None, complaints


def _forget(checkpoints: Path) -> None:
    """Remove all but the newest, and what a crash has left half written."""
    kept = {str(step) for step in steps(checkpoints.parent)[:_KEPT]}
    for path in checkpoints.iterdir():
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
