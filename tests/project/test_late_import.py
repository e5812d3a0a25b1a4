"""Processes of a parallel run import a file of tests when its turn comes, and select and report as ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.small_run import small_run

FILES = {
    "test_a.py": "import sys\ndef test_early():\n    assert 'tests.test_b' not in sys.modules\n",
    "test_b.py": "import pytest\ndef test_late(): pass\ndef test_other(): pass\n"
    "@pytest.mark.slow\ndef test_slow(): raise AssertionError\n",
    "test_c.py": "raise OSError('no file')\n",
    "test_d.py": "def test_other(): raise AssertionError\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_files_are_imported_one_by_one(project: Path, tmp_path: Path, jobs: str) -> None:
    done = small_run(project, tmp_path, FILES, "-n", jobs, "-m", "not slow", "-k", "early or late")
    assert "2 passed, 1 error in" in done.stdout, done.stdout
    assert "ERROR tests/test_c.py - OSError: no file" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
def test_a_file_without_selected_tests_leaves_nothing_for_the_next_folder(project: Path, tmp_path: Path) -> None:
    test, slow = "def test_one(): pass\n", "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\n"
    files = {"a/test_a.py": test, "a/test_b.py": slow, "b/test_c.py": test, "b/test_d.py": slow}
    done = small_run(project, tmp_path, files, "-n", "1", "-m", "not slow")
    assert "2 passed in" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_run_that_selects_no_test_is_an_error(project: Path, tmp_path: Path) -> None:
    files = {name: FILES[name] for name in ("test_a.py", "test_b.py")}
    done = small_run(project, tmp_path, files, "-n", "2", "-k", "misspelt")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


@pytest.mark.slow
def test_a_file_that_draws_random_numbers_at_import_is_refused(project: Path, tmp_path: Path) -> None:
    files = {"test_a.py": "from tests.random_numbers import RNG\nX = RNG.random()\ndef test_one(): pass\n"}
    done = small_run(project, tmp_path, files, "-n", "1")
    assert "draws at import, use made_at_import: RNG" in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
def test_an_internal_error_of_a_process_fails_the_run(project: Path, tmp_path: Path) -> None:
    fails = "import pytest\ndef pytest_runtest_logfinish(): raise OSError('full')\n"
    small = {
        "test_a.py": f"{fails}pytest_plugins = []\ndef test_one(request):\n"
        "    request.config.pluginmanager.register(__import__('sys').modules[__name__])\n"
    }
    done = small_run(project, tmp_path, small, "-n", "1")
    assert "an internal error ended a process: the run is not complete" in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
