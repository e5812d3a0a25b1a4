"""pyproject.toml declares exactly the packages that the code imports."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest

from tools.module_imports import imported

OWN = {"lathe", "loadtest", "tools", "tests"}
# installed with a declared package, a namespace that several distributions share, or too large for every test
DECLARED_AS = {
    "triton": {"triton"},
    "cuda": {"cuda-bindings"},
    "starlette": {"fastapi"},
    "httptools": {"uvicorn"},
    "uvloop": {"uvicorn"},
    "click": {"typer"},
    "google": {"protobuf"},
    "opentelemetry": {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"},
}
# Users who push models of these frameworks have them installed. Only the modules that export such models import them.
EXPORTERS = {"pytorch.py": {"torch"}, "scikit_learn.py": {"skl2onnx", "sklearn"}}
FOLDERS = {"lathe": "lathe", "core": "lathe.core", "server": "lathe.server"}  # of the packages, see setup.py
# extras of the product; the others are for tests and measurements
EXTRAS = ("cuda", "grpc", "jwt", "otel", "text", "train")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def imports(path: Path) -> set[str]:
    """Top-level names of every absolute import in a file, without those of Python and Lathe."""
    names = {name.split(".")[0] for name, _ in imported(path)}
    return names - set(sys.stdlib_module_names) - OWN


@cache
def product_imports(project: Path) -> set[str]:
    """The packages that the product imports, without those of the exporters for models of other frameworks."""
    exporting = project / "server" / "client" / "exporting"
    left_out = {exporting / name: names for name, names in EXPORTERS.items()}
    files = [path for folder in FOLDERS for path in (project / folder).rglob("*.py")]
    return set().union(*(imports(path) - left_out.get(path, set()) for path in files))


@cache
def installed() -> Mapping[str, list[str]]:
    """The distributions that provide each module; they are read from the files of all installed packages."""
    return packages_distributions()


def distributions(module: str) -> set[str]:
    if module in DECLARED_AS:
        return DECLARED_AS[module]
    found = installed().get(module)
    assert found, f"{module} is imported but no installed distribution provides it"
    return {found[0].lower().replace("_", "-")}


def names(requirements: list[str]) -> dict[str, str]:
    """Maps each distribution to the rest of its requirement."""
    split = (re.fullmatch(r"([A-Za-z0-9-]+)(?:\[[^\]]*\])?(.*)", requirement) for requirement in requirements)
    return {match[1].lower(): match[2] for match in split if match}


def test_the_product_imports_exactly_what_is_declared(project: Path, pyproject: dict[str, Any]) -> None:
    declared = set(names(pyproject["project"]["dependencies"]))
    optional = {name for extra in EXTRAS for name in names(pyproject["project"]["optional-dependencies"][extra])}
    assert {name for module in product_imports(project) for name in distributions(module)} == declared | optional


def test_every_requirement_has_both_bounds(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"].values()
    for requirement in [*pyproject["project"]["dependencies"], *(r for extra in extras for r in extra)]:
        assert re.search(r"==|>=.*<", requirement), requirement


def test_uvicorn_is_pinned_to_the_tested_version(pyproject: dict[str, Any]) -> None:
    assert names(pyproject["project"]["dependencies"])["uvicorn"] == f"=={version('uvicorn')}"


def test_make_test_never_downloads_a_training_framework(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    holders = [extra for extra, requirements in extras.items() if "torch" in names(requirements)]
    assert holders == ["oracle"]


def test_the_product_does_not_import_what_only_tests_need(project: Path) -> None:
    for_tests = {"pytest", "hypothesis", "onnxruntime", "openvino", "torch", "tritonclient", "sklearn", "skl2onnx"}
    assert not for_tests & product_imports(project)


def test_the_command_lathe_is_declared(pyproject: dict[str, Any]) -> None:
    module, _, attribute = pyproject["project"]["scripts"]["lathe"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[attribute]), attribute))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_of_a_package_is_shipped(project: Path, pyproject: dict[str, Any], folder: str) -> None:
    patterns = pyproject["tool"]["setuptools"]["package-data"][FOLDERS[folder]]
    shipped = {path for pattern in patterns for path in (project / folder).glob(pattern)}
    found = {path for path in (project / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    nested = {path for path in found if path.suffix == ".md" and path.parent != project / folder}  # for contributors
    assert {path for path in found if path.suffix not in (".py", ".pyi")} - nested == shipped


def test_the_server_reports_the_packaged_version(pyproject: dict[str, Any]) -> None:
    from lathe.server.api.v2.model_info import VERSION

    assert pyproject["project"]["version"] == VERSION


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_is_marked_as_typed(project: Path, folder: str) -> None:
    assert (project / folder / "py.typed").exists()


def test_no_text_says_to_install_another_projects_package(project: Path) -> None:
    """`lathe` on the package index is another project, and `lathe-server` is not published."""
    folders = ("lathe", "core", "server", "docs", "deploy", "loadtest", "tools")
    texts = [path for folder in folders for path in (project / folder).rglob("*") if path.suffix in (".py", ".md")]
    texts += [*project.glob("*.md"), project / "Makefile", project / "Dockerfile"]
    for path in texts:
        assert not re.search(r"pip install[^\n]*\blathe(-server)?\b(?![./\w-])", path.read_text()), path
