"""Makes the result of a job a version: judged by its gate, with its lineage, once however often it is tried.

The decision is written down before it is acted on, and is part of what is published. So whoever comes back after a
crash publishes the same again, which the job's id, as idempotency key, makes the same change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from core.train.durable import write_file
from server.errors import Conflict, Internal, NotFound, Unprocessable
from server.jobs.folders import RESULT
from server.jobs.gate import Gate, Live, decide
from server.jobs.job import Finished, Job, Publish
from server.jobs.judge import read_record
from server.repository.manifest import MODEL_FILE
from server.repository.names import LIVE
from server.repository.rollout import Compared, LiveMoved, PublishOptions, Rollout
from server.repository.store import JOBS, Origin, Outcome, storage_errors

DECISION = "gate.json"
_BLOCK = 1 << 20
_TRIES = 5  # while others keep moving the alias


class Judge(Protocol):
    """Finds out what a version is worth."""

    async def judge(self, job: Job, folder: Path, model: str, version: int) -> Live:
        """Return what it is worth on the rows that a job kept from training."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision as it is kept: what versions and jobs show of it, and what it hangs on."""

    shown: Mapping[str, Any]
    passed: bool
    reason: str
    compared: bool  # whether another version had a part in it
    before: int | None  # what the alias named

    def dump(self) -> bytes:
        """Return the document."""
        return orjson.dumps(self)

    @classmethod
    def parse(cls, raw: bytes) -> Decided:
        """Read the document."""
        return cls(**orjson.loads(raw))


class Publisher:
    """Publishes results through the repository."""

    def __init__(self, rollout: Rollout, judge: Judge) -> None:
        self._rollout = rollout
        self._judge = judge

    async def finish(self, job: Job, folder: Path) -> Finished:
        """Publish ``folder/result``; raises ServerError."""
        asked = job.order.publish
        if asked is None:
            raise Internal(f"job {job.id} has nothing to publish")
        record = await asyncio.to_thread(read_record, folder)
        if record.get("data") != job.order.dataset.digest:
            raise Unprocessable(f"job {job.id}: its result was not made from the data it was given")
        for _ in range(_TRIES):
            decided = await self._decide(job, asked, folder, record)
            try:
                return await self._carry_out(job, asked, folder, record, decided)
            except LiveMoved:
                await asyncio.to_thread((folder / DECISION).unlink, True)
        raise Conflict(f"alias {LIVE!r} of model {asked.model!r} is being moved by others")

    # deciding

    async def _decide(self, job: Job, asked: Publish, folder: Path, record: Mapping[str, Any]) -> Decided:
        """Return the decision, which is durable."""
        try:
            return Decided.parse(await asyncio.to_thread((folder / DECISION).read_bytes))
        except FileNotFoundError:
            decided = await self._judged(job, asked, folder, record)
        with storage_errors("writing down the gate's decision"):
            await asyncio.to_thread(write_file, folder / DECISION, decided.dump())
        return decided

    async def _judged(self, job: Job, asked: Publish, folder: Path, record: Mapping[str, Any]) -> Decided:
        gate = Gate.model_validate(asked.gate or {})
        before, live = self._named(asked.model, asked.alias or LIVE), None
        compares = gate.not_worse_than_live is not None
        if compares and before is not None:
            live = await self._judge.judge(job, folder, asked.model, before)
        decision = decide(gate, record["metrics"], live)
        return Decided(decision.to_json(), decision.passed, decision.reason, compares, before)

    def _named(self, model: str, alias: str) -> int | None:
        try:
            return self._rollout.catalog.model(model).aliases.version(alias)
        except NotFound:
            return None

    # acting on it

    async def _carry_out(
        self, job: Job, asked: Publish, folder: Path, record: Mapping[str, Any], decided: Decided
    ) -> Finished:
        if not decided.passed and Gate.model_validate(asked.gate or {}).refused == "discard":
            return Finished(asked.model, None, False, decided.shown)
        options = PublishOptions(
            promote=decided.passed and asked.alias == LIVE,
            allow_signature_change=asked.allow_signature_change,
            metadata={"lineage": lineage(job, record, decided)},
            origin=_origin(job, ""),
            withheld=not decided.passed,
            compared=Compared(decided.before) if decided.compared and asked.alias in (None, LIVE) else None,
            reason="" if decided.passed else f"refused by the gate: {decided.reason}",
        )
        outcome = await self._rollout.publish(asked.model, _blocks(folder / RESULT / MODEL_FILE), options)
        moved = decided.passed and await self._move(job, asked, outcome)
        return Finished(asked.model, outcome.version, moved, decided.shown)

    async def _move(self, job: Job, asked: Publish, outcome: Outcome) -> bool:
        """Let another alias than the live one name the version; returns whether the alias in question names it."""
        if asked.alias in (None, LIVE):
            return outcome.record.state.version(LIVE) == outcome.version
        await self._rollout.set_alias(
            asked.model,
            asked.alias,
            outcome.version,
            _origin(job, "-alias"),
            allow_signature_change=asked.allow_signature_change,
        )
        return True


def lineage(job: Job, record: Mapping[str, Any], decided: Decided) -> dict[str, Any]:
    """Return where a version comes from, as its manifest keeps it."""
    order, parent = job.order, job.order.model
    return {
        "job": order.id,
        "kind": order.kind,
        "owner": order.owner,
        "dataset": {"name": order.dataset.name, "digest": order.dataset.digest},
        "parent": {"model": parent.name, "version": parent.version, "digest": parent.digest} if parent else None,
        "recipe": record.get("recipe", dict(order.recipe)),
        "seed": record.get("seed"),
        "rows": record.get("rows"),
        "classes": record.get("classes"),
        "metrics": record["metrics"],
        "code": record.get("version"),
        "gate": dict(decided.shown),
    }


def _origin(job: Job, what: str) -> Origin:
    return Origin(job.order.owner or f"job {job.id}", f"{job.id}{what}", space=JOBS)


async def _blocks(file: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(open, file, "rb") as source:
        while block := await asyncio.to_thread(source.read, _BLOCK):
            yield block
