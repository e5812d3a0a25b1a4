"""Results become versions: evaluated, with their lineage, and only once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

from lathe.server.errors import Internal, Unavailable, Unprocessable
from lathe.server.jobs.gate import LiveMetrics
from lathe.server.jobs.job import DatasetPin, Job, JobLimits, ModelPin, Order, Publication, PublishRequest
from lathe.server.jobs.publisher import DECISION, Publisher
from lathe.server.repository.rollout import PublishOptions
from tests.server.repository.world import World, run, toy, world

DATA = DatasetPin("digits", "d" * 64)


@dataclass
class FakeEvaluator:
    """A fake evaluator: version n has the accuracy `worth[n]`; `meanwhile` runs during the first evaluation."""

    worth: dict[int, float] = field(default_factory=dict)
    metric_points: list[int] = field(default_factory=list)
    stand_in_answer: Callable[[], Any] | None = None
    fault: Exception | None = None

    async def judge(self, job: Job, folder: Path, model: str, version: int) -> LiveMetrics:
        self.metric_points.append(version)
        if self.fault is not None:
            raise self.fault
        if (happens := self.stand_in_answer) is not None:
            self.stand_in_answer = None
            await happens()
        return LiveMetrics(version, {"accuracy": self.worth[version]})


def job(publish: PublishRequest | None, **changes: Any) -> Job:
    order = Order("0" * 20, "ann", "train", {"epochs": 3}, DATA, None, publish, 0, JobLimits(9.0, 1 << 30), 0.0)
    return Job(replace(order, **changes))


def finished_job(folder: Path, accuracy: float, model: bytes = toy(5.0), data: str = DATA.digest) -> Path:
    """The folder of a job that has a result."""
    (folder / "result").mkdir(parents=True)
    (folder / "result" / "model.onnx").write_bytes(model)
    record = {"metrics": {"accuracy": accuracy}, "data": data, "seed": 7, "recipe": {"epochs": 3, "batch": 64}}
    record |= {"rows": {"test": 40}, "classes": ["a", "b"], "version": "1.2"}
    (folder / "result" / "metrics.json").write_bytes(orjson.dumps(record))
    return folder


def publish_request(alias: str | None = "live", **gate: Any) -> PublishRequest:
    return PublishRequest("m", alias, False, gate or None)


NOT_WORSE = {"not_worse_than_live": {"metric": "accuracy", "by": 0.0}}


async def publish(
    w: World, evaluator: FakeEvaluator, folder: Path, what: PublishRequest | None, **changes: Any
) -> Publication:
    return await Publisher(w.rollout, evaluator).finish(job(what, **changes), folder)


def lineage(w: World, version: int) -> dict[str, Any]:
    manifest = w.store.manifest("m", version)
    assert manifest is not None
    return dict(manifest.metadata["lineage"])


def test_a_result_goes_live_with_its_lineage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "repo") as w:
            folder = finished_job(tmp_path / "job", 0.9)
            parent = ModelPin("base", 4, "e" * 64)
            done = await publish(
                w, FakeEvaluator(), folder, publish_request(min={"accuracy": 0.9}), kind="finetune", model=parent
            )
            assert (done.model, done.version, done.moved_alias) == ("m", 1, True)
            assert (
                done.decision
                == lineage(w, 1)["gate"]
                == {
                    "passed": True,
                    "checks": [{"passed": True, "text": "accuracy: expected at least 0.9, got 0.9"}],
                }
            )
            assert lineage(w, 1) == {
                "job": "0" * 20,
                "kind": "finetune",
                "owner": "ann",
                "dataset": {"name": "digits", "digest": "d" * 64},
                "parent": {"model": "base", "version": 4, "digest": "e" * 64},
                "recipe": {"epochs": 3, "batch": 64},
                "seed": 7,
                "rows": {"test": 40},
                "classes": ["a", "b"],
                "metrics": {"accuracy": 0.9},
                "code": "1.2",
                "gate": dict(done.decision),
            }
            (record,) = await w.rollout.catalog.audit("m")
            assert (record.actor, record.reason) == ("ann", "")

    run(scenario())


def test_a_refused_result_is_stored_without_an_alias_or_not_at_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "repo") as w:
            folder = finished_job(tmp_path / "job", 0.5)
            done = await publish(w, FakeEvaluator(), folder, publish_request(min={"accuracy": 0.9}))
            assert (done.version, done.moved_alias, done.decision["passed"]) == (1, False, False)
            assert dict(w.store.state("m").aliases) == {}  # although it is the first version
            (record,) = await w.rollout.catalog.audit("m")
            assert record.reason == "refused by the gate: accuracy: expected at least 0.9, got 0.5"
            other = finished_job(tmp_path / "other", 0.5)
            done = await publish(
                w, FakeEvaluator(), other, publish_request(min={"accuracy": 0.9}, refused="discard"), id="1" * 20
            )
            assert (done.version, done.moved_alias) == (None, False)
            assert w.store.versions("m") == [1]

    run(scenario())


@pytest.mark.parametrize(("accuracy", "moves"), [(0.8, True), (0.79, False)])
def test_a_result_is_compared_with_the_version_of_its_alias(accuracy: float, moves: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "repo") as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0))
            await w.rollout.set_alias("m", "next", 2, PublishOptions().origin)
            evaluator = FakeEvaluator({1: 0.95, 2: 0.8})
            done = await publish(
                w, evaluator, finished_job(tmp_path / "job", accuracy), publish_request("next", **NOT_WORSE)
            )
            assert (done.version, done.moved_alias, evaluator.metric_points) == (3, moves, [2])
            aliases = {name: alias.version for name, alias in w.store.state("m").aliases.items()}
            assert aliases == {"live": 1, "next": 3 if moves else 2}
            assert done.decision["live"] == {"version": 2, "metrics": {"accuracy": 0.8}, "fault": ""}

    run(scenario())


def test_a_result_passes_if_there_is_no_version_to_compare_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "repo") as w:
            evaluator = FakeEvaluator()
            done = await publish(w, evaluator, finished_job(tmp_path / "job", 0.1), publish_request(**NOT_WORSE))
            assert (done.version, done.moved_alias, evaluator.metric_points) == (1, True, [])

    run(scenario())


def test_a_version_that_goes_live_meanwhile_is_compared_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "repo") as w:
            await w.push(toy(1.0))
            evaluator = FakeEvaluator({1: 0.5, 2: 0.95}, stand_in_answer=lambda: w.push(toy(2.0), promote=True))
            done = await publish(w, evaluator, finished_job(tmp_path / "job", 0.9), publish_request(**NOT_WORSE))
            assert (done.version, done.moved_alias, evaluator.metric_points) == (3, False, [1, 2])
            assert (w.live(), w.leftovers()) == (2, [])

    run(scenario())


STEPS = ("before the decision", "after the decision", "after publishing")


@pytest.mark.parametrize(("alias", "dies"), [*product(("live", "next"), STEPS), ("next", "after the alias")])
def test_publishing_again_after_a_crash_makes_one_version(dies: str, alias: str, tmp_path: Path) -> None:
    """The decision of the first attempt stands, even if another evaluation would now decide differently."""

    async def scenario() -> None:
        folder = finished_job(tmp_path / "job", 0.9)
        async with world(tmp_path / "repo") as w:
            await w.push(toy(1.0))
            await w.rollout.set_alias("m", "next", 1, PublishOptions().origin)
            crash(w, dies)
            with pytest.raises(Crashed):
                await publish(w, FakeEvaluator({1: 0.5}), folder, publish_request(alias, **NOT_WORSE))
        async with world(tmp_path / "repo") as w:
            later = FakeEvaluator({1: 0.5 if dies == "before the decision" else 1.0})
            for _ in range(2):
                done = await publish(w, later, folder, publish_request(alias, **NOT_WORSE))
                assert (done.version, done.moved_alias) == (2, True)
            assert w.store.versions("m") == [1, 2]
            assert w.store.state("m").version(alias) == 2
            actions = [record.action for record in await w.rollout.catalog.audit("m")]
            assert actions == ["publish", "alias", "publish", *(["alias"] if alias == "next" else [])]

    run(scenario())


class Crashed(BaseException):
    """The process ends here, from the point of view of the job's folder and the repository."""


