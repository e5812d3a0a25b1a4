"""Imports inside server/ go one way: a lower layer never imports a higher one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SERVER = Path(__file__).resolve().parents[2] / "server"

# From the lowest layer to the highest; modules on one line may import each other.
LAYERS = [
    ["errors", "types", "steps", "sse"],
    ["telemetry.logs", "telemetry.access_log", "telemetry.connections", "telemetry.gpus", "telemetry.disk_space"],
    ["datatypes", "archive", "fair_slots", "shared_memory"],
    ["access"],
    ["settings"],
    ["environment", "preflight", "processes"],
    ["backends", "scheduling"],
    ["batching", "telemetry.statistics"],
    ["pipelines"],
    ["telemetry.tracing"],
    ["serving"],
    ["telemetry.metrics", "canary"],
    ["repository"],
    ["datasets"],
    ["jobs"],
    ["api"],
    ["listening", "serve", "app"],
    ["client"],
    ["cli"],
]
RANK = {f"lathe.server.{name}": rank for rank, names in enumerate(LAYERS) for name in names}


def layer(module: str) -> int | None:
    """The rank of a module's layer: that of the longest matching name in LAYERS."""
    while module not in RANK and "." in module:
        module = module.rpartition(".")[0]
    return RANK.get(module)


def imports(path: Path) -> list[str]:
    """Absolute names of server modules that the file imports at module level, not inside functions."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lathe.server"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("lathe.server")]
    return found


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: str(path.relative_to(SERVER)))
def test_imports_only_from_lower_layers(path: Path) -> None:
    parts = path.relative_to(SERVER).with_suffix("").parts
    name = ".".join(("lathe.server", *parts)).removesuffix(".__init__")
    own = layer(name)
    if own is None:
        assert path.stem == "__init__" and not imports(path), f"{name} belongs to no layer: add it to LAYERS"
        return
    for imported in imports(path):
        rank = layer(imported)
        assert rank is not None and rank <= own, f"{name} imports {imported}, which lies above it"
