"""A whole server process with fake jobs and toy models: `python -m tests.server.jobs.standalone ROOT`.

Prints its port. While the file ROOT/hold exists, publishing waits in the compiler."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from lathe.server.app import Engine, assemble_with
from lathe.server.repository.assembly import build_control_plane
from lathe.server.repository.registry import Registry
from lathe.server.serve import LatheServer, make_server
from lathe.server.settings import Settings
from tests.server.jobs.world import fake_jobs
from tests.server.repository.world import ToyBackend, ToyStages


class HeldStages(ToyStages):
    """A fake compiler that waits until a file is removed."""

    def __init__(self, hold: Path) -> None:
        super().__init__()
        self.hold = hold

    async def run(self, task: str, *arguments: str | Path) -> None:
        while task == "compile" and self.hold.exists():  # noqa: ASYNC110 - the test removes it
            await asyncio.sleep(0.01)
        await super().run(task, *arguments)


class Announcing(LatheServer):
    """Prints the port on which it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


def main(root: Path) -> None:
    config = Settings(port=0, model_repo=root, drain_timeout=3, poll_interval=0.05)
    engine = Engine.build(config, registry := Registry())
    stages = HeldStages(root / "hold")
    control = build_control_plane(config, registry, ToyBackend(), engine.factory, stages)  # type: ignore[arg-type]
    app = assemble_with(engine, control, make_jobs=fake_jobs)
    Announcing(make_server(app, config).config, app).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
