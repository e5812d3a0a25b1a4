"""Changes while a pipeline answers: aliases and candidates of its models, and its own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from lathe.server.canary.plan import CanaryPlan
from lathe.server.errors import ServerError
from lathe.server.repository.store import Origin
from tests.server.repository.test_pipelines import CHAIN, ask, packed, with_models
from tests.server.repository.world import World, run, toy, world
from tests.server.service import service

NOBODY = Origin("test")
CALLERS = 6


class Answer(NamedTuple):
    sent: float
    came: float
    value: float  # NaN if the answer is an error or NaN


@dataclass
class Load:
    """Concurrent clients of the pipeline that send requests without a pause."""

    repo: World
    answers: list[Answer] = field(default_factory=list)
    errors: list[ServerError] = field(default_factory=list)
    over: bool = False

    async def call(self) -> None:
        while not self.over:
            sent = monotonic()
            try:
                value = await ask(self.repo, "chain")
            except ServerError as error:
                self.errors.append(error)
                value = math.nan
            self.answers.append(Answer(sent, monotonic(), value))

    async def wait_for_answers(self, count: int) -> None:
        """Return after `count` more answers."""
        until = len(self.answers) + count
        while len(self.answers) < until:  # noqa: ASYNC110 - an event for each answer would make the load another
            await asyncio.sleep(0.001)

    async def change(self, work: Awaitable[Any], before: float, after: float) -> None:
        """Make a change and check the answers: once it is acknowledged, all answers are those after the change."""
        await self.wait_for_answers(30)
        begun, made = len(self.answers), monotonic()
        await work
        acknowledged = monotonic()
        await self.wait_for_answers(30)
        for answer in self.answers[begun:]:
            allowed = {after} if answer.sent > acknowledged else {before} if answer.came < made else {before, after}
            assert answer.value in allowed, answer


@asynccontextmanager
async def pipeline_under_load(tmp_path: Path) -> AsyncIterator[tuple[World, Load]]:
    """The pipeline, which multiplies by 2 and then by 3, under load."""
    async with world(tmp_path) as repo:
        await with_models(repo)
        load = Load(repo)
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(load.call())
            try:
                yield repo, load
            finally:
                load.over = True


def test_a_models_alias_moves_and_returns_under_a_busy_pipeline(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pipeline_under_load(tmp_path) as (repo, load):
            await load.change(repo.push(toy(5.0), "three", promote=True), 6.0, 10.0)
            for _ in range(5):
                await load.change(repo.rollout.rollback("three", "live", 1, NOBODY), 10.0, 6.0)
                await load.change(repo.rollout.rollback("three", "live", 2, NOBODY), 6.0, 10.0)
            # the pipeline has pinned the first version
            await load.change(repo.push(toy(7.0), "two", promote=True), 10.0, 10.0)
        assert load.errors == []

    run(scenario())


def test_the_pipeline_goes_live_and_is_rolled_back_under_load(tmp_path: Path) -> None:
    other = packed(CHAIN.replace('model = "three"', 'model = "two"'))

    async def scenario() -> None:
        async with pipeline_under_load(tmp_path) as (repo, load):
            await load.change(repo.push(other, "chain"), 6.0, 6.0)
            for _ in range(5):
                await load.change(repo.rollout.set_alias("chain", "live", 2, NOBODY), 6.0, 4.0)
                await load.change(repo.rollout.rollback("chain", "live", None, NOBODY), 4.0, 6.0)
        assert load.errors == []

    run(scenario())


async def wait_for_verdict(repo: World, model: str) -> str:
    """Wait for the verdict on a model's candidate; return the recorded action."""
    while repo.model(model).aliases.canary is not None:  # noqa: ASYNC110 - nobody would set an event
        await asyncio.sleep(0.002)
    record = (await repo.rollout.catalog.audit(model))[-1]
    assert record.actor == "guard"
    return record.action


BAD = {"nan": toy(math.nan), "failing": toy(3.0, fails_every=2)}


@pytest.mark.parametrize("kind", BAD)
def test_a_models_bad_candidate_is_rolled_back_under_a_pipeline(tmp_path: Path, kind: str) -> None:
    """At most the candidate's share of the pipeline's requests is affected, and none after the verdict."""

    async def scenario() -> None:
        async with pipeline_under_load(tmp_path) as (repo, load):
            await repo.push(BAD[kind], "three")
            begun = len(load.answers)
            await repo.rollout.trials.start("three", CanaryPlan(2, weight=0.2), NOBODY)
            assert await asyncio.wait_for(wait_for_verdict(repo, "three"), 60) == "rolled_back"
            noticed = [math.isnan(answer.value) for answer in load.answers[begun:]]
            await load.change(asyncio.sleep(0), 6.0, 6.0)
            assert 0 < sum(noticed) <= 0.2 * len(noticed) + CALLERS
            assert all("step 'second'" in error.message for error in load.errors)
            assert bool(load.errors) == (kind == "failing")

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["three", "chain"])
def test_an_equal_candidate_goes_live_under_load(tmp_path: Path, model: str) -> None:
    """A candidate of one of the pipeline's models, and one of the pipeline."""

    async def scenario() -> None:
        async with pipeline_under_load(tmp_path) as (repo, load):
            await repo.push(toy(3.0) if model == "three" else packed(CHAIN + "\n"), model)
            await repo.rollout.trials.start(model, CanaryPlan(2, weight=0.5), NOBODY)
            assert await asyncio.wait_for(wait_for_verdict(repo, model), 120) == "promoted"
            assert repo.live(model) == 2
            await load.wait_for_answers(30)
            await load.change(repo.rollout.rollback(model, "live", None, NOBODY), 6.0, 6.0)
        assert load.errors == []
        assert {answer.value for answer in load.answers} == {6.0}

    run(scenario())


def test_requests_of_a_connection_get_503_while_a_model_is_unloaded(tmp_path: Path) -> None:
    """Also those with a timeout, whose refusal depends on the expected time of each step."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"timeout": 60_000_000}}).encode()
    content, size = head + np.ones(4, np.float32).tobytes(), {"inference-header-content-length": str(len(head))}
    with service(tmp_path / "repo") as running, running.client() as client:
        for name, model in (("two", toy(2.0)), ("three", toy(3.0)), ("chain", packed(CHAIN))):
            client.upload(name, model)
        with httpx.Client(base_url=running.url) as connection:

            def answers() -> list[httpx.Response]:
                return [connection.post("/v2/models/chain/infer", content=content, headers=size) for _ in range(4)]

            assert [answer.status_code for answer in answers()] == [200] * 4
            client.unload("three")
            refused = answers()
            assert [answer.status_code for answer in refused] == [503] * 4
            assert all(answer.json()["error"].startswith("step 'second': model 'three'") for answer in refused)
            client.load("three")
            assert [answer.status_code for answer in answers()] == [200] * 4
