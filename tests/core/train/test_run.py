"""A training as a process: exit status, stopping on request, and being killed at any step."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import durable_files, events, result, work_folder
from lathe.core.train.run.work_folder import Sources
from tests.core.train.small_trainings import asked, kinds, model_bytes, quadrants

LONG = {"epochs": 2000, "data": {"validation": 0.0}, "checkpoint": {"steps": 50}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrants(tmp_path_factory.mktemp("data") / "data")  # no suffix: the content shows the format


def started(folder: Path, data: Path, *prefix: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        *prefix,
        "-m",
        "lathe.core.train.run.training_process",
        str(folder),
        "--dataset",
        str(data),
        "--threads",
        "1",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, complaint = process.communicate(timeout=60)
    assert "Traceback" not in complaint, complaint
    return process.returncode, output


def wait_for(process: subprocess.Popen[str], folder: Path, kind: str, count: int = 1) -> None:
    """Wait until the folder has `count` events of a kind."""
    while kinds(folder).count(kind) < count:
        assert process.poll() is None or kinds(folder).count(kind) >= count, f"it ended with {kinds(folder)}"
        time.sleep(0.001)


def expected_model(folder: Path, what: recipe.Recipe, data: Path) -> bytes:
    work_folder.prepare(folder, what)
    work_folder.run_training(folder, Sources(data), Resources(threads=1))
    return model_bytes(folder)


def test_the_log_of_a_process_has_its_epochs(tmp_path: Path, data: Path) -> None:
    work_folder.prepare(tmp_path, asked(epochs=2))
    process = started(tmp_path, data)
    _, log = process.communicate(timeout=60)
    first, *epochs, last = log.splitlines()
    assert first.startswith("training on ") and ": 2 epochs of " in first
    assert [line.partition("  ")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    assert last.startswith("done: ") and "accuracy " in last


def test_a_training_stops_on_request_and_resumes(tmp_path: Path, data: Path) -> None:
    work_folder.prepare(tmp_path, asked(**LONG))
    process = started(tmp_path, data)
    wait_for(process, tmp_path, "step", 2)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (75, "")
    assert kinds(tmp_path)[-1] == "checkpoint"
    assert not (tmp_path / "result").exists()
    process = started(tmp_path, data)
    wait_for(process, tmp_path, "resumed")
    wait_for(process, tmp_path, "epoch", 2)
    process.kill()
    process.communicate()
    steps = [event.values["step"] for event in events.read(tmp_path) if event.kind in ("checkpoint", "resumed")]
    assert steps[0] > 0 and steps == sorted(steps)


@pytest.mark.slow
def test_a_killed_training_resumes(tmp_path: Path, data: Path) -> None:
    killed_at("checkpoint", 2, tmp_path, data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [("started", 1), ("step", 1), ("step", 3), ("checkpoint", 1), ("epoch", 1), ("epoch", 4), ("done", 1)],
)
def test_a_training_killed_at_any_step_resumes(tmp_path: Path, data: Path, kind: str, count: int) -> None:
    killed_at(kind, count, tmp_path, data)


def killed_at(kind: str, count: int, folder: Path, data: Path) -> None:
    """Kill a training after an event; started again, it gives the same result."""
    what = asked(epochs=40)
    expected = expected_model(folder / "whole", what, data)
    work_folder.prepare(folder / "killed", what)
    process = started(folder / "killed", data)
    wait_for(process, folder / "killed", kind, count)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert ended(started(folder / "killed", data)) == (0, "")
    assert model_bytes(folder / "killed") == expected
    assert kinds(folder / "killed").count("done") == 1
    left = {path.name for path in (folder / "killed").iterdir()}
    assert left == {"recipe.json", "lock", "events.jsonl", "checkpoints", "result"}


class PulledPlug(BaseException):
    """The process ends here: no cleaning up."""


def crashed_at_each_call(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, first: int, every: int) -> int:
    """Crash before the n-th call that changes the disk, for many n; returns the number of calls of a training."""
    what = asked(epochs=2)
    expected = expected_model(folder / "whole", what, data)
    calls, at = 0, 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise PulledPlug
            return function(*arguments, **keywords)

        return call

    for place, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (durable_files.shutil, "rmtree")):
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    for number in range(first, 1000, every):
        at, crashed = 0, folder / str(number)
        work_folder.prepare(crashed, what)
        at, calls = number, 0
        try:
            work_folder.run_training(crashed, Sources(data), Resources(threads=1))
        except PulledPlug:
            work_folder.run_training(crashed, Sources(data), Resources(threads=1))
            assert model_bytes(crashed) == expected, f"call {number}"
            assert kinds(crashed).count("done") == 1
        else:
            return calls
    return 1000


def test_a_crash_between_any_two_writes(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crashed_at_each_call(tmp_path, data, monkeypatch, first=5, every=9) > 20


@pytest.mark.slow
def test_a_crash_between_all_writes(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crashed_at_each_call(tmp_path, data, monkeypatch, first=1, every=1) > 20


@pytest.mark.slow
def test_a_disk_without_room_for_the_result(tmp_path: Path, data: Path) -> None:
    """The system refuses files above 40,000 bytes; the weights alone are more."""
    work_folder.prepare(tmp_path, asked(model={"architecture": "mlp", "hidden": [4000]}, epochs=1))
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000)); "
    module = "lathe.core.train.run.training_process"
    command = [sys.executable, "-c", f"{limited}runpy.run_module({module!r}, run_name='__main__')"]
    arguments = [str(tmp_path), "--dataset", str(data), "--threads", "1"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout)["error"].endswith("File too large: 'result'")
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.json", "lock", "events.jsonl", "checkpoints"}
    assert not list((tmp_path / "checkpoints").iterdir())
    assert kinds(tmp_path)[-1] == "failed"
    assert ended(started(tmp_path, data)) == (0, "")


@pytest.mark.slow
def test_reserved_disk_space_is_not_used(tmp_path: Path, data: Path) -> None:
    """No checkpoint is written, the training goes on, and the result is refused."""
    work_folder.prepare(tmp_path, asked(epochs=3, checkpoint={"steps": 1}))
    command = [
        sys.executable,
        "-m",
        "lathe.core.train.run.training_process",
        str(tmp_path),
        "--dataset",
        str(data),
        "--keep-free",
        str(1 << 60),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr
    assert f"and at least {1 << 60} are kept: 'result'" in json.loads(done.stdout)["error"]
    assert "checkpoint" not in kinds(tmp_path)
    logged = [event.values["message"] for event in events.read(tmp_path) if event.kind == "log"]
    assert len(logged) > 1
    assert "could not be written" in logged[0]
    assert ended(started(tmp_path, data)) == (0, "")


def test_errors_name_their_cause(tmp_path: Path, data: Path) -> None:
    work_folder.prepare(tmp_path, asked(data={"target": "missing"}))
    status, output = ended(started(tmp_path, data))
    assert status == 2
    assert "missing" in json.loads(output)["error"]
    (last,) = events.read(tmp_path)
    assert last.kind == "failed" and last.values["error"] == json.loads(output)["error"]


def test_two_trainings_in_one_folder_are_refused(tmp_path: Path, data: Path) -> None:
    work_folder.prepare(tmp_path, asked())
    with (tmp_path / work_folder.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, output = ended(started(tmp_path, data))
    assert status == 73
    assert "another process is training here" in json.loads(output)["error"]


def test_a_torn_line_of_events_is_cut_off(tmp_path: Path) -> None:
    with events.EventLog(tmp_path) as told:
        told.emit("started", epochs=1)
    with (tmp_path / events.FILE).open("ab") as file:
        file.write(b'{"kind": "st')
    assert [event.kind for event in events.read(tmp_path)] == ["started"]
    with events.EventLog(tmp_path) as told:
        told.emit("resumed", step=3)
    assert [event.values for event in events.read(tmp_path)] == [{"epochs": 1}, {"step": 3}]


def test_a_result_whose_last_event_was_lost(tmp_path: Path, data: Path) -> None:
    work_folder.prepare(tmp_path, asked(epochs=1))
    work_folder.run_training(tmp_path, Sources(data), Resources(threads=1))
    lines = (tmp_path / events.FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / events.FILE).write_bytes(b"".join(lines[:-1]))
    assert work_folder.run_training(tmp_path, Sources(data), Resources(threads=1)).value == "done"
    (done,) = [event for event in events.read(tmp_path) if event.kind == "done"]
    assert done.values["metrics"] == result.read_metrics(tmp_path)["metrics"]
    assert np.isfinite(done.values["metrics"]["accuracy"])
