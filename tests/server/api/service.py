"""A whole server on 127.0.0.1, in a thread: the real data path and repository, toy models and a toy compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.app import Engine, JobsMaker, assemble_with
from server.client import Client
from server.datasets.assembly import build_datasets
from server.datasets.service import Check
from server.jobs.assembly import build_jobs
from server.repository.assembly import build_control
from server.repository.fs import Fs
from server.repository.registry import Registry
from server.serve import make_server
from server.settings import Settings
from tests.server.repository.world import ToyBackend, ToyStages
from tests.server.threaded import in_a_thread, until


@dataclass
class Service:
    """A server at work."""

    url: str
    root: Path
    stages: ToyStages

    def client(self) -> Client:
        return Client(self.url)


@contextmanager
def service(
    root: Path,
    fs: Fs | None = None,
    *,
    held: bool = False,
    check: Check | None = None,
    make_jobs: JobsMaker = build_jobs,
    **settings: Any,
) -> Iterator[Service]:
    """Serve a repository until the end of the block; ``held``: the compiler waits for the gate.

    ``check`` looks at datasets in place of the child process; ``make_jobs`` puts other jobs in place of the real ones.
    """
    root.mkdir(exist_ok=True)
    config = Settings(port=0, model_repo=root, drain_timeout=2, poll_interval=0.05, **settings)
    registry, backend, stages = Registry(), ToyBackend(), ToyStages()
    if held:
        stages.gate.clear()
    engine = Engine.build(config, registry)
    control = build_control(config, registry, backend, engine.factory, stages, fs)  # type: ignore[arg-type]
    server = make_server(assemble_with(engine, control, build_datasets(config, check, fs), make_jobs), config)
    with in_a_thread(server, patience=60) as port:
        running = Service(f"http://127.0.0.1:{port}", root, stages)
        with running.client() as client:
            until(lambda: held or client.ready())
        yield running
    assert backend.open_models == 0
