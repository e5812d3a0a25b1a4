"""Output of commands that need no server: one line for each error, and the next command to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lathe.server.api.management.job_responses import JobDetail, JobResult
from lathe.server.cli.jobs import _published_version, _run_time
from tests.core.train.small_trainings import RECIPE, quadrants
from tests.server.cli.running import PROJECT, run_lathe

SMALL = PROJECT / "model_repo" / "digits" / "1" / "model.onnx"


def error_line(*arguments: str) -> str:
    """Run a command that fails; return its error line without `error: `."""
    said = run_lathe(*arguments, fails=True)
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removeprefix("error: ").rstrip("\n")


def test_a_picture_is_written_as_svg_or_refused(tmp_path: Path) -> None:
    assert (
        error_line("inspect", str(SMALL), "--picture", "/nowhere/x.svg") == "/nowhere/x.svg: No such file or directory"
    )
    assert "x.png: expected a file name that ends in .svg" in error_line("inspect", str(SMALL), "--picture", "x.png")
    assert f"wrote {tmp_path}/x.svg\n" in run_lathe("inspect", str(SMALL), "--picture", str(tmp_path / "x.svg"))


def test_a_missing_file_of_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert (
        error_line("keys", "list", "--file", str(file)) == f"{file}: there is no such file; `lathe keys add` creates it"
    )


def test_an_error_in_a_training_is_printed_once(tmp_path: Path) -> None:
    recipe, data = tmp_path / "points.json", quadrants(tmp_path / "data.npz")
    recipe.write_text(json.dumps({**RECIPE, "data": {**RECIPE.get("data", {}), "target": "none"}}))
    assert "none" in error_line("train", str(recipe), "--data", str(data), "--out", str(tmp_path / "out"))


def test_a_finished_training_suggests_the_next_command(tmp_path: Path) -> None:
    recipe, data = tmp_path / "points.json", quadrants(tmp_path / "data.npz")
    recipe.write_text(json.dumps({**RECIPE, "epochs": 1}))
    said = run_lathe("train", str(recipe), "--data", str(data), "--out", str(tmp_path / "points"), "--threads", "1")
    model = tmp_path / "points" / "result" / "model.onnx"
    assert said.endswith(f"next: lathe push points {model}\n") and model.exists()


@pytest.mark.parametrize(
    ("attempts", "moved", "expected"),
    [(1, True, ("31.7 s", "m version 2, live")), (2, False, ("31.7 s, 2 attempts", "m version 2, not live"))],
)
def test_the_duration_and_the_result_of_a_job(attempts: int, moved: bool, expected: tuple[str, str]) -> None:
    result = JobResult.model_construct(model="m", version=2, moved_alias=moved)
    job = JobDetail.model_construct(ran=31.72, attempts=attempts, result=result)
    assert (_run_time(job), _published_version(job)) == expected
