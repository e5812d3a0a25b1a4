"""Which kernel runs each node, and which values live inside others because their kernels can work on parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.ir.graph import Graph, Node, Value, node_reads
from core.ir.types import DType, TensorType
from core.kernels.catalog import VIEWS, KernelCall, Request, Selector, has_elements, select
from core.kernels.catalog.base import is_exact
from core.kernels.catalog.numbers import sharing
from core.kernels.target import GPU_ALIGNMENT, GpuTarget, Target
from core.plan.control import CONTROL, NotNative, PlanBody, control_call
from core.plan.plan import Planned, exact_affine
from core.plan.probe import holds_for_every_batch
from core.plan.windows import Window, Windows


def plannable(value: Value) -> bool:
    """Whether a value can live in the arena: a tensor of fixed-size elements whose shape is affine in `n`."""
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is DType.STRING:
        return False
    return all(exact_affine(dim) is not None for dim in type_.shape) and exact_affine(type_.size) is not None


def awkward_value(node: Node) -> str | None:
    """Why no kernel can run a node whatever it computes: a value of it that cannot live in the arena."""
    awkward = next((v for v in [*node_reads(node), *node.outputs] if not plannable(v)), None)
    return f"%{awkward.name} is {awkward.type}, which only exists while the model runs" if awkward is not None else None


def is_view(node: Node) -> bool:
    """Whether the output is the input's bytes, for every batch size."""
    source = node.input(0)
    if node.op not in VIEWS or len(node.outputs) != 1 or source is None or not plannable(source):
        return False
    bound = len(node.inputs) == 1  # else the shape is computed from data, and that of the output only declared
    return bound and plannable(node.output) and source.tensor.nbytes == node.output.tensor.nbytes


def kernel_of(request: Request, choose: Selector = select) -> KernelCall | str:
    """The kernel of a node whose values can live in the arena, or why it has none."""
    node = request.node
    what = f"{node.op} of {', '.join(_types(node))}"
    if not has_elements(node):
        return f"{what} has empty operands"
    if not holds_for_every_batch(node, request.constants):  # first: selectors take it that extents agree
        return f"{what} only fits some batch sizes"
    call = choose(request)
    return call if call is not None else f"no compiled kernel for {what}"


@dataclass(frozen=True)
class Asked:
    """What kernels are asked for: the arguments of `make_plan`. `plan_body` plans what control flow has inside."""

    target: Target | GpuTarget
    threads: int
    choose: Selector
    winograd: bool
    plan_body: PlanBody


@dataclass
class Choice:
    """How each node of a graph runs: by a kernel (`calls`), or on the reference for one of the `reasons`. Views have
    neither, and no more have the nodes that `windows` left nothing to do. `bodies`: the plans of what control flow has
    inside."""

    nodes: Sequence[Node]
    calls: dict[Node, KernelCall] = field(default_factory=dict)
    reasons: dict[Node, str] = field(default_factory=dict)
    windows: Mapping[Value, Window] = field(default_factory=dict)
    bodies: dict[Node, tuple[Planned, ...]] = field(default_factory=dict)

    def is_view(self, node: Node) -> bool:
        return node not in self.reasons and is_view(node)

    def root(self, value: Value) -> Value:
        """The value whose bytes a chain of views looks at, or that a window is part of."""
        while True:
            if value in self.windows:
                value = self.windows[value].parent
            elif value.producer is not None and self.is_view(value.producer):
                value = value.producer.inputs[0]  # type: ignore[assignment]
            else:
                return value

    def may_overwrite(self, node: Node, index: int) -> bool:
        """Whether the kernel of `node` may write its result to the memory of input `index`, as far as its own reads
        matter. The caller has to know that no other node reads that memory later.

        The kernel must allow it (`KernelCall.inplace`), and no other operand may lie in that memory: neither a view or
        a part of the same tensor, nor what a body captures. The same value once more is harmless where the kernel is
        pointwise, since it then reads every element before it writes the one in its place.
        """
        call, source = self.calls.get(node), node.input(index)
        if call is None or source is None or index not in call.inplace or source in self.windows:
            return False
        reads = node_reads(node)
        reads.remove(source)
        others = [value for value in reads if self.root(value) is self.root(source)]
        return all(value is source and call.pointwise for value in others)


def choose_kernels(graph: Graph, nodes: Sequence[Node], asked: Asked) -> Choice:
    """A kernel for every node that has one. Values live inside others where all their kernels can."""

    def request(node: Node) -> Request:
        return Request(
            node, graph.constants, asked.target, asked.threads, winograd=asked.winograd and not is_exact(node)
        )

    choice = Choice(nodes)
    for node in nodes:
        awkward = awkward_value(node)
        if awkward is not None:
            choice.reasons[node] = awkward
        elif not is_view(node):
            found = _kernel(request(node), asked, choice.bodies)
            if isinstance(found, str):
                choice.reasons[node] = found
            else:
                choice.calls[node] = found
    alignment = GPU_ALIGNMENT if isinstance(asked.target, GpuTarget) else 1
    windows = Windows(graph, choice.calls, request, choice.is_view, alignment)
    windows.find(nodes)
    choice.windows = windows.windows
    choice.calls.update(windows.kernels())
    for node in windows.gone:
        del choice.calls[node]
    if isinstance(asked.target, Target):
        choice.calls = dict(zip(choice.calls, sharing(list(choice.calls.values()), asked.target), strict=True))
    return choice


def _kernel(request: Request, asked: Asked, bodies: dict[Node, tuple[Planned, ...]]) -> KernelCall | str:
    """Loops and branches are one kernel when all of their bodies have kernels; `bodies` receives the plans of those."""
    if request.node.op not in CONTROL or not isinstance(asked.target, Target) or not has_elements(request.node):
        return kernel_of(request, asked.choose)
    planned: list[Planned] = []

    def plan_body(body: Graph) -> Planned:
        planned.append(asked.plan_body(body))
        return planned[-1]

    try:
        call = control_call(request, plan_body)
    except NotNative as reason:
        return str(reason)
    bodies[request.node] = tuple(planned)
    return call


def _types(node: Node) -> list[str]:
    return [str(value.type) for value in node.inputs if value is not None]
