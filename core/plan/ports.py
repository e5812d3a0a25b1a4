"""The bases of a model's inputs, states and outputs, to which the addresses of a plan are relative."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.graph import Graph, State, Value
from lathe.core.plan.plan import WEIGHTS, Port


@dataclass(frozen=True)
class Ports:
    """A base for each input, state and output of a graph, after those of the arena and the weights."""

    graph: Graph
    inputs: tuple[Port, ...]
    states: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def flags_base(self) -> int:
        """The number of the base of the flags, which follows the bases of all ports."""
        return WEIGHTS + 1 + len(self.inputs) + len(self.states) + len(self.outputs)

    @property
    def of_inputs(self) -> list[tuple[Value, int]]:
        return [(value, port.base) for value, port in zip(self.graph.inputs, self.inputs, strict=True)]

    @property
    def of_states(self) -> list[tuple[State, int]]:
        return [(state, port.base) for state, port in zip(self.graph.states, self.states, strict=True)]

    @property
    def of_outputs(self) -> list[tuple[Value, int]]:
        """Each output with its base. A value may be several outputs."""
        return [(value, port.base) for value, port in zip(self.graph.outputs, self.outputs, strict=True)]


def make_ports(graph: Graph) -> Ports:
    """Assign bases in the order that `lathe.core.plan.plan` documents: inputs, states, outputs."""
    groups = (graph.inputs, [state.value for state in graph.states], graph.outputs)
    base, ports = WEIGHTS + 1, []
    for values in groups:
        ports.append(tuple(Port(v.name, v.type, base + i) for i, v in enumerate(values)))
        base += len(values)
    return Ports(graph, *ports)
