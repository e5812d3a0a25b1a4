"""Chooses the kernel of each node, and the values that are windows of others (`lathe.core.plan.windows`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lathe.core.ir.graph import Graph, Node, Value, node_reads
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import VIEWS, KernelCall, Request, Selector, has_elements, is_exact
from lathe.core.kernels.choose import select
from lathe.core.kernels.shared.runtime_numbers import share_code
from lathe.core.kernels.target import GPU_ALIGNMENT, GpuTarget, Target
from lathe.core.plan.batch_validity import is_valid_for_every_batch
from lathe.core.plan.control import WITH_BODIES, NotNativeError, PlanBody, control_call
from lathe.core.plan.plan import PlannedGraph, exact_affine
from lathe.core.plan.windows import Window, Windows


def is_plannable(value: Value) -> bool:
    """Whether a value can live in the arena: a tensor, not of strings, of a known size.

    `exact_affine` must express each extent and the number of elements.
    """
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is DType.STRING:
        return False
    return all(exact_affine(dim) is not None for dim in type_.shape) and exact_affine(type_.size) is not None


def unplannable_reason(node: Node) -> str | None:
    """Why no kernel can run the node: it reads or writes a value that cannot live in the arena; None if all can."""
    awkward = next((v for v in [*node_reads(node), *node.outputs] if not is_plannable(v)), None)
    return f"%{awkward.name} is {awkward.type}, whose size only a run shows" if awkward is not None else None


def is_view(node: Node) -> bool:
    """Whether the node is in `VIEWS`, and its one output has the bytes of its one input for every batch size."""
    source = node.input(0)
    if node.op not in VIEWS or len(node.outputs) != 1 or source is None or not is_plannable(source):
        return False
    is_known = len(node.inputs) == 1  # otherwise data decide the shape, and the output's type is only declared
    return is_known and is_plannable(node.output) and source.tensor.nbytes == node.output.tensor.nbytes


def choose_kernel(request: Request, choose: Selector = select) -> KernelCall | str:
    """The kernel of a node whose values can live in the arena, or a text with the reason why the node has none.

    `choose` selects from the catalog. It is asked only for nodes without empty operands that are valid for every batch
    size.
    """
    node = request.node
    label = f"{node.op} of {', '.join(_types(node))}"
    if not has_elements(node):
        return f"{label} has empty operands"
    if not is_valid_for_every_batch(node, request.constants):  # before `choose`: selectors assume that extents agree
        return f"{label} is valid for some batch sizes only"
    call = choose(request)
    return call if call is not None else f"no compiled kernel for {label}"


@dataclass(frozen=True)
class ChoiceOptions:
    """The arguments of `make_plan` that the choice of kernels depends on. `plan_body` plans bodies of control flow."""

    target: Target | GpuTarget
    threads: int
    choose: Selector
    winograd: bool
    plan_body: PlanBody


@dataclass
class KernelChoice:
    """How each node of a graph runs: with the kernel in `calls`, or on its reference for the reason in `reasons`.

    Views are in neither, nor are copies that `windows` made unnecessary. `bodies` has the plans of the bodies of each
    control-flow node that is one kernel.
    """

    nodes: Sequence[Node]
    calls: dict[Node, KernelCall] = field(default_factory=dict)
    reasons: dict[Node, str] = field(default_factory=dict)
    windows: Mapping[Value, Window] = field(default_factory=dict)
    bodies: dict[Node, tuple[PlannedGraph, ...]] = field(default_factory=dict)

    def is_view(self, node: Node) -> bool:
        return node not in self.reasons and is_view(node)

    def root(self, value: Value) -> Value:
        """The value that owns the memory of `value`, found through views and windows; `value` if it is neither."""
        while True:
            if value in self.windows:
                value = self.windows[value].parent
            elif value.producer is not None and self.is_view(value.producer):
                value = value.producer.inputs[0]  # type: ignore[assignment]
            else:
                return value

    def may_overwrite(self, node: Node, index: int) -> bool:
        """Whether the kernel of `node` may write its result to the memory of input `index`.

        The caller must make sure that no other node reads that memory later. The kernel must allow it
        (`KernelCall.inplace`), and no other operand may lie in that memory: neither a view or a window of the same
        tensor, nor a captured value. The same value as a second operand is harmless if the kernel is pointwise: it
        then reads every element before it writes the element with the same index. False if the input is a window or
        absent, or the node has no kernel.
        """
        call, source = self.calls.get(node), node.input(index)
        if call is None or source is None or index not in call.inplace or source in self.windows:
            return False
        reads = node_reads(node)
        reads.remove(source)
        others = [value for value in reads if self.root(value) is self.root(source)]
        return all(value is source and call.pointwise for value in others)


def choose_kernels(graph: Graph, nodes: Sequence[Node], asked: ChoiceOptions) -> KernelChoice:
    """Choose a kernel for every node that has one, and make values windows of others where all kernels allow it.

    `nodes`: the nodes of the graph, in the order in which they run.
    """

    def request(node: Node) -> Request:
        return Request(
            node, graph.constants, asked.target, asked.threads, winograd=asked.winograd and not is_exact(node)
        )

    choice = KernelChoice(nodes)
    for node in nodes:
        awkward = unplannable_reason(node)
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
        choice.calls = dict(zip(choice.calls, share_code(list(choice.calls.values()), asked.target), strict=True))
    return choice


def _kernel(request: Request, asked: ChoiceOptions, bodies: dict[Node, tuple[PlannedGraph, ...]]) -> KernelCall | str:
    """The kernel of a node, or the reason why it has none.

    On a CPU, control flow is one kernel unless `control_call` refuses it; `bodies` then receives its bodies' plans.
    """
    if request.node.op not in WITH_BODIES or not isinstance(asked.target, Target) or not has_elements(request.node):
        return choose_kernel(request, asked.choose)
    planned: list[PlannedGraph] = []

    def plan_body(body: Graph) -> PlannedGraph:
        planned.append(asked.plan_body(body))
        return planned[-1]

    try:
        call = control_call(request, plan_body)
    except NotNativeError as reason:
        return str(reason)
    bodies[request.node] = tuple(planned)
    return call


def _types(node: Node) -> list[str]:
    return [str(value.type) for value in node.inputs if value is not None]
