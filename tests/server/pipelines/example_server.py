"""A server with the example pipelines of docs/ and the real compiler."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.core.compiler.child_stages import main as child
from lathe.server.app import Engine, assemble_with
from lathe.server.backends.graph import GraphBackend
from lathe.server.client import Client
from lathe.server.repository.assembly import build_control_plane
from lathe.server.repository.registry import Registry
from lathe.server.serve import LatheServer, make_server
from lathe.server.settings import Settings
from tests.compiled_code import share_compiled_code
from tests.server.server_thread import in_a_thread, until

PROJECT = Path(__file__).resolve().parents[3]
EXAMPLES = PROJECT / "docs" / "pipelines"


class HereAndNow:
    """Parses and compiles in this process: child processes are tested elsewhere and take most of the time."""

    async def run(self, task: str, *arguments: str | Path) -> None:
        words = [task, *map(str, arguments)]
        assert await asyncio.to_thread(child, words) == 0, words

    @asynccontextmanager
    async def at_normal_priority(self) -> AsyncIterator[None]:
        yield


@dataclass(frozen=True)
class Running:
    """A running server, and a client of it."""

    server: LatheServer
    port: int
    client: Client
    root: Path

    @property
    def plane(self) -> Any:
        """The data plane, whose parts tests watch or replace."""
        return self.server.config.app.state.plane


@contextmanager
def example_server(root: Path) -> Iterator[Running]:
    """A server with the example pipelines and their models, whose repository is the folder `root`."""
    shutil.copytree(PROJECT / "model_repo" / "digits" / "2", root / "digits" / "2")
    settings = Settings(port=0, grpc_port=0, model_repo=root, threads=1, drain_timeout=2, poll_interval=0.1)
    share_compiled_code(settings.cache_folder)
    registry = Registry()
    engine = Engine.build(settings, registry)
    backend = GraphBackend(settings.cache_folder / "shared")
    control = build_control_plane(settings, registry, backend, engine.factory, HereAndNow())  # type: ignore[arg-type]
    server = make_server(assemble_with(engine, control), settings)
    with in_a_thread(server) as port, Client(f"http://127.0.0.1:{port}", timeout=60) as client:
        until(client.ready)
        client.upload("encoder", EXAMPLES / "embedding" / "encoder.onnx")
        client.upload("digit", EXAMPLES / "digit" / "pipeline.toml")
        client.upload("embedding", EXAMPLES / "embedding" / "pipeline.toml")
        yield Running(server, port, client, root)
