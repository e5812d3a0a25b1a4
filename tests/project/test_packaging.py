"""pyproject.toml tells the truth: what is imported is declared, what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest

OWN = {"core", "server", "loadtest", "tools", "tests"}
DECLARED_AS = {  # brought by a declared package, a roof that several distributions share, or too large for every test
    "triton": {"triton"},
    "cuda": {"cuda-bindings"},
    "starlette": {"fastapi"},
    "httptools": {"uvicorn"},
    "uvloop": {"uvicorn"},
    "click": {"typer"},
    "google": {"protobuf"},
    "opentelemetry": {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"},
}
# Who pushes a model of these has them: the modules that export it, and no others, import them.
EXPORTERS = {"pytorch.py": {"torch"}, "scikit_learn.py": {"skl2onnx", "sklearn"}}
EXTRAS = ("cuda", "grpc", "jwt", "otel", "text", "train")  # of the product; the others are for tests and measurements


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def imports(path: Path) -> set[str]:
    """Top-level names of every absolute import in a file, but those of Python's and Lathe's own."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - OWN


def of_the_product(project: Path) -> set[str]:
    """What `core` and `server` import, apart from what the exporters do for models of others."""
    exporting = project / "server" / "client" / "exporting"
    left_out = {exporting / name: names for name, names in EXPORTERS.items()}
    files = [*(project / "core").rglob("*.py"), *(project / "server").rglob("*.py")]
    return set().union(*(imports(path) - left_out.get(path, set()) for path in files))


def distributions(module: str) -> set[str]:
    if module in DECLARED_AS:
        return DECLARED_AS[module]
    found = packages_distributions().get(module)
    assert found, f"{module} is imported but no installed distribution provides it"
    return {found[0].lower().replace("_", "-")}


def names(requirements: list[str]) -> dict[str, str]:
    """Distribution -> the rest of its requirement."""
    split = (re.fullmatch(r"([A-Za-z0-9-]+)(?:\[[^\]]*\])?(.*)", requirement) for requirement in requirements)
    return {match[1].lower(): match[2] for match in split if match}


def test_what_the_product_imports_is_declared_and_the_other_way_round(project: Path, pyproject: dict[str, Any]) -> None:
    declared = set(names(pyproject["project"]["dependencies"]))
    optional = {name for extra in EXTRAS for name in names(pyproject["project"]["optional-dependencies"][extra])}
    assert {name for module in of_the_product(project) for name in distributions(module)} == declared | optional


def test_every_requirement_is_bounded_on_both_sides(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"].values()
    for requirement in [*pyproject["project"]["dependencies"], *(r for extra in extras for r in extra)]:
        assert re.search(r"==|>=.*<", requirement), requirement


def test_uvicorn_is_pinned_to_the_version_tested(pyproject: dict[str, Any]) -> None:
    assert names(pyproject["project"]["dependencies"])["uvicorn"] == f"=={version('uvicorn')}"


def test_make_test_never_downloads_a_training_framework(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    holders = [extra for extra, requirements in extras.items() if "torch" in names(requirements)]
    assert holders == ["oracle"]


def test_the_product_never_imports_what_only_tests_need(project: Path) -> None:
    for_tests = {"pytest", "hypothesis", "onnxruntime", "openvino", "torch", "tritonclient", "sklearn", "skl2onnx"}
    assert not for_tests & of_the_product(project)


def test_the_command_exists(pyproject: dict[str, Any]) -> None:
    module, _, attribute = pyproject["project"]["scripts"]["lathe"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[attribute]), attribute))


def test_only_the_two_packages_are_shipped(pyproject: dict[str, Any]) -> None:
    assert pyproject["tool"]["setuptools"]["packages"]["find"]["include"] == ["core*", "server*"]


@pytest.mark.parametrize("package", ["core", "server"])
def test_every_file_of_a_package_is_shipped(project: Path, pyproject: dict[str, Any], package: str) -> None:
    patterns = pyproject["tool"]["setuptools"]["package-data"][package]
    shipped = {path for pattern in patterns for path in (project / package).glob(pattern)}
    found = {path for path in (project / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    nested = {path for path in found if path.name == "COVERAGE.md"}  # read by people, in the repository
    assert {path for path in found if path.suffix not in (".py", ".pyi")} - nested == shipped


def test_the_server_states_the_version_that_is_packaged(pyproject: dict[str, Any]) -> None:
    from server.api.modelinfo import VERSION

    assert pyproject["project"]["version"] == VERSION


def test_both_packages_are_marked_as_typed(project: Path) -> None:
    assert (project / "core/py.typed").exists()
    assert (project / "server/py.typed").exists()
