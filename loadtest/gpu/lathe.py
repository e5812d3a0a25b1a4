"""Helpers for the parts of a run: a minimal graph, and the device executable of a session."""

from __future__ import annotations

from typing import Any

from lathe.core.errors import LatheError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.session.session import Session


def elementwise(width: int) -> Graph:
    """A graph of one kernel with almost no work: Abs of [batch, width]."""
    graph = Graph("elementwise")
    b = Builder(graph)
    graph.outputs = [b("Abs", b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), width))))]
    return graph


def only_executable(session: Session) -> DeviceExecutable:
    """The device executable of a model placed entirely on one device, besides the host.

    LatheError if nodes run on the host or on several devices.
    """
    runner: Any = next(iter(session._shapes.cached_runners().values()))
    part = runner._parts[0]
    if not isinstance(part, DeviceExecutable) or len(runner._parts) != 1:
        raise LatheError(f"the model runs on {', '.join(share.device for share in runner.shares)}")
    return part
