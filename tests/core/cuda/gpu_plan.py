"""Runs a plan for GPUs in Triton's interpreter, step by step, state and all; no device, no streams."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Graph
from lathe.core.kernels.cuda import generate, interpret
from lathe.core.kernels.target import GpuTarget
from lathe.core.plan.plan import ARENA, WEIGHTS, Address, weight_chunks
from lathe.core.plan.planner import make_plan

TARGET = GpuTarget()


class InterpretedPlan:
    """A graph over `n` in which every node has a kernel. Runs change the arrays in `states`."""

    def __init__(self, graph: Graph, target: GpuTarget = TARGET) -> None:
        self.planned, self.target = make_plan(graph, target), target
        self.plan = self.planned.plan
        self.states = {state.value.name: np.array(state.initial) for state in graph.states}
        self._weights = np.frombuffer(b"".join(map(bytes, weight_chunks(self.planned))), np.uint8).copy()

    def run(self, feeds: Mapping[str, Array], n: int) -> dict[str, Array]:
        """The outputs."""
        types = {port.name: port.type for port in self.plan.outputs}
        outputs = {name: np.zeros(t.evaluate({"n": n}), t.dtype.numpy) for name, t in types.items()}
        memory = {ARENA: np.full(self.plan.arena.at(n), 0xA5, np.uint8), WEIGHTS: self._weights}
        for ports, arrays in ((self.plan.inputs, feeds), (self.plan.states, self.states), (self.plan.outputs, outputs)):
            memory.update({port.base: np.ascontiguousarray(arrays[port.name]) for port in ports})
        memory[self.plan.flags_base] = np.zeros(1 << 12, np.uint8)
        for step in (each.at(n) for each in self.plan.steps):
            addresses = [_address(memory, each, n) for each in step.operands]
            grid = [evaluate(extent, {"n": n}) for extent in step.grid]
            interpret(generate(self.planned.specs[step.symbol], self.target), grid, addresses, n)
        for name, base in self.plan.copies:
            self._copy(memory, name, base, n)
        return outputs

    def _copy(self, memory: Mapping[int, Array], name: str, base: int, n: int) -> None:
        address, type_ = self.plan.value_addresses[name]
        nbytes, start = evaluate(type_.nbytes, {"n": n}), address.offset.at(n)
        source = memory[address.base].reshape(-1).view(np.uint8)[start : start + nbytes]
        memory[base].reshape(-1).view(np.uint8)[:nbytes] = source


def _address(memory: Mapping[int, Array], address: Address, n: int) -> int:
    return memory[address.base].ctypes.data + address.offset.at(n)
