"""The claims of a plan, checked against its graph: the node that each step runs, and the values of its operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lathe.core.errors import PlanError
from lathe.core.ir.dim import Dim, affine, evaluate, symbols
from lathe.core.ir.graph import Graph, Node, Value, captures
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Block, Flag, In, KernelCall, Out, Outer
from lathe.core.kernels.target import GPU_ALIGNMENT, GpuTarget, Target
from lathe.core.plan.plan import WEIGHTS, Address, Fallback, Plan, PlannedGraph, Port, Segment, Step


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step of a plan (one kernel launch), the node that it runs, and the kernel call with its operands."""

    index: int
    step: Step
    node: Node
    call: KernelCall
    values: tuple[Value | None, ...]  # of the operands; None for weights, scratch memory and flags

    def __str__(self) -> str:
        return f"step {self.index} ({self.node.op} '{self.node.name}')"


@dataclass
class Facts:
    """A plan and its graph, with facts that `check_facts` adds. `alone` is false for the plan of a control-flow body.

    `offered`: whether kernels must be among those that the catalog offers for the nodes. `target` and `winograd` are
    the arguments of `make_plan`. `names` has the values of the graph by name.
    """

    graph: Graph
    planned: PlannedGraph
    target: Target | GpuTarget
    winograd: bool = True
    alone: bool = True
    offered: bool = True
    steps: tuple[StepFacts, ...] = ()
    runs: set[Node] = field(default_factory=set)  # the nodes that a step or a fallback runs
    names: Mapping[str, Value] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def runtime_keeps_values(self) -> bool:
        """Whether the runtime keeps inputs and results of fallbacks as arrays outside the memory of the plan."""
        return self.alone and isinstance(self.target, Target)

    @property
    def alignment(self) -> int:
        """The alignment in bytes of every operand."""
        return GPU_ALIGNMENT if isinstance(self.target, GpuTarget) else 1

    @property
    def depends_on_batch(self) -> bool:
        """Whether any address, shape or size depends on the batch size."""
        types = (value.type for value in self.graph.values())
        dims = (dim for type_ in types if isinstance(type_, TensorType) for dim in type_.shape or ())
        addresses = [operand for step in self.plan.steps for operand in step.operands]
        addresses += [address for address, _ in self.plan.value_addresses.values()]
        are_offsets_fixed = not any(address.offset.a for address in addresses)
        return not are_offsets_fixed or bool(self.plan.arena.a) or any("n" in symbols(dim) for dim in dims)


def check_facts(facts: Facts) -> Facts:
    """Fill in `steps`, `runs` and `names`, and return the same `facts`.

    PlanError if steps, fallbacks, schedule or ports do not match the graph, or a node runs more than once.
    """
    graph, plan = facts.graph, facts.plan
    facts.names = {value.name: value for value in graph.values()}
    facts.steps = tuple(_steps(facts))
    fallbacks = [_fallback_node(facts, entry) for entry in plan.schedule if isinstance(entry, Fallback)]
    runs = [*(each.node for each in facts.steps), *fallbacks]
    if len(set(runs)) < len(runs):
        twice = next(node for node in runs if runs.count(node) > 1)
        raise PlanError(f"node '{twice.name}' ({twice.op}) runs more than once")
    facts.runs = set(runs)
    _check_schedule(plan)
    _check_edges(facts, _stages(facts, fallbacks))
    _check_ports(facts)
    return facts


def captured_values(node: Node, graph: Graph) -> list[Value]:
    """The values that the bodies of a node capture, without constants of `graph`, in the order of first use."""
    found = dict.fromkeys(value for body in node.subgraphs for value in captures(body))
    return [value for value in found if value not in graph.constants]


def operand_values(node: Node, call: KernelCall, graph: Graph) -> Iterator[Value | None]:
    """Yield the value of each operand of a call; None for weights, blocks, scratch memory, flags and absent inputs."""
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
        ranges = [(r.first, r.symbol, r.operands) for r in step.ranges]
        given = (step.label, step.op, step.symbol, len(step.operands), ranges)
        planned = [(r.first, r.spec.symbol, r.operands) for r in call.ranges]
        expected = (node.name, node.op, call.code.symbol, len(call.operands), planned)
        if given != expected:
            raise PlanError(f"step {index} is {given}, expected {expected}")
        if call.shared is not None and not _is_shared_code_right(call, facts.target):
            raise PlanError(f"step {index} runs shared code with other numbers than those of {call.spec.symbol}")
        for spec in call.specs:
            if spec.symbol not in facts.planned.specs:
                raise PlanError(f"step {index}: the plan has no kernel spec for {spec.symbol}")
        for operand in call.operands:
            count = {In: len(node.inputs), Out: len(node.outputs)}.get(type(operand), 1)
            if isinstance(operand, In | Out) and not 0 <= operand.index < count:
                raise PlanError(f"step {index} has operand {operand}, its node has {count}")
        values = tuple(operand_values(node, call, facts.graph))
        for operand, value in zip(call.operands, values, strict=True):
            if isinstance(operand, In | Outer) and value is None:
                raise PlanError(f"step {index} reads {operand}, which its node lacks")
        yield StepFacts(index, step, node, call, values)


