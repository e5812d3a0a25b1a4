"""The check of a job's inputs: what a process can answer, and that nothing stays of a refused job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lathe.server.errors import Internal, QuotaExceeded, ServerError, TooLarge, Unprocessable
from lathe.server.jobs.gate import Gate, check_metrics
from lathe.server.jobs.input_check import InputCheck, MeasuredMetrics
from lathe.server.jobs.job import PublishRequest
from lathe.server.jobs.kinds import Kind, Kinds
from lathe.server.processes.stage_children import Children, Limits
from tests.server.jobs.world import FAKE, World, run, world

MODULE = "tests.server.jobs.fake_check"


def checked(folder: Path, text: str) -> MeasuredMetrics:
    (folder / "recipe.json").write_text(text)
    check = InputCheck(lambda module: Children(Limits(20, 1 << 30), (module,), "job"))
    return asyncio.run(check.run(MODULE, folder / "recipe.json", folder / "data.npz", folder / "model.onnx"))


def test_a_check_names_the_metrics(tmp_path: Path) -> None:
    assert checked(tmp_path, "{}") == MeasuredMetrics(["accuracy", "size_ratio"], ["accuracy"])


@pytest.mark.parametrize(
    ("does", "error", "says"),
    [
        ("refuse", Unprocessable, r"^recipe\.json: expected more$"),
        ("crash", Unprocessable, "ended its process by SIGSEGV"),
        ("eat memory", TooLarge, "more than 1 GiB of memory"),
        ("talk", Internal, "expected the names of metrics"),
        ("leave out", Internal, "expected the names of metrics"),
    ],
)
def test_other_answers_are_errors(does: str, error: type[ServerError], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        checked(tmp_path, f'{{"do": "{does}"}}')


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(FAKE, lambda _: None, lambda: BaseModel, needs_model=True, input_check=MODULE)
    monkeypatch.setattr("tests.server.jobs.world.KINDS", Kinds({"train": replace(kind, input_check=None), "c": kind}))


def leftovers(w: World) -> list[str]:
    root = w.jobs.register.folders.root
    return [path.name for path in (*(root / ".trash").iterdir(), *root.iterdir()) if path.name not in NAMES]


NAMES = {".trash", "jobs.db", "jobs.db-wal", "jobs.db-shm", "lock"}


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize(
    ("gate", "recipe", "says"),
    [
        (None, {"do": "refuse"}, "expected more"),
        (
            {"max": {"latency": 1.0}},
            {},
            r"^publish\.gate\.max\.latency: expected a metric .*accuracy, size_ratio\), got",
        ),
        ({"not_worse_than_live": {"metric": "size_ratio"}}, {}, r"^publish\.gate\.not_worse_than_live\.metric: "),
    ],
)
def test_a_refused_job_leaves_nothing(gate: Any, recipe: dict[str, Any], says: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            with pytest.raises(Unprocessable, match=says):
                await w.submit(kind="c", parent="m", publish=PublishRequest("m", "live", gate=gate), **recipe)
            assert leftovers(w) == [] and w.jobs.register.all() == []
            await w.reach(await w.submit(kind="c", parent="m", publish=PublishRequest("m", "live", gate={"max": {}})))

    run(scenario())


def test_a_gate_that_compares_with_a_pipeline_is_refused_before_the_job_runs(tmp_path: Path) -> None:
    """A model that does not exist yet is no fault."""
    gate = {"not_worse_than_live": {"metric": "accuracy"}}

    async def scenario() -> None:
        async with world(tmp_path) as w:
            with pytest.raises(
                Unprocessable, match=r"^publish\.gate\.not_worse_than_live: version 1 .* has no ONNX model"
            ):
                await w.submit(publish=PublishRequest("p", "live", gate=gate))
            assert w.jobs.register.all() == []
            for model, conditions in (("new", gate), ("m", gate), ("p", {"min": {"accuracy": 0.5}})):
                await w.submit(publish=PublishRequest(model, "live", gate=conditions))

    run(scenario())


@pytest.mark.usefixtures("kinds")
def test_jobs_that_are_checked_at_once_do_not_exceed_the_limit_of_their_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, max_jobs=1) as w:
            submissions = [w.submit(kind="c", parent="m", steps=1000, seconds=0.01) for _ in range(3)]
            outcomes = await asyncio.gather(*submissions, return_exceptions=True)
            assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 2
            assert len(w.jobs.register.all()) == 1

    run(scenario())


def test_a_gate_names_metrics_that_are_measured() -> None:
    gate = Gate(min={"accuracy": 0.9}, max={"size_ratio": 0.5})
    check_metrics(gate, ["accuracy", "size_ratio"], [])
    with pytest.raises(ValueError, match=r"max\.size_ratio: expected a metric .*\(accuracy\), got 'size_ratio'"):
        check_metrics(gate, ["accuracy"], ["size_ratio"])
    with pytest.raises(ValueError, match=r"min\.accuracy: expected a metric .*\(none\), got 'accuracy'"):
        check_metrics(gate, [], [])
