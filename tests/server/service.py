"""A whole server on 127.0.0.1, in a thread: the real data path and repository, toy models and a toy compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.server.app import Engine, JobsMaker, assemble_with
from lathe.server.client import Client
from lathe.server.datasets.assembly import build_datasets
from lathe.server.datasets.service import Check
from lathe.server.jobs.assembly import build_jobs
from lathe.server.repository.assembly import build_control_plane
from lathe.server.repository.fs import Fs
from lathe.server.repository.registry import Registry
from lathe.server.serve import make_server
from lathe.server.settings import Settings
from tests.server.repository.world import ToyBackend, ToyStages
from tests.server.server_thread import in_a_thread, until


@dataclass
class Service:
    """A running server."""

    url: str
    root: Path
    stages: ToyStages
    grpc_port: int | None = None

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
    """Serve a repository until the end of the block; with `held` the compiler waits for its gate.

    `check` replaces the child process that checks datasets; `make_jobs` replaces the real jobs."""
    root.mkdir(exist_ok=True)
    config = Settings(port=0, model_repo=root, drain_timeout=2, poll_interval=0.05, **settings)
    registry, backend, stages = Registry(), ToyBackend(), ToyStages()
    if held:
        stages.gate.clear()
    engine = Engine.build(config, registry)
    control = build_control_plane(config, registry, backend, engine.factory, stages, fs)  # type: ignore[arg-type]
    server = make_server(assemble_with(engine, control, build_datasets(config, check, fs), make_jobs), config)
    with in_a_thread(server, patience=60) as port:
        grpc = server.config.app.state.grpc  # type: ignore[union-attr]
        running = Service(f"http://127.0.0.1:{port}", root, stages, grpc.port if grpc else None)
        with running.client() as client:
            until(lambda: held or client.ready())
        yield running
    assert backend.open_models == 0