def _is_shared_code_right(call: KernelCall, target: Target | GpuTarget) -> bool:
    """Whether the call's shared code (`call.shared`) and its last operand are those to which its spec generalizes.

    Shared code is one function for all specs that differ only in numbers; the last operand, a `Block`, has these
    numbers. False also if the spec has no such function on this target, or the call has no such operand.
    """
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
    """PlanError unless the schedule runs every step once, in order."""
    at = 0
    for entry in plan.schedule:
        if isinstance(entry, Segment):
            if entry.first != at or entry.last < entry.first:
                raise PlanError(f"the schedule has steps {entry.first} to {entry.last} where step {at} comes next")
            at = entry.last
    if at != len(plan.steps):
        raise PlanError(f"the schedule ends before step {at} of {len(plan.steps)}")


def _stages(facts: Facts, fallbacks: Sequence[Node]) -> dict[Node, int]:
    """The number of the stage in which each node runs: steps up to a barrier, or one fallback."""
    found: dict[Node, int] = {}
    stage, left = 0, list(fallbacks)
    for entry in facts.plan.schedule:
        if isinstance(entry, Segment):
            for each in facts.steps[entry.first : entry.last]:
                found[each.node] = stage
                stage += each.step.has_barrier
            stage += 1
        else:
            found[left.pop(0)] = stage
            stage += 1
    return found


def _check_edges(facts: Facts, stages: Mapping[Node, int]) -> None:
    """PlanError unless each node runs in a later stage than the nodes of its control edges."""
    for node in facts.graph.nodes:
        for before in (value.producer for value in node.after if value.producer is not None):
            if before in stages and node in stages and stages[before] >= stages[node]:
                raise PlanError(f"{node.op} '{node.name}' must run after {before.op} '{before.name}'")


def _check_ports(facts: Facts) -> None:
    """PlanError unless the plan has the inputs, states and outputs of the graph, with consecutive base numbers.

    Each step whose kernel sets a flag must have a flag of its own.
    """
    graph, plan = facts.graph, facts.plan
    states = [state.value for state in graph.states]
    for ports, values in ((plan.inputs, graph.inputs), (plan.states, states), (plan.outputs, graph.outputs)):
        given, expected = [(port.name, port.type) for port in ports], [(value.name, value.type) for value in values]
        if given != expected:
            raise PlanError(f"the plan has ports {given}, the graph {expected}")
    bases = [port.base for port in all_ports(plan)]
    if bases != list(range(WEIGHTS + 1, WEIGHTS + 1 + len(bases))):
        raise PlanError(f"ports have the bases {bases}, expected consecutive ones from {WEIGHTS + 1} on")
    flags = [each.step.flag for each in facts.steps if any(isinstance(o, Flag) for o in each.call.operands)]
    if sorted(flags, key=str) != sorted(set(flags), key=str) or None in flags:
        raise PlanError(f"steps have the flags {flags}, expected one each")


def all_ports(plan: Plan) -> tuple[Port, ...]:
    return (*plan.inputs, *plan.states, *plan.outputs)


def base_name(plan: Plan, base: int) -> str:
    """The name of base number `base` in messages: the arena, the weights, an input, state or output, or "base 7"."""
    if base <= WEIGHTS:
        return ("the arena", "the weights")[base]
    kinds = ["input"] * len(plan.inputs) + ["state"] * len(plan.states) + ["output"] * len(plan.outputs)
    ports = all_ports(plan)
    index = base - WEIGHTS - 1
    return f"{kinds[index]} %{ports[index].name}" if index < len(ports) else f"base {base}"


class Sizes:
    """The values of dimensions, shapes and addresses for one batch size, `n`.

    `least_rows`: smaller batches have the addresses of a batch of this size (`Plan.least_rows`).
    """

    def __init__(self, n: int, least_rows: int = 1) -> None:
        self.n = n
        self._least_rows = least_rows
        self._env = {"n": n}
        self._known: dict[Dim, int] = {}

    def dim(self, dim: Dim) -> int:
        """The value of a dimension. KeyError if it has another symbol than `n`, or divides by zero."""
        if isinstance(dim, int):
            return dim
        if dim not in self._known:
            parts = affine(dim, "n")
            self._known[dim] = parts[0] * self.n + parts[1] if parts is not None else evaluate(dim, self._env)
        return self._known[dim]

    def shape(self, value: Value) -> tuple[int, ...] | None:
        """The shape of a value as numbers; None if it has no planned memory.

        Values without planned memory are strings, values that are no tensors, and tensors whose shape is unknown,
        data-dependent or has a negative extent.
        """
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is DType.STRING:
            return None
        try:
            shape = tuple(map(self.dim, type_.shape))
        except KeyError:
            return None
        return shape if min(shape, default=0) >= 0 else None

    def at(self, address: Address) -> int:
        """The offset of an address from its base in bytes."""
        return address.offset.at(max(self.n, self._least_rows))
