"""`kill -9` of server and job in every state: no acknowledged job is lost, left over or published twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lathe.server.client import Client
from tests.server.repository.test_children import children_of, processes
from tests.server.repository.world import toy
from tests.server.service import until

RECIPE = {"steps": 40, "seconds": 0.01, "every": 10, "model": toy(3.0).decode()}
PUBLISH = {"model": "m", "promote": True}


@dataclass
class Server:
    """A server process over a folder."""

    root: Path
    process: subprocess.Popen[str]
    client: Client

    def kill(self) -> None:
        """Simulate a power failure, except for the disk's caches; the server's child processes die too."""
        self.process.kill()
        self.process.wait()
        self.client.close()
        until(lambda: children_of(self.root) == [])

    def jobs(self) -> list[int]:
        return [pid for pid, command in processes().items() if f"{self.root}/.lathe/jobs" in command]


@contextmanager
def server(root: Path) -> Iterator[Server]:
    root.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.server.jobs.standalone", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        running = Server(root, process, Client(f"http://127.0.0.1:{int(process.stdout.readline())}", timeout=30))
        try:
            yield running
        finally:
            if process.poll() is None:
                process.terminate()
                assert process.wait(60) == 0
            running.client.close()


def has_checkpoint(running: Server, job: str) -> bool:
    return (running.root / ".lathe" / "jobs" / job / "checkpoints").exists()


MOMENTS: dict[str, Callable[[Server, str], bool]] = {
    "acknowledged": lambda running, job: True,
    "starting": lambda running, job: bool(running.jobs()),
    "running": lambda running, job: (running.client.job(job).progress or {}).get("kind") == "step",
    "checkpointed": has_checkpoint,
    "publishing": lambda running, job: running.client.job(job).state == "publishing",
    "finished": lambda running, job: running.client.job(job).state == "succeeded",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_server_continues_its_jobs(moment: str, tmp_path: Path) -> None:
    root = tmp_path / "repo"
    with server(root) as running:
        if moment == "publishing":
            (root / "hold").touch()
        job = running.client.submit_job(RECIPE, "digits", publish=PUBLISH, key="key").id
        until(lambda: MOMENTS[moment](running, job))
        running.kill()
    (root / "hold").unlink(missing_ok=True)
    with server(root) as running:
        again = running.client.submit_job(RECIPE, "digits", publish=PUBLISH, key="key")
        assert (again.id, again.replayed) == (job, True)
        _ends_well(running, job)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "running", "checkpointed"])
def test_a_killed_job_continues_at_its_checkpoint(moment: str, tmp_path: Path) -> None:
    with server(tmp_path / "repo") as running:
        job = running.client.submit_job(RECIPE, "digits", publish=PUBLISH).id
        until(lambda: MOMENTS[moment](running, job))
        for pid in running.jobs():
            os.kill(pid, signal.SIGKILL)
        _ends_well(running, job)


@pytest.mark.slow
def test_jobs_end_although_the_server_is_killed_repeatedly(tmp_path: Path) -> None:
    rng, root, keys = random.Random(0), tmp_path / "repo", [f"job-{n}" for n in range(4)]
    submitted: dict[str, str] = {}
    for _ in range(8):
        with server(root) as running:
            for key in keys:
                found = running.client.submit_job(RECIPE, "digits", publish=PUBLISH, key=key)
                assert submitted.setdefault(key, found.id) == found.id
            pid = running.process.pid
            subprocess.Popen(["sh", "-c", f"sleep {rng.uniform(0, 1.5):.3f}; kill -9 {pid}"]).wait()
            running.process.wait()
            until(lambda root=root: children_of(root) == [])  # type: ignore[misc]
    with server(root) as running:
        for key in keys:
            job = running.client.submit_job(RECIPE, "digits", publish=PUBLISH, key=key).id
            assert submitted.setdefault(key, job) == job
        assert len(running.client.jobs()) == len(keys)
        for job in submitted.values():
            until(lambda job=job: running.client.job(job).finished is not None)  # type: ignore[misc]
        results = [running.client.job(job).result for job in submitted.values()]
        versions = [result.version for result in results if result]
        assert sorted(versions) == [version.version for version in running.client.versions("m")] == [1, 2, 3, 4]


def _ends_well(running: Server, job: str) -> None:
    until(lambda: running.client.job(job).finished is not None)
    found = running.client.job(job)
    assert (found.state, found.error) == ("succeeded", "")
    assert [version.version for version in running.client.versions("m")] == [1]
    assert found.result is not None
    assert (found.result.version, found.result.moved_alias) == (1, True)
    until(lambda: running.jobs() == [])
    assert len(running.client.jobs()) == 1
    assert os.listdir(running.root / ".lathe" / "jobs" / ".trash") == []
