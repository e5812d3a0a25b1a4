"""Evaluates the live version on the rows that a result was evaluated on, in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lathe.core.train.run.durable_files import write_file
from lathe.server.errors import Internal, Unavailable
from lathe.server.jobs.folders import LOG, PARENT, RECIPE, RESULT
from lathe.server.jobs.gate import LiveMetrics
from lathe.server.jobs.interfaces import Datasets, Parents
from lathe.server.jobs.job import Job
from lathe.server.jobs.result_metrics import read_document
from lathe.server.jobs.runner import Attempt, EndKind, ResourceBounds
from lathe.server.repository.fs import Fs, remove_tree
from lathe.server.repository.manifest import MODEL_FILE

MODULE = "lathe.core.train.run.evaluation_process"
_GRACE = 1.0  # seconds to stop: there is no checkpoint to write


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates versions on the held-out rows of jobs."""

    datasets: Datasets
    parents: Parents
    threads: int
    disk: int  # bytes that one evaluation may write

    async def judge(self, job: Job, folder: Path, model: str, version: int) -> LiveMetrics:
        """Return the metrics of a version on the test rows of `job`, whose folder is `folder`.

        The result is kept in the folder, and read again by a later call. `LiveMetrics.fault` says why a version cannot
        be evaluated on these rows. Raises NotFound, Unprocessable for a version that is no ONNX model, Unavailable if
        the evaluation was interrupted, Internal if it failed, OSError.
        """
        work = folder / "gate" / str(version)
        if not (work / RESULT).is_dir():
            pin = await self.parents.pin(model, str(version))
            await asyncio.to_thread(
                _prepare, work, _recipe(job, await asyncio.to_thread(read_metrics_document, folder))
            )
            await asyncio.to_thread(self.parents.link, pin, work / PARENT)
            if fault := await self._run(job, work):
                return LiveMetrics(version, {}, fault)
        return LiveMetrics(version, (await asyncio.to_thread(read_metrics_document, work))["metrics"])

    async def _run(self, job: Job, work: Path) -> str:
        """Run the evaluation in a child process, in the folder `work`; returns "" if it succeeded.

        Otherwise returns why model or data cannot be evaluated. Raises Unavailable if it was stopped, Internal if it
        crashed.
        """
        limits = job.order.limits
        bounds = ResourceBounds(
            limits.seconds, limits.memory, self.disk, _GRACE, idle=False
        )  # not idle: it is short, and a result waits for it
        async with self.datasets.hold(job.order.dataset.digest) as data:
            command = _command(work, data.path, self.threads)
            ending = await Attempt(command, work / LOG, bounds, lambda: 0).run()
        match ending.end:
            case EndKind.DONE:
                return ""
            case EndKind.REFUSED:
                return ending.reason
            case EndKind.STOPPED:
                raise Unavailable("the evaluation of the live version was interrupted")
        raise Internal(f"the evaluation of the live version failed: {ending.reason}")


def _command(work: Path, data: Path, threads: int) -> list[str]:
    work, data = work.absolute(), data.absolute()
    parent = work / PARENT / MODEL_FILE
    return [MODULE, str(work), "--dataset", str(data), "--parent", str(parent), "--threads", str(threads)]


def read_metrics_document(folder: Path) -> dict[str, Any]:
    """Return the document in `result/metrics.json` of a job's folder, which has an object `metrics`.

    Raises Internal if the file is missing, invalid or larger than 64 MiB.
    """
    try:
        record = read_document(folder / RESULT / "metrics.json")
    except (OSError, ValueError) as error:
        raise Internal(f"the result's metrics cannot be read ({type(error).__name__})") from error
    if record is None or not isinstance(record.get("metrics"), dict):
        raise Internal("the result's metrics: expected an object with 'metrics'")
    return record


def _prepare(work: Path, recipe: Mapping[str, Any]) -> None:
    """Make the folder `work` with the recipe in it; removes the folder of an interrupted evaluation first."""
    remove_tree(Fs(), work)
    work.mkdir(parents=True)
    write_file(work / RECIPE, orjson.dumps(recipe))


def _recipe(job: Job, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of the evaluation: the test rows of the split in `record`, the training's metrics document."""
    training = record.get("recipe", job.order.recipe)
    recipe = {"data": training.get("data", {}), "rows": "test", "operators": False}
    if "text" in training:
        recipe["text"] = training["text"]
    return {**recipe, "dealt": record["classes"]} if record.get("classes") else recipe
