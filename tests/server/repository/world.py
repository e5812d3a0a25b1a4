"""A repository service in a few lines: toy models, a backend that scales, a compiler that copies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lathe.server.backends.base import MemoryNeeds
from lathe.server.errors import Unavailable, Unprocessable
from lathe.server.repository.artifacts import ArtifactCache, BuildOptions
from lathe.server.repository.builder import Builder
from lathe.server.repository.fs import Fs
from lathe.server.repository.housekeeping import Housekeeping
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.loader import Loader
from lathe.server.repository.memory_budget import MemoryBudget
from lathe.server.repository.registry import Registry
from lathe.server.repository.rollout import PublishOptions, Rollout, UploadLimits
from lathe.server.repository.store import Origin, Outcome, Store
from lathe.server.repository.watcher import Watcher
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.servable import ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import Tensors, TensorSpec

T = TypeVar("T")


def pause(seconds: float) -> None:
    """Wait, as a toy model with a delay does."""
    time.sleep(seconds)


def toy(scale: float = 2.0, shape: tuple[int, ...] = (-1, 4), **more: Any) -> bytes:
    """A model file whose model multiplies by `scale`."""
    return b"\x08" + json.dumps({"scale": scale, "shape": shape, **more}).encode()


@dataclass
class ToyModel:
    scale: float
    shape: tuple[int, ...]
    backend: ToyBackend
    max_batch: int = 8
    batchable: bool = True
    batch_reason: str = "elementwise"
    memory_bytes: int = 1
    platform: str = "toy"
    fails_every: int = 0  # every n-th execution fails; 0: none
    differs_every: int = 0  # every n-th execution gives another result; 0: none
    delay: float = 0.0  # seconds
    packs: bool = False
    packing_reason: str = ""
    devices: tuple[str, ...] = ()
    lost: str = ""  # the reason why its device was lost, set by a test
    executed: int = 0
    closed: Callable[[], None] = lambda: None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("x", "FP32", self.shape),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("y", "FP32", self.shape),)

    def execute(self, inputs: Tensors) -> Tensors:
        self.executed += 1
        pause(self.delay)
        if self.fails_every and self.executed % self.fails_every == 0:
            raise RuntimeError("as told")
        differs = self.differs_every and self.executed % self.differs_every == 0
        return {"y": np.asarray(inputs["x"] * np.float32(self.scale + bool(differs)))}

    def tokens(self, inputs: Tensors) -> int:
        return inputs["x"].size

    def execute_packed(self, requests: list[Tensors]) -> list[Tensors]:
        return [self.execute(inputs) for inputs in requests]

    def close(self) -> None:
        self.backend.open_models -= 1
        self.backend.open_lost -= bool(self.lost)
        self.closed()


@dataclass
class ToyBackend:
    open_models: int = 0
    open_lost: int = 0  # number of open models of a lost device
    refusals: int = 0  # number of loads that will be refused
    loads: list[Path] = field(default_factory=list)

    def needs(self, artifact: Path) -> MemoryNeeds:
        model = json.loads((artifact / "toy.json").read_text())
        return MemoryNeeds(model.get("weights", 0), model.get("run", 0))

    def load(self, artifact: Path, threads: int | None, closed: Callable[[], None] = lambda: None) -> ToyModel:
        model = json.loads((artifact / "toy.json").read_text())
        self.loads.append(artifact)
        if self.open_lost:
            raise Unavailable("models that ran on the device are not closed")
        if model.get("do") == "refuse to load" or self.refusals:
            self.refusals = max(0, self.refusals - 1)
            raise Unprocessable("the artifact does not load")
        self.open_models += 1
        names = ("fails_every", "differs_every", "delay", "packs", "packing_reason", "batchable", "batch_reason")
        habits = {name: model[name] for name in names if name in model}
        return ToyModel(model["scale"], tuple(model["shape"]), self, **habits, closed=closed)


class ToyStages:
    """Runs the stages of the child processes in this process."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.flags: list[list[str]] = []
        self.gate = threading.Event()  # while cleared, compilations wait
        self.gate.set()

    @asynccontextmanager
    async def at_normal_priority(self) -> AsyncIterator[None]:
        yield

    async def run(self, task: str, *arguments: str | Path) -> None:
        self.runs.append(task)
        self.flags.append([str(argument) for argument in arguments[2:]])
        while task == "compile" and not self.gate.is_set():  # noqa: ASYNC110 - other threads open it, too
            await asyncio.sleep(0.002)
        self._stage(task, Path(arguments[0]), Path(arguments[1]))

    def _stage(self, task: str, source: Path, out: Path) -> None:
        out.mkdir()
        if task == "compile":
            shutil.copy(source / "graph.json", out / "toy.json")
            return
        try:
            model = json.loads(source.read_bytes()[1:])
        except ValueError:
            raise Unprocessable("no operator 'Bad' in opset 21") from None
        (out / "graph.json").write_text(json.dumps(model))


