"""Imports inside server/ go one way: a lower layer never imports a higher one."""

from __future__ import annotations

from tests.layers import ROOT, Layers

SERVER = ROOT / "server"

# From the lowest layer to the highest; modules on one line may import each other.
NAMES = [
    ["errors", "types", "steps", "sse"],
    ["telemetry.logs", "telemetry.access_log", "telemetry.connections", "telemetry.gpus", "telemetry.disk_space"],
    ["datatypes", "archive", "fair_slots", "shared_memory"],
    ["access"],
    ["settings"],
    ["environment", "preflight", "processes"],
    ["backends", "scheduling"],
    ["batching", "telemetry.statistics"],
    ["pipelines"],
    ["telemetry.text_trace", "telemetry.tracing"],
    ["serving"],
    ["generation"],
    ["telemetry.metrics", "canary"],
    ["repository"],
    ["datasets"],
    ["jobs"],
    ["api"],
    ["listening", "serve", "app"],
    ["client"],
    ["cli"],
]
LAYERS = Layers("lathe.server", [[f"lathe.server.{name}" for name in names] for names in NAMES])


def test_imports_only_from_lower_layers() -> None:
    assert LAYERS.violations(sorted(SERVER.rglob("*.py"))) == {}
