"""What a plan claims of a graph, held against it: which node each step runs, and what its operands are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from core.errors import PlanError
from core.ir.dim import Dim, affine, evaluate, symbols
from core.ir.graph import Graph, Node, Value, captures
from core.ir.types import DType, TensorType
from core.kernels.catalog.base import Block, Flag, In, KernelCall, Out, Outer
from core.kernels.target import GPU_ALIGNMENT, GpuTarget, Target
from core.plan.plan import WEIGHTS, Address, Fallback, Plan, Planned, Port, Segment, Step


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step, the node that it runs, and the kernel's call."""

    index: int
    step: Step
    node: Node
    call: KernelCall
    values: tuple[Value | None, ...]  # of the operands: None for what is no value of the graph

    def __str__(self) -> str:
        return f"step {self.index} ({self.node.op} '{self.node.name}')"


@dataclass
class Facts:
    """A plan and its graph. `alone`: whether the plan is no body of another one. `offered`: whether its kernels are
    those that the catalog offers for the nodes of the graph."""

    graph: Graph
    planned: Planned
    target: Target | GpuTarget
    winograd: bool = True
    alone: bool = True
    offered: bool = True
    steps: tuple[StepFacts, ...] = ()
    runs: set[Node] = field(default_factory=set)  # nodes that a step or a fallback runs
    names: Mapping[str, Value] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def keeps_values(self) -> bool:
        """Whether the runtime has inputs and results of fallbacks at hand, besides the memory of the plan."""
        return self.alone and isinstance(self.target, Target)

    @property
    def alignment(self) -> int:
        """What every operand's address is a multiple of, in bytes."""
        return GPU_ALIGNMENT if isinstance(self.target, GpuTarget) else 1

    @property
    def depends_on_batch(self) -> bool:
        """Whether anything differs between batch sizes."""
        types = (value.type for value in self.graph.values())
        dims = (dim for type_ in types if isinstance(type_, TensorType) for dim in type_.shape or ())
        addresses = [operand for step in self.plan.steps for operand in step.operands]
        addresses += [address for address, _ in self.plan.located.values()]
        moving = any(address.offset.a for address in addresses)
        return moving or bool(self.plan.arena.a) or any("n" in symbols(dim) for dim in dims)


def facts_of(facts: Facts) -> Facts:
    """`facts` with what the plan claims filled in. PlanError where a claim does not hold."""
    graph, plan = facts.graph, facts.plan
    facts.names = {value.name: value for value in graph.values()}
    facts.steps = tuple(_steps(facts))
    fallbacks = [_fallback_node(facts, entry) for entry in plan.schedule if isinstance(entry, Fallback)]
    ran = [*(each.node for each in facts.steps), *fallbacks]
    if len(set(ran)) < len(ran):
        twice = next(node for node in ran if ran.count(node) > 1)
        raise PlanError(f"node '{twice.name}' ({twice.op}) runs more than once")
    facts.runs = set(ran)
    _check_schedule(plan)
    _check_ports(facts)
    return facts


def captured_values(node: Node, graph: Graph) -> list[Value]:
    """What the bodies of a node read from the graph around it, besides constants, in order of first use."""
    found = dict.fromkeys(value for body in node.subgraphs for value in captures(body))
    return [value for value in found if value not in graph.constants]


def operand_values(node: Node, call: KernelCall, graph: Graph) -> Iterator[Value | None]:
    """The value of each operand of a call; None for weights, scratch memory and flags."""
    captured = captured_values(node, graph) if any(isinstance(each, Outer) for each in call.operands) else []
    for operand in call.operands:
        match operand:
            case In(index):
                yield node.input(index)
            case Out(index):
                yield node.outputs[index]
            case Outer(index):
                yield captured[index] if index < len(captured) else None
            case _:
                yield None


def _steps(facts: Facts) -> Iterator[StepFacts]:
    plan, calls, nodes = facts.plan, facts.planned.calls, facts.graph.nodes
    if len(calls) != len(plan.steps):
        raise PlanError(f"{len(plan.steps)} steps, expected one for each of {len(calls)} calls of kernels")
    for index, (step, (position, call)) in enumerate(zip(plan.steps, calls, strict=True)):
        if not 0 <= position < len(nodes):
            raise PlanError(f"step {index} runs node {position}, expected one of {len(nodes)}")
        node = nodes[position]
        given = (step.label, step.op, step.symbol, len(step.operands))
        expected = (node.name, node.op, call.code.symbol, len(call.operands))
        if given != expected:
            raise PlanError(f"step {index} is {given}, expected {expected}")
        if call.shared is not None and not _is_general(call, facts.target):
            raise PlanError(f"step {index} runs code for other numbers than those of {call.spec.symbol}")
        if call.code.symbol not in facts.planned.specs:
            raise PlanError(f"step {index}: no code is asked for {call.code.symbol}")
        for operand in call.operands:
            count = {In: len(node.inputs), Out: len(node.outputs)}.get(type(operand), 1)
            if isinstance(operand, In | Out) and not 0 <= operand.index < count:
                raise PlanError(f"step {index} has operand {operand}, its node has {count}")
        values = tuple(operand_values(node, call, facts.graph))
        for operand, value in zip(call.operands, values, strict=True):
            if isinstance(operand, In | Outer) and value is None:
                raise PlanError(f"step {index} reads {operand}, which its node lacks")
        yield StepFacts(index, step, node, call, values)