def crash(w: World, when: str) -> None:
    """Make the next publication fail."""
    rollout: Any = w.rollout
    push, move = rollout.publish, rollout.set_alias

    async def publish(*arguments: Any, **options: Any) -> Any:
        if when == "before the decision":
            (w.root.parent / "job" / DECISION).unlink()
        if when in ("before the decision", "after the decision"):
            raise Crashed
        outcome = await push(*arguments, **options)
        if when == "after publishing":
            raise Crashed
        return outcome

    async def set_alias(*arguments: Any, **options: Any) -> Any:
        await move(*arguments, **options)
        raise Crashed

    rollout.publish, rollout.set_alias = publish, set_alias


def test_an_evaluation_that_is_not_possible_now_is_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "repo") as w:
            await w.push(toy(1.0))
            folder = finished_job(tmp_path / "job", 0.9)
            with pytest.raises(Unavailable):
                await publish(w, FakeEvaluator(fault=Unavailable("busy")), folder, publish_request(**NOT_WORSE))
            assert not (folder / DECISION).exists()
            assert (await publish(w, FakeEvaluator({1: 0.9}), folder, publish_request(**NOT_WORSE))).moved_alias

    run(scenario())


def test_an_invalid_result_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path / "repo") as w:
            with pytest.raises(Unprocessable, match="made from another dataset"):
                await publish(w, FakeEvaluator(), finished_job(tmp_path / "a", 0.9, data="c" * 64), publish_request())
            broken = finished_job(tmp_path / "b", 0.9)
            (broken / "result" / "metrics.json").write_text("[]")
            with pytest.raises(Internal, match="expected an object with 'metrics'"):
                await publish(w, FakeEvaluator(), broken, publish_request())
            with pytest.raises(Internal, match="nothing to publish"):
                await publish(w, FakeEvaluator(), finished_job(tmp_path / "c", 0.9), None)
            with pytest.raises(Unprocessable, match="no operator 'Bad'"):
                await publish(
                    w, FakeEvaluator(), finished_job(tmp_path / "d", 0.9, model=b"\x08bad"), publish_request()
                )
            assert w.store.models() == []

    run(scenario())
