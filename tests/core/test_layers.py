"""Imports inside core/ go one way: a lower layer never imports a higher one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import core

CORE = Path(__file__).resolve().parents[2] / "core"

# In the order data flows; modules on one line may import each other.
LAYERS = [
    ["core.errors", "core.charts", "core.feeds", "core.mistakes", "core.amounts", "core.precisions"],
    ["core.ir"],
    ["core.picture"],
    ["core.ops"],
    ["core.frontends", "core.passes", "core.autodiff", "core.reference", "core.facts"],
    ["core.kernels.target", "core.kernels.catalog"],
    ["core.plan", "core.check"],
    ["core.codegen"],
    ["core.kernels.cpu", "core.kernels.cuda", "core.kernels.reference"],
    ["core.runtime"],
    ["core.options"],
    ["core.tune"],
    ["core.split"],
    ["core.specialise", "core.packing", "core.any_size", "core.in_parts", "core.sizes", "core.rewriting", "core.tidy"],
    ["core.described"],
    ["core.compiler"],
    ["core.custom", "core.ahead"],
    ["core.nn"],
    ["core.train"],
    ["core.children", "core.onnx_backend"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def layer(module: str) -> int | None:
    """The rank of the layer that a module belongs to."""
    return next((rank for name, rank in RANK.items() if module == name or module.startswith(name + ".")), None)


def imports(path: Path) -> list[str]:
    """Absolute names of core modules imported when the file itself is imported (not inside functions)."""
    tree = ast.parse(path.read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("core"):
            found += [f"{node.module}.{alias.name}" if node.module == "core" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("core")]
    return found


def modules() -> list[Path]:
    return sorted(path for path in CORE.rglob("*.py") if path.parent != CORE or path.stem not in ("__init__",))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(CORE)))
def test_imports_only_from_lower_layers(path: Path) -> None:
    name = "core." + ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")
    own = layer(name)
    if own is None:
        assert name == "core.kernels", f"{name} belongs to no layer: add it to LAYERS"
        return
    for imported in imports(path):
        rank = layer(imported)
        assert rank is None or rank <= own, f"{name} imports {imported}, which lies above it"


def test_the_checker_of_plans_shares_no_code_with_the_planner() -> None:
    """Of the planner it knows the data of a plan, and nothing that makes one."""
    for path in (CORE / "check").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            data = {"core.plan.plan", "core.plan.liveness"}
            planners = {module for module in modules if module.startswith("core.plan")} - data
            assert not planners, f"{path} imports {planners}"


# A client that is handed a model of one of these libraries exports it by that library's own means.
EXPORTERS = {"server/client/exporting/pytorch.py": {"torch"}, "server/client/exporting/scikit_learn.py": {"sklearn"}}


def test_product_code_imports_no_peer() -> None:
    peers = {"onnxruntime", "openvino", "torch", "tritonclient", "sklearn"}
    for path in [*CORE.rglob("*.py"), *(CORE.parent / "server").rglob("*.py")]:
        allowed = EXPORTERS.get(str(path.relative_to(CORE.parent)), set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & peers - allowed, path


@pytest.mark.parametrize("package", [core, core.train])
def test_completion_shows_what_there_is(package: ModuleType) -> None:
    """IPython completes names by `dir`; each of them is there."""
    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in dir(package))


def test_packages_come_with_their_first_use() -> None:
    script = """
import sys, core
assert "core.nn" not in sys.modules and "core.train" not in sys.modules
assert {"nn", "train"} <= set(dir(core))
assert core.nn.Linear and core.train.losses.CrossEntropy and core.train.step
"""
    subprocess.run([sys.executable, "-c", script], check=True)
