"""Lathe on a device, as the parts of a run use it."""

from __future__ import annotations

from typing import Any

from core.errors import LatheError
from core.ir.build import Builder
from core.ir.graph import Graph
from core.ir.types import DType, TensorType, symbol
from core.runtime.device_executable import DeviceExecutable
from core.runtime.session import Session


def elementwise(width: int) -> Graph:
    """One kernel that does next to nothing."""
    graph = Graph("elementwise")
    b = Builder(graph)
    graph.outputs = [b("Abs", b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), width))))]
    return graph


def only_part(session: Session) -> DeviceExecutable:
    """What runs a model that lies on one device as a whole. LatheError for one that does not."""
    runner: Any = next(iter(session._shapes.made().values()))
    part = runner._parts[0]
    if not isinstance(part, DeviceExecutable) or len(runner._parts) != 1:
        raise LatheError(f"the model runs on {', '.join(share.device for share in runner.shares)}")
    return part
