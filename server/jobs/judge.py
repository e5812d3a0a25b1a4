"""What the version that is live is worth on the rows that a result was judged by: measured in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from core.train.durable import write_file
from server.errors import Internal, Unavailable
from server.jobs.folders import LOG, PARENT, RECIPE, RESULT
from server.jobs.gate import Live
from server.jobs.job import Job
from server.jobs.ports import Datasets, Parents
from server.jobs.runner import Bounds, End, Run
from server.repository.fs import Fs, remove_tree
from server.repository.manifest import MODEL_FILE

MODULE = "core.train.evaluate"
_GRACE = 1.0  # seconds: there is no checkpoint to write
_LARGEST = 64 << 20  # bytes of a result's metrics


@dataclass(frozen=True, slots=True)
class Judge:
    """Runs versions over the held-out rows of jobs."""

    datasets: Datasets
    parents: Parents
    threads: int
    disk: int  # bytes that one judgement may write

    async def judge(self, job: Job, folder: Path, model: str, version: int) -> Live:
        """Return what a version is worth on the rows that ``job``, in ``folder``, kept from training.

        One that cannot be run on them comes with the reason. Raises NotFound, Unavailable, Internal.
        """
        work = folder / "gate" / str(version)
        if not (work / RESULT).is_dir():
            pin = await self.parents.pin(model, str(version))
            await asyncio.to_thread(_prepare, work, _recipe(job, await asyncio.to_thread(read_record, folder)))
            await asyncio.to_thread(self.parents.link, pin, work / PARENT)
            if fault := await self._run(job, work):
                return Live(version, {}, fault)
        return Live(version, (await asyncio.to_thread(read_record, work))["metrics"])

    async def _run(self, job: Job, work: Path) -> str:
        """Run the child process; returns what was wrong with model or data."""
        limits = job.order.limits
        bounds = Bounds(limits.seconds, limits.memory, self.disk, _GRACE, idle=False)  # short, and a result waits
        async with self.datasets.hold(job.order.dataset.digest) as data:
            command = _command(work, data.path, self.threads)
            ending = await Run(command, work / LOG, bounds, lambda: 0).to_end()
        match ending.end:
            case End.DONE:
                return ""
            case End.REFUSED:
                return ending.reason
            case End.STOPPED:
                raise Unavailable("judging the live version was broken off")
        raise Internal(f"judging the live version failed: {ending.reason}")


def _command(work: Path, data: Path, threads: int) -> list[str]:
    work, data = work.absolute(), data.absolute()
    parent = work / PARENT / MODEL_FILE
    return [MODULE, str(work), "--dataset", str(data), "--parent", str(parent), "--threads", str(threads)]


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a result says of itself; raises Internal for one that does not read."""
    file = folder / RESULT / "metrics.json"
    try:
        record = orjson.loads(file.read_bytes()) if file.stat().st_size <= _LARGEST else None
    except (OSError, orjson.JSONDecodeError) as error:
        raise Internal(f"the result's metrics cannot be read ({type(error).__name__})") from error
    if not isinstance(record, dict) or not isinstance(record.get("metrics"), dict):
        raise Internal("the result's metrics are no metrics")
    return record


def _prepare(work: Path, recipe: Mapping[str, Any]) -> None:
    """Make the folder anew: what a broken-off judgement left is of no use."""
    remove_tree(Fs(), work)
    work.mkdir(parents=True)
    write_file(work / RECIPE, orjson.dumps(recipe))


def _recipe(job: Job, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the version is judged: on the very rows, as the training's own split deals them out."""
    trained = record.get("recipe", job.order.recipe)
    recipe = {"data": trained.get("data", {}), "rows": "test", "operators": False}
    return {**recipe, "dealt": record["classes"]} if record.get("classes") else recipe
