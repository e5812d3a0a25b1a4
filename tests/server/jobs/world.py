"""A job service with real folders, database and processes, and fake data and publishing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from lathe.server.access.authority import Caller
from lathe.server.errors import NotFound, ServerError, Unprocessable
from lathe.server.jobs.assembly import Interfaces, Jobs, build_jobs, job_resources
from lathe.server.jobs.job import DatasetPin, Job, JobLimits, JobState, ModelPin, Order, Publication
from lathe.server.jobs.kinds import Kind, Kinds
from lathe.server.jobs.scheduler import Policy
from lathe.server.jobs.service import JobRequest
from lathe.server.repository.fs import Fs
from lathe.server.settings import Settings

T = TypeVar("T")
DIGEST = "d" * 64
ANYBODY = Caller()


def _check(recipe: Mapping[str, Any]) -> None:
    if not isinstance(recipe.get("steps"), int):
        raise ValueError(f"steps: expected a whole number, got {recipe.get('steps')!r}")


FAKE = "tests.server.jobs.fake_job"
KINDS = Kinds(
    {
        "train": Kind(FAKE, _check, lambda: BaseModel),
        "finetune": Kind(FAKE, _check, lambda: BaseModel, needs_model=True),
        "compress": Kind(FAKE, _check, lambda: BaseModel, needs_model=True),
    }
)


@dataclass
class Data:
    """One dataset, named digits."""

    path: Path
    digest: str = DIGEST
    held: int = 0

    @classmethod
    def at(cls, folder: Path) -> Data:
        folder.mkdir(exist_ok=True)
        (folder / "data.npz").write_text("data")
        return cls(folder / "data.npz")

    @asynccontextmanager
    async def hold(self, reference: str) -> AsyncIterator[Data]:
        if reference not in {"digits", DIGEST}:
            raise NotFound(f"there is no dataset {reference!r}")
        self.held += 1
        try:
            yield self
        finally:
            self.held -= 1

    async def name_of(self, reference: str) -> str:
        return "digits" if reference == DIGEST else reference


class Versions:
    """Model m with version 3, and the pipeline p."""

    async def pin(self, model: str, version: str) -> ModelPin:
        if model == "p":
            raise Unprocessable("version 1 of model 'p' has no ONNX model, which a job could read")
        if (model, version) not in {("m", "3"), ("m", "live")}:
            raise NotFound(f"model {model!r} has no version {version}")
        return ModelPin("m", 3, "e" * 64)

    def link(self, pin: ModelPin, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.onnx").write_text("parent")


@dataclass
class FakePublisher:
    """A fake publisher: records publications and makes one version per job."""

    versions: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    errors: list[ServerError | Exception] = field(default_factory=list)  # raised by the next calls
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def finish(self, job: Job, folder: Path) -> Publication:
        self.calls += 1
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        assert (folder / "result" / "model.onnx").exists()
        return Publication("m", self.versions.setdefault(job.id, len(self.versions) + 1), True, {"passed": True})


@dataclass
class World:
    """A running job service."""

    jobs: Jobs
    data: Data
    publisher: FakePublisher

    async def submit(self, owner: Caller = ANYBODY, key: str | None = None, **recipe: Any) -> Job:
        return (await self.jobs.service.submit(owner, job_request(**recipe), key))[0]

    def job(self, job: Job | str) -> Job:
        return self.jobs.register.get(job if isinstance(job, str) else job.id)

    def folder(self, job: Job) -> Path:
        return self.jobs.register.folders.path(job.id)

    async def reach(self, job: Job, *states: JobState) -> Job:
        """Wait until a job is in one of these states, by default until it has ended."""
        await until(lambda: self.job(job).state in states if states else self.job(job).state.is_final)
        return self.job(job)


def job_request(
    publish: Any = None, priority: int = 0, seconds_limit: float | None = None, **recipe: Any
) -> JobRequest:
    memory = recipe.pop("memory", None)
    kind, model = recipe.pop("kind", "train"), recipe.pop("parent", None)
    recipe = {"steps": 3, **recipe}
    return JobRequest(kind, recipe, "digits", model, "live", publish, priority, seconds_limit, memory)


def fake_jobs(settings: Settings, ports: Interfaces, draining: Callable[[], bool]) -> Jobs:
    """Jobs for a whole server: the fake process, toy data, and the server's own publisher."""
    toys = replace(ports, datasets=Data.at(settings.model_repo))
    return build_jobs(settings, toys, draining, KINDS, replace(job_resources(settings), idle=False))


@asynccontextmanager
async def world(
    folder: Path, publisher: FakePublisher | None = None, fs: Fs | None = None, least_run: float = 5.0, **settings: Any
) -> AsyncIterator[World]:
    """Run a job service in a folder until the end of the block."""
    data = Data.at(folder)
    if publisher is None:
        publisher = FakePublisher()
        publisher.gate.set()
    config = Settings(model_repo=folder, job_threads=1, **settings)
    allowance = replace(  # low instead of idle priority, because the machine that runs tests is busy
        job_resources(config), idle=False, policy=Policy(config.job_slots, min_run_seconds=least_run)
    )
    jobs = build_jobs(config, Interfaces(data, Versions(), publisher), lambda: False, KINDS, allowance, fs)
    async with jobs.running():
        yield World(jobs, data, publisher)
    assert data.held == 0


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Return when the condition holds; fail the test if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine."""
    return asyncio.run(asyncio.wait_for(scenario, 90))


def order(job_id: str = "0" * 20, **more: Any) -> Order:
    """A valid order; `more` replaces fields."""
    facts: dict[str, Any] = {
        "id": job_id,
        "owner": "ann",
        "kind": "train",
        "recipe": {"steps": 3},
        "dataset": DatasetPin("digits", DIGEST),
        "model": None,
        "publish": None,
        "priority": 0,
        "limits": JobLimits(60.0, 1 << 30),
        "submitted": 100.0,
    }
    return Order(**(facts | more))
