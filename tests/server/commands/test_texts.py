"""What commands say on this machine alone: one line for each mistake, and what to type next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.api.job_answers import JobDetail, JobResult
from server.cli_jobs import _made, _ran
from tests.core.train.world import RECIPE, quadrants
from tests.server.commands.running import PROJECT, lathe

SMALL = PROJECT / "model_repo" / "digits" / "1" / "model.onnx"


def told(*arguments: str) -> str:
    said = lathe(*arguments, fails=True)
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removeprefix("error: ").rstrip("\n")


def test_a_picture_is_written_where_it_can_be_and_under_its_own_kind_of_name(tmp_path: Path) -> None:
    assert told("inspect", str(SMALL), "--picture", "/nowhere/x.svg") == "/nowhere/x.svg: No such file or directory"
    assert "x.png: expected a name that ends in .svg" in told("inspect", str(SMALL), "--picture", "x.png")
    assert f"wrote {tmp_path}/x.svg\n" in lathe("inspect", str(SMALL), "--picture", str(tmp_path / "x.svg"))


def test_a_file_of_keys_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert told("keys", "list", "--file", str(file)) == f"{file}: there is no such file; `lathe keys add` makes it"


def test_a_mistake_in_a_training_is_told_once(tmp_path: Path) -> None:
    recipe, data = tmp_path / "points.json", quadrants(tmp_path / "data.npz")
    recipe.write_text(json.dumps({**RECIPE, "data": {**RECIPE.get("data", {}), "target": "none"}}))
    assert "none" in told("train", str(recipe), "--data", str(data), "--out", str(tmp_path / "out"))


def test_a_training_that_has_ended_says_what_to_type_next(tmp_path: Path) -> None:
    recipe, data = tmp_path / "points.json", quadrants(tmp_path / "data.npz")
    recipe.write_text(json.dumps({**RECIPE, "epochs": 1}))
    said = lathe("train", str(recipe), "--data", str(data), "--out", str(tmp_path / "points"), "--threads", "1")
    model = tmp_path / "points" / "result" / "model.onnx"
    assert said.endswith(f"next: lathe push points {model}\n") and model.exists()


@pytest.mark.parametrize(
    ("attempts", "moved", "expected"),
    [(1, True, ("31.7 s", "m version 2, live")), (2, False, ("31.7 s, begun 2 times", "m version 2, not live"))],
)
def test_how_long_a_job_took_and_what_it_made(attempts: int, moved: bool, expected: tuple[str, str]) -> None:
    result = JobResult.model_construct(model="m", version=2, moved_alias=moved)
    job = JobDetail.model_construct(ran=31.72, attempts=attempts, result=result)
    assert (_ran(job), _made(job)) == expected
