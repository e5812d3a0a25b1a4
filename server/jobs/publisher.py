"""Publishes the result of a job as a version, after the decision of its gate and with its lineage; idempotent.

The decision is stored before it takes effect, and is part of the version's metadata. So an attempt after a crash
publishes the same content again under the same idempotency key, the job's id, and the repository makes no second
version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from lathe.core.train.run.durable_files import write_file
from lathe.server.errors import Conflict, Internal, NotFound, Unprocessable
from lathe.server.jobs.evaluator import read_metrics_document
from lathe.server.jobs.folders import RESULT
from lathe.server.jobs.gate import Gate, LiveMetrics, evaluate_gate
from lathe.server.jobs.job import Job, Publication, PublishRequest
from lathe.server.repository.manifest import MODEL_FILE
from lathe.server.repository.names import LIVE_ALIAS
from lathe.server.repository.rollout import Baseline, LiveVersionChanged, PublishOptions, Rollout
from lathe.server.repository.store import JOB_KEY_NAMESPACE, Origin, Outcome, storage_errors

DECISION = "gate.json"
_BLOCK = 1 << 20  # bytes
_ATTEMPTS = 5  # attempts while other callers keep moving the alias


class Evaluator(Protocol):
    """Evaluates versions."""

    async def judge(self, job: Job, folder: Path, model: str, version: int) -> LiveMetrics:
        """Return the metrics of a version on the test rows of a job, whose folder is `folder`; raises ServerError."""


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A gate's decision as it is stored (`shown`: its JSON document), with the alias's version that it was based on."""

    shown: Mapping[str, Any]
    passed: bool
    reason: str
    compared: bool  # whether the gate compares with another version
    before: int | None  # the version that the alias named

    def dump(self) -> bytes:
        """Serialize the decision."""
        return orjson.dumps(self)

    @classmethod
    def parse(cls, raw: bytes) -> StoredDecision:
        """Parse a serialized decision."""
        return cls(**orjson.loads(raw))


class Publisher:
    """Publishes results through the repository."""

    def __init__(self, rollout: Rollout, judge: Evaluator) -> None:
        self._rollout = rollout
        self._judge = judge

    async def finish(self, job: Job, folder: Path) -> Publication:
        """Publish the model in `folder/result` unless its gate discards it; idempotent. Raises ServerError, OSError.

        The version of the returned `Publication` is None if the gate discarded the model. The gate's decision is stored
        in `folder`. Conflict if other callers move the live alias during each of 5 attempts.
        """
        request = job.order.publish
        if request is None:
            raise Internal(f"job {job.id} has nothing to publish")
        record = await asyncio.to_thread(read_metrics_document, folder)
        if record.get("data") != job.order.dataset.digest:
            raise Unprocessable(f"job {job.id}: its result was made from another dataset than the job's")
        for _ in range(_ATTEMPTS):
            decided = await self._decide(job, request, folder, record)
            try:
                return await self._publish(job, request, folder, record, decided)
            except LiveVersionChanged:
                await asyncio.to_thread((folder / DECISION).unlink, True)
        raise Conflict(f"alias {LIVE_ALIAS!r} of model {request.model!r} is being moved by other callers")

    # decision

    async def _decide(
        self, job: Job, request: PublishRequest, folder: Path, record: Mapping[str, Any]
    ) -> StoredDecision:
        """Return the decision stored in the job's `folder`; without one, evaluate the gate and store its decision."""
        try:
            return StoredDecision.parse(await asyncio.to_thread((folder / DECISION).read_bytes))
        except FileNotFoundError:
            decided = await self._evaluate_gate(job, request, folder, record)
        with storage_errors("storing the gate's decision"):
            await asyncio.to_thread(write_file, folder / DECISION, decided.dump())
        return decided

    async def _evaluate_gate(
        self, job: Job, request: PublishRequest, folder: Path, record: Mapping[str, Any]
    ) -> StoredDecision:
        gate = Gate.model_validate(request.gate or {})
        before, live = self._alias_version(request.model, request.alias or LIVE_ALIAS), None
        is_comparison = gate.not_worse_than_live is not None
        if is_comparison and before is not None:
            live = await self._judge.judge(job, folder, request.model, before)
        decision = evaluate_gate(gate, record["metrics"], live)
        return StoredDecision(decision.to_json(), decision.passed, decision.reason, is_comparison, before)

    def _alias_version(self, model: str, alias: str) -> int | None:
        try:
            return self._rollout.catalog.model(model).aliases.version(alias)
        except NotFound:
            return None

    # publication

    async def _publish(
        self, job: Job, request: PublishRequest, folder: Path, record: Mapping[str, Any], decided: StoredDecision
    ) -> Publication:
        if not decided.passed and Gate.model_validate(request.gate or {}).refused == "discard":
            return Publication(request.model, None, False, decided.shown)
        options = PublishOptions(
            promote=decided.passed and request.alias == LIVE_ALIAS,
            allow_signature_change=request.allow_signature_change,
            metadata={"lineage": lineage(job, record, decided)},
            origin=_origin(job, ""),
            without_alias=not decided.passed,
            compared=Baseline(decided.before) if decided.compared and request.alias in (None, LIVE_ALIAS) else None,
            reason="" if decided.passed else f"refused by the gate: {decided.reason}",
        )
        outcome = await self._rollout.publish(request.model, _blocks(folder / RESULT / MODEL_FILE), options)
        moved = decided.passed and await self._move(job, request, outcome)
        return Publication(request.model, outcome.version, moved, decided.shown)

    async def _move(self, job: Job, request: PublishRequest, outcome: Outcome) -> bool:
        """Move the requested alias, if it is not the live one; returns whether the requested alias names the version.

        The publication itself moves the live alias.
        """
        if request.alias in (None, LIVE_ALIAS):
            return outcome.record.state.version(LIVE_ALIAS) == outcome.version
        await self._rollout.set_alias(
            request.model,
            request.alias,
            outcome.version,
            _origin(job, "-alias"),
            allow_signature_change=request.allow_signature_change,
        )
        return True


def lineage(job: Job, record: Mapping[str, Any], decided: StoredDecision) -> dict[str, Any]:
    """Return the origin of a version (job, dataset, parent, recipe, metrics, gate) for the metadata in its manifest."""
    order, parent = job.order, job.order.model
    figures = {"figures": record["figures"]} if "figures" in record else {}  # of a compression: before and after
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
        **figures,
    }


def _origin(job: Job, key_suffix: str) -> Origin:
    return Origin(job.order.owner or f"job {job.id}", f"{job.id}{key_suffix}", space=JOB_KEY_NAMESPACE)


async def _blocks(file: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(open, file, "rb") as source:
        while block := await asyncio.to_thread(source.read, _BLOCK):
            yield block
