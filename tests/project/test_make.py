"""The make targets: the commands they would run, and that a second call does no set-up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


def dry_run(folder: Path, *arguments: str) -> str:
    """The commands that make would run, whatever the make that runs the tests was told."""
    told = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "VENV", "PYTHON", "JOBS")
    environment = {name: value for name, value in os.environ.items() if name not in told}
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment)
    return done.stdout


@pytest.fixture
def checkout(project: Path, tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(project / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("target", ["serve", "test", "test-all", "lint", "bench"])
def test_a_fresh_checkout_sets_itself_up(checkout: Path, target: str) -> None:
    planned = dry_run(checkout, target)
    assert "-m venv" in planned
    assert "pip install" in planned


def test_the_second_call_installs_nothing_until_the_dependencies_change(checkout: Path) -> None:
    stamp = planned_stamp(checkout)
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").touch()
    assert "pip install" in dry_run(checkout, "test")
    stamp.touch()
    assert "pip install" not in dry_run(checkout, "test")
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "pip install" in dry_run(checkout, "test")


def planned_stamp(checkout: Path) -> Path:
    line = next(line for line in dry_run(checkout, "test").splitlines() if line.startswith("touch "))
    return checkout / line.removeprefix("touch ")


def test_make_test_leaves_out_slow_tests_and_test_all_does_not(checkout: Path) -> None:
    quick, slow = '-m "not slow"', "-m slow"
    assert [run in dry_run(checkout, "test") for run in (quick, slow)] == [True, False]
    assert [run in dry_run(checkout, "test-slow") for run in (quick, slow)] == [False, True]
    assert [run in dry_run(checkout, "test-all") for run in (quick, slow)] == [True, True]


def test_each_framework_has_its_own_environment(project: Path) -> None:
    planned = dry_run(project, "--always-make", "test-exporters")
    for framework in ("torch", "paddle", "tensorflow"):
        assert f"--requirement tests/exporters/requirements/{framework}.txt" in planned
    assert "LATHE_EXPORTERS=.lathe/exporters" in planned


def test_make_lock_uses_a_pinned_tool(checkout: Path) -> None:
    planned = dry_run(checkout, "lock", "ARGS=--upgrade")
    assert '"pip-tools==' in planned
    assert "docker/lock.sh --upgrade" in planned


def test_make_test_image_installs_what_the_image_has(project: Path) -> None:
    planned = dry_run(project, "--always-make", "test-image")
    assert "docker/packages.sh serve .lathe/image/serve .lathe/image/tools" in planned
    assert "--require-hashes --only-binary :all: --requirement docker/requirements-build.txt" in planned
    assert "LATHE_IMAGE_PACKAGES=.lathe/image/serve" in planned


def test_the_server_works_on_a_copy_of_the_bundled_models(checkout: Path) -> None:
    planned = dry_run(checkout, "serve")
    assert "cp -R model_repo .lathe/models" in planned
    assert "lathe serve --model-repo .lathe/models" in planned


def test_ci_runs_all_tests_and_the_linters(project: Path) -> None:
    lines = (project / ".ci/run").read_text().splitlines()
    made = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
    assert made == ["test-all", "test-avx2", "test-heap", "lint"]
    assert "set -eu" in lines


def test_contributing_and_the_makefile_give_the_same_sizes_of_downloads(project: Path) -> None:
    page, makefile = (project / "CONTRIBUTING.md").read_text(), (project / "Makefile").read_text()
    rows = dict(re.findall(r"^\| `make ([a-z-]+)` \| (.*) \|$", page, re.MULTILINE))
    comments = dict(re.findall(r"^([a-z-]+):.*## (.*)$", makefile, re.MULTILINE))
    size = re.compile(r"\b\d+ MB\b")
    sizes = {name: size.findall(text) for name, text in comments.items() if size.search(text)}
    assert {"test-packages", "test-image"} <= sizes.keys()
    assert sizes == {name: size.findall(text) for name, text in rows.items() if size.search(text)}