@dataclass
class World:
    """The repository as one server process sees it."""

    root: Path
    store: Store
    registry: Registry
    rollout: Rollout
    watcher: Watcher
    loader: Loader
    backend: ToyBackend
    stages: ToyStages
    cache: ArtifactCache
    book: StatsBook

    async def push(self, content: bytes, name: str = "m", *, key: str | None = None, **options: Any) -> Outcome:
        """Upload a model file."""
        return await self.push_as(Origin("test", key), content, name, **options)

    async def push_as(self, origin: Origin, content: bytes, name: str = "m", **options: Any) -> Outcome:
        """Upload a model file as this caller."""
        asked = PublishOptions(origin=origin, **options)
        return await self.rollout.publish(name, chunks(content), asked)

    def scale(self, version: str = "", name: str = "m") -> float:
        """The factor by which a request would be multiplied, which identifies the version that answers."""
        servable = self.registry.resolve(name, version)
        return float(servable.model.execute({"x": np.ones((1, 4), np.float32)})["y"][0, 0])

    def model(self, name: str) -> LiveModel:
        """A model, as the rollout sees it."""
        return self.rollout._models.get(name)

    def live(self, name: str = "m") -> int:
        """The version that answers a request without a version."""
        return self.registry.resolve(name).ref.version

    def leftovers(self) -> list[str]:
        """The files left in staging, trash and the compiler's work folder."""
        staged = self.root.glob(".lathe/staging/*/*/*")
        return [str(p) for p in (*staged, *self.root.glob(".lathe/trash/*"), *self.root.glob(".cache/work/*"))]


@asynccontextmanager
async def world(
    root: Path,
    fs: Fs | None = None,
    *,
    keep_versions: int = 16,
    max_upload: int = 1 << 20,
    max_staging: int = 1 << 30,
    settle: float = 0.0,
    memory: MemoryBudget | None = None,
) -> AsyncIterator[World]:
    """Start the repository service of a server, and stop it in order."""
    os.makedirs(root, exist_ok=True)
    store, registry, backend, stages = Store(root, fs, max_staging=max_staging), Registry(), ToyBackend(), ToyStages()
    cache = ArtifactCache(root / ".cache", 1 << 30)
    settings, pool, book = Settings(), WorkerPool(1), StatsBook()
    builder = Builder(stages, cache, backend, BuildOptions(8, "float32", 1), memory)  # type: ignore[arg-type]
    models = LiveModels(registry)
    loader = Loader(store, builder, ServableFactory(settings, pool, book), models)
    housekeeping = Housekeeping(store, loader, cache, keep_versions)
    rollout = Rollout(store, models, loader, housekeeping, UploadLimits(max_upload))
    watcher = Watcher(store, rollout, 0.01, settle)
    await rollout.open()
    await asyncio.to_thread(cache.open)
    await watcher.start()
    try:
        yield World(root, store, registry, rollout, watcher, loader, backend, stages, cache, book)
    finally:
        await rollout.stop()
        await asyncio.to_thread(pool.close)
    assert backend.open_models == 0, "a model was never closed"
    assert memory is None or memory.claimed_bytes == 0, "memory was never given back"


async def chunks(content: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    """Send bytes in chunks, as a request's body arrives."""
    for start in range(0, len(content), size):
        yield content[start : start + size]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine."""
    return asyncio.run(work)


def files(root: Path) -> list[Path]:
    """All files in a folder."""
    return sorted(root.rglob("*"))


def copy_by_hand(root: Path, version: int, content: bytes, name: str = "m") -> Path:
    """Copy a version's folder into the repository, as a user does with cp."""
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(content)
    return folder
