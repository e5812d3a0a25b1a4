"""Rules for source files that a linter does not check."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.project.test_renames import names_in
from tools.module_imports import imported

PROJECT = Path(__file__).resolve().parents[2]
PRODUCT = ("lathe", "core", "server", "loadtest", "tools")
SOURCES = sorted(str(path.relative_to(PROJECT)) for folder in PRODUCT for path in (PROJECT / folder).rglob("*.py"))


def test_source_files_are_short_and_have_no_open_tasks() -> None:
    texts = {name: (PROJECT / name).read_text() for name in SOURCES}
    long = {name: count for name, text in texts.items() if (count := len(text.splitlines())) > 600}
    assert long == {}, "a file past 600 lines is usually two nouns"
    assert [name for name, text in texts.items() if re.search(r"\b(TODO|FIXME|XXX)\b", text)] == []


# Files that read the older name of the variable for compatibility, and their tests.
OLD_CACHE_NAME = {
    "core/runtime/artifact/store.py", "server/environment.py", "server/processes/child_process.py",
    "tests/compiled_code.py",
    "tests/loadtest/test_footprint.py", "tests/project/test_tree.py", "tests/server/cli/test_files.py",
}  # fmt: skip


def test_no_file_sets_the_cache_by_its_older_name(project: Path) -> None:
    """Where the environment has `LATHE_CACHE_DIR`, `LATHE_CACHE` has no effect: the cache would not be empty."""
    folders = (*PRODUCT, "tests")
    files = [
        path for folder in folders for path in (project / folder).rglob("*.py") if 'LATHE_CACHE"' in path.read_text()
    ]
    assert {str(path.relative_to(project)) for path in files} - OLD_CACHE_NAME == set()


# Folders of tests that belong to no single folder or module of the code.
ACROSS = {
    "core/conformance": "the backend suite of ONNX",
    "core/cuda": "tests that need Triton, in an environment of their own",
}


@pytest.mark.parametrize("half", ["core", "server"])
def test_folders_of_tests_mirror_the_code(half: str, project: Path) -> None:
    """A reader finds the tests of `server/api/codec` in `tests/server/api/codec`."""
    tests = project / "tests"
    folders = {path.parent for path in (tests / half).rglob("test_*.py")} - {tests / half}
    names = {str(folder.relative_to(tests)) for folder in folders} - set(ACROSS)
    assert [name for name in names if not (project / name).is_dir() and not (project / f"{name}.py").exists()] == []


# Packages of the environments in which exporters run: tests/exporters/requirements.
EXPORTERS = {"gguf", "paddle", "tensorflow", "tf2onnx", "torch", "torchvision", "transformers"}


def test_scripts_of_other_environments_import_what_is_there(project: Path) -> None:
    """`make test-exporters` runs these scripts in environments of their own, so no other test imports them."""
    folder = project / "tests" / "exporters"
    missing = []
    for path in sorted(folder.glob("*.py")):
        for name, _ in imported(path):
            module, _, attribute = name.partition(".")
            if module in sys.stdlib_module_names or module in EXPORTERS or find_spec(module) is not None:
                continue
            sibling = folder / f"{module}.py"
            defined = names_in(str(sibling.relative_to(project))) if sibling.exists() else frozenset()
            if not sibling.exists() or (attribute and attribute not in defined):
                missing.append(f"{path.name}: {name}")
    assert missing == []


def test_every_package_of_the_product_has_an_init(project: Path) -> None:
    """Without it setuptools would leave the folder out of the wheel."""
    folders = {(project / name).parent for name in SOURCES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_checkout_is_small(project: Path) -> None:
    bundled = [path for path in (project / "model_repo").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in bundled) < 500_000
