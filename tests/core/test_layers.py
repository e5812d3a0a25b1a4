"""Imports inside core/ go one way: a lower layer never imports a higher one."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lathe
from tests.layers import GENERATORS, ROOT, Layers
from tools.module_imports import imported, imported_at_loading

CORE = ROOT / "core"

# In the order data flows; modules on one line may import each other.
LAYERS = Layers("lathe.core", [
    [
        "lathe.core.errors", "lathe.core.drawing.charts", "lathe.core.feeds", "lathe.core.validation_errors",
        "lathe.core.byte_sizes", "lathe.core.precisions", "lathe.core.exit_status", "lathe.core.files",
        "lathe.core.parent_process", "lathe.core.toml_text", "lathe.core.section",
    ],
    ["lathe.core.ir"],
    ["lathe.core.drawing.graphs"],
    ["lathe.core.ops"],
    ["lathe.core.frontends", "lathe.core.passes", "lathe.core.autodiff", "lathe.core.reference"],
    ["lathe.core.kernels"],  # the planner's view of kernels; their generators are in a higher layer
    ["lathe.core.plan", "lathe.core.check"],
    ["lathe.core.codegen"],
    [GENERATORS],
    ["lathe.core.runtime"],
    ["lathe.core.compiler.options"],
    ["lathe.core.compiler.tuner", "lathe.core.compiler.device_memory"],
    ["lathe.core.compiler.placement"],
    [
        "lathe.core.compiler.specialise", "lathe.core.compiler.packing", "lathe.core.compiler.dynamic_shapes",
        "lathe.core.compiler.partitioning", "lathe.core.compiler.symbol_binding", "lathe.core.compiler.run_passes",
        "lathe.core.compiler.free_memory",
    ],
    ["lathe.core.compiler.description"],
    ["lathe.core.compiler.pipeline"],
    ["lathe.core.compiler.code_cache", "lathe.core.compiler.time_prediction"],
    ["lathe.core.compiler.sessions"],
    ["lathe.core.compiler.compile"],
    ["lathe.core.compiler.custom_operators", "lathe.core.compiler.ahead_of_time"],
    ["lathe.core.compress"],
    ["lathe.core.nn"],
    ["lathe.core.language"],
    ["lathe.core.train"],
    ["lathe.core.compiler.child_stages", "lathe.core.onnx_backend"],
])  # fmt: skip


def modules() -> list[Path]:
    return sorted(path for path in CORE.rglob("*.py") if path.parent != CORE or path.stem not in ("__init__",))


def test_imports_only_from_lower_layers() -> None:
    assert LAYERS.violations(modules()) == {}


def test_families_of_kernels_import_each_other_in_one_direction() -> None:
    """Code shared by several families is in `shared`, `cpu` and `cuda`, which import no family."""
    uses: dict[str, set[str]] = {}
    for path in (CORE / "kernels").rglob("*/*.py"):
        own = path.parent.name
        names = {imported.split(".")[3] for imported in imported_at_loading(path, "lathe.core.kernels")}
        folders = {name for name in names if (CORE / "kernels" / name).is_dir()}
        uses[own] = uses.get(own, set()) | folders - {own}
    common = {"shared", "cpu", "cuda"}
    assert uses["shared"] <= set() and uses["cpu"] | uses["cuda"] <= common
    order = list(graphlib.TopologicalSorter(uses).static_order())  # CycleError where two families need each other
    assert common <= set(order)


def test_the_checker_of_plans_shares_no_code_with_the_planner() -> None:
    """The checker imports the data types of plans, and no code that makes plans."""
    for path in (CORE / "check").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            data = {"lathe.core.plan.plan", "lathe.core.plan.liveness"}
            planners = {module for module in modules if module.startswith("lathe.core.plan")} - data
            assert not planners, f"{path} imports {planners}"


# To push a model of one of these libraries, the client exports it with that library.
EXPORTERS = {"server/client/exporting/pytorch.py": {"torch"}, "server/client/exporting/scikit_learn.py": {"sklearn"}}


def test_product_code_imports_no_peer() -> None:
    peers = {"onnxruntime", "openvino", "torch", "tritonclient", "sklearn"}
    for path in [*CORE.rglob("*.py"), *(CORE.parent / "server").rglob("*.py")]:
        allowed = EXPORTERS.get(str(path.relative_to(CORE.parent)), set())
        assert not {name.split(".")[0] for name, _ in imported(path)} & peers - allowed, path


@pytest.mark.parametrize("package", [lathe, lathe.train])
def test_completion_shows_existing_names(package: ModuleType) -> None:
    """IPython completes names by `dir`; each of them is there."""
    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in dir(package))


def test_subpackages_are_imported_on_first_use() -> None:
    script = """
import sys, lathe
assert not {"lathe.core.nn", "lathe.core.train", "numpy"} & set(sys.modules)
assert {"nn", "train"} <= set(dir(lathe))
assert lathe.nn.Linear and lathe.train.losses.CrossEntropy and lathe.train.step
"""
    subprocess.run([sys.executable, "-c", script], check=True)