def _is_general(call: KernelCall, target: Target | GpuTarget) -> bool:
    """Whether shared code, with the numbers it is given, is what the kernel of a step is."""
    block = call.operands[-1]
    found = call.spec.general(target, len(call.operands) - 1) if isinstance(target, Target) else None
    if found is None or call.shared is None or not isinstance(block, Block):
        return False
    spec, numbers = found
    return spec.key == call.shared.key and block.data.tolist() == list(numbers)


def _fallback_node(facts: Facts, entry: Fallback) -> Node:
    nodes = facts.plan.fallbacks.nodes
    if not 0 <= entry.index < len(nodes):
        raise PlanError(f"fallback {entry.index} ('{entry.label}'), expected one of {len(nodes)}")
    node = nodes[entry.index]
    if (node.name, node.op) != (entry.label, entry.op) or not any(node is own for own in facts.graph.nodes):
        raise PlanError(f"fallback {entry.index} is {entry.op} '{entry.label}', which the graph does not have there")
    return node


def _check_schedule(plan: Plan) -> None:
    """Every step runs once, in order."""
    at = 0
    for entry in plan.schedule:
        if isinstance(entry, Segment):
            if entry.first != at or entry.last < entry.first:
                raise PlanError(f"the schedule has steps {entry.first} to {entry.last} where step {at} comes next")
            at = entry.last
    if at != len(plan.steps):
        raise PlanError(f"the schedule ends before step {at} of {len(plan.steps)}")


def _check_ports(facts: Facts) -> None:
    """Inputs, states and outputs are those of the graph, with one base after the other."""
    graph, plan = facts.graph, facts.plan
    states = [state.value for state in graph.states]
    for ports, values in ((plan.inputs, graph.inputs), (plan.states, states), (plan.outputs, graph.outputs)):
        given, expected = [(port.name, port.type) for port in ports], [(value.name, value.type) for value in values]
        if given != expected:
            raise PlanError(f"the plan has ports {given}, the graph {expected}")
    bases = [port.base for port in all_ports(plan)]
    if bases != list(range(WEIGHTS + 1, WEIGHTS + 1 + len(bases))):
        raise PlanError(f"ports have the bases {bases}, expected one after the other from {WEIGHTS + 1} on")
    flags = [each.step.flag for each in facts.steps if any(isinstance(o, Flag) for o in each.call.operands)]
    if sorted(flags, key=str) != sorted(set(flags), key=str) or None in flags:
        raise PlanError(f"steps have the flags {flags}, expected one each")


def all_ports(plan: Plan) -> tuple[Port, ...]:
    return (*plan.inputs, *plan.states, *plan.outputs)


def base_name(plan: Plan, base: int) -> str:
    """A base for people."""
    if base <= WEIGHTS:
        return ("the arena", "the weights")[base]
    kinds = ["input"] * len(plan.inputs) + ["state"] * len(plan.states) + ["output"] * len(plan.outputs)
    ports = all_ports(plan)
    index = base - WEIGHTS - 1
    return f"{kinds[index]} %{ports[index].name}" if index < len(ports) else f"base {base}"


class Sizes:
    """Shapes for one batch size."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._env = {"n": n}
        self._known: dict[Dim, int] = {}

    def dim(self, dim: Dim) -> int:
        """KeyError for a dimension that depends on data."""
        if isinstance(dim, int):
            return dim
        if dim not in self._known:
            parts = affine(dim, "n")
            self._known[dim] = parts[0] * self.n + parts[1] if parts is not None else evaluate(dim, self._env)
        return self._known[dim]

    def shape(self, value: Value) -> tuple[int, ...] | None:
        """None for what has no place in memory that can be known: strings, sequences, shapes that depend on data."""
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is DType.STRING:
            return None
        try:
            shape = tuple(map(self.dim, type_.shape))
        except KeyError:
            return None
        return shape if min(shape, default=0) >= 0 else None

    def at(self, address: Address) -> int:
        """An empty batch has the addresses of a batch of one."""
        return address.offset.at(max(self.n, 1))
