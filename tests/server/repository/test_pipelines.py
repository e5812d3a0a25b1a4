"""Pipelines in the repository: published, served, pinned to versions or following an alias."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from server.access.authority import Authority
from server.archive import archive_of
from server.dataplane import DataPlane
from server.types import InferRequest
from tests.server.repository.world import World, run, toy, world

CHAIN = """
inputs = ["x"]
outputs = ["y"]

[[step]]
name = "first"
model = "two"
version = 1
inputs = {x = "x"}
outputs = {y = "middle"}

[[step]]
name = "second"
model = "three"
inputs = {x = "middle"}
outputs = {y = "y"}
"""


def packed(text: str, **files: bytes) -> bytes:
    body = archive_of({"pipeline.toml": [text.encode()]} | {name: [content] for name, content in files.items()})
    return b"".join(body.pieces())


async def ask(repo: World, model: str, version: str = "") -> float:
    plane = DataPlane(repo.registry, Authority("127.0.0.1", None))
    result = await plane.infer(InferRequest(model, {"x": np.ones((3, 4), np.float32)}, version))
    assert result.outputs["y"].shape == (3, 4)
    return float(result.outputs["y"][0, 0])


def test_two_models_are_served_as_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await repo.push(toy(2.0), "two")
            await repo.push(toy(3.0), "three")
            await repo.push(packed(CHAIN), "chain")
            assert await ask(repo, "chain") == 6.0
            await repo.push(toy(5.0), "two", promote=True)
            await repo.push(toy(7.0), "three", promote=True)
            assert await ask(repo, "chain") == 14.0

    run(scenario())
