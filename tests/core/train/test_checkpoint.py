"""Checkpoints are complete or absent, whatever happens during writing and to the files afterwards."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lathe.core.train.run import checkpoint, durable_files
from lathe.core.train.run.checkpoint import Checkpoint, DamagedCheckpoint

FILES = ["state.safetensors", "state.json"]


def content(number: int) -> Checkpoint:
    arrays = {"w": np.full((3, 4), number, np.float32), "count": np.array(number)}
    return Checkpoint({"runs": number, "part": 0.1 * number}, arrays)


def same(found: Checkpoint | None, number: int) -> bool:
    expected = content(number)
    return (
        found is not None
        and found.record == expected.record
        and all(np.array_equal(found.tensors[name], array) for name, array in expected.tensors.items())
        and found.tensors["w"].dtype == np.float32
    )


def test_saved_checkpoints_load_and_the_latest_two_stay(tmp_path: Path) -> None:
    for number in (1, 9, 10):
        checkpoint.save(tmp_path, number, content(number))
    assert checkpoint.steps(tmp_path) == [10, 9]
    assert same(checkpoint.load(tmp_path, 9), 9)
    found, complaints = checkpoint.newest(tmp_path)
    assert same(found, 10) and complaints == []


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) == (None, [])


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_found(tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        checkpoint.save(tmp_path, number, content(number))
    path = tmp_path / checkpoint.FOLDER / "2" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        found, complaints = checkpoint.newest(tmp_path)
        assert same(found, 1), f"byte {place}"
        assert len(complaints) == 1 and complaints[0].startswith("checkpoint 2: ")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "short"])
def test_truncated_files_are_found(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint.save(tmp_path, 1, content(1))
    path = tmp_path / checkpoint.FOLDER / "1" / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-3])
    with pytest.raises(DamagedCheckpoint, match="checkpoint 1: "):
        checkpoint.load(tmp_path, 1)
    assert checkpoint.newest(tmp_path)[0] is None


class PulledPlug(BaseException):
    """The process ends here: no cleaning up."""


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`plug(n, error)`: the n-th call that changes the disk raises; returns the number of calls so far."""
    made = {"calls": 0, "at": 0, "error": None}

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            made["calls"] += 1
            if made["calls"] == made["at"]:
                raise made["error"]
            return function(*arguments, **keywords)

        return call

    for place, name in (
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (durable_files.shutil, "rmtree"),
        (Path, "mkdir"),
    ):
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    monkeypatch.setattr(Path, "open", counted(Path.open))

    def pull(at: int, error: BaseException | None) -> int:
        before = made["calls"]
        made.update(calls=0, at=at, error=error)
        return before

    return pull


def test_a_crash_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, plug: Any) -> None:
    at = 1
    while True:
        folder = tmp_path / str(at)
        plug(0, None)
        folder.mkdir()
        for number in (1, 2):
            checkpoint.save(folder, number, content(number))
        plug(at, PulledPlug())
        try:
            checkpoint.save(folder, 3, content(3))
        except PulledPlug:
            plug(0, None)
        else:
            break
        found, complaints = checkpoint.newest(folder)
        assert complaints == []
        assert same(found, 2) or same(found, 3), f"call {at}"
        checkpoint.save(folder, 4, content(4))
        assert same(checkpoint.newest(folder)[0], 4)
        assert sorted(path.name for path in (folder / checkpoint.FOLDER).iterdir()) in (["2", "4"], ["3", "4"])
        at += 1
    assert at > 8  # two files, their folder, its parent: opened, written, synchronised, renamed


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_an_error_at_any_step_leaves_the_earlier_ones(tmp_path: Path, plug: Any, number: int) -> None:
    at = 1
    while True:
        folder = tmp_path / str(at)
        plug(0, None)
        folder.mkdir()
        for step in (1, 2):
            checkpoint.save(folder, step, content(step))
        plug(at, OSError(number, os.strerror(number)))
        with suppress(OSError):
            checkpoint.save(folder, 3, content(3))
        if plug(0, None) < at:
            break
        assert not list((folder / checkpoint.FOLDER).glob("*.new"))
        found, complaints = checkpoint.newest(folder)
        assert complaints == [] and (same(found, 2) or same(found, 3))
        at += 1


def test_a_checkpoint_that_needs_the_reserved_space_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [10_000]
    monkeypatch.setattr(durable_files.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free[0], f_frsize=1))
    monkeypatch.setattr(durable_files, "_kept_free", 0)
    checkpoint.save(tmp_path, 1, content(1))
    durable_files.reserve_disk_space(9_999)
    with pytest.raises(OSError, match=r"10000 are free on the disk, and at least 9999 are kept: '2'") as refused:
        checkpoint.save(tmp_path, 2, content(2))
    assert refused.value.errno == errno.ENOSPC
    assert [path.name for path in (tmp_path / checkpoint.FOLDER).iterdir()] == ["1"]
    free[0] = 100_000
    checkpoint.save(tmp_path, 2, content(2))
    assert checkpoint.steps(tmp_path) == [2, 1]
