"""The real server with the real compiler and real jobs: in a thread, or `python -m tests.server.jobs.real_server ROOT`.

Jobs run at low instead of idle priority, because tests keep the machine busy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lathe.server.app import Engine, assemble_with
from lathe.server.backends.graph import GraphBackend
from lathe.server.jobs.assembly import build_jobs, job_resources
from lathe.server.repository.assembly import build_control_plane
from lathe.server.repository.registry import Registry
from lathe.server.serve import LatheServer, make_server
from lathe.server.settings import Settings
from tests.compiled_code import share_compiled_code
from tests.server.server_thread import in_a_thread
from tests.server.standalone import Announcing


def build(root: Path, **settings: Any) -> LatheServer:
    """A server of the models in a folder."""
    config = Settings(port=0, model_repo=root, drain_timeout=2, threads=2, **settings)
    share_compiled_code(config.cache_folder)
    registry = Registry()
    engine = Engine.build(config, registry)
    control = build_control_plane(config, registry, GraphBackend(config.cache_folder / "shared"), engine.factory)
    jobs = partial(build_jobs, allowance=replace(job_resources(config), idle=False))
    return make_server(assemble_with(engine, control, make_jobs=jobs), config)


@contextmanager
def real_server(root: Path, **settings: Any) -> Iterator[str]:
    """Serve a folder until the end of the block; yields the server's URL."""
    with in_a_thread(build(root, **settings), patience=60) as port:
        yield f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    server = build(Path(sys.argv[1]))
    Announcing(server.config, server.config.app).run()  # type: ignore[arg-type]
