"""Builds the tape of a plan: one step per kernel call, in segments between the nodes that run on their references."""

from __future__ import annotations

from dataclasses import replace

from lathe.core.ir.graph import Graph, Node
from lathe.core.kernels.call import Block, Flag, In, KernelCall, Operand, Out, Outer, Packed, Scratch
from lathe.core.ops.opdef.registry import may_run_forever
from lathe.core.plan.control import outer_values
from lathe.core.plan.kernel_choice import KernelChoice
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import (
    ARENA,
    FLAG_BYTES,
    WEIGHTS,
    Address,
    Fallback,
    Segment,
    Step,
    StepRange,
    WeightItem,
    estimated_affine,
)
from lathe.core.plan.storage import Place, Storage


class Tape:
    """Makes the steps of a plan, and its schedule of native segments and fallbacks.

    `flags_base`: the number of the base of the flags.
    """

    def __init__(self, graph: Graph, choice: KernelChoice, storage: Storage, flags_base: int) -> None:
        self.steps: list[Step] = []
        self.schedule: list[Segment | Fallback] = []
        self._graph, self._storage, self._flags_base = graph, storage, flags_base
        self._flags: dict[Node, int] = {}
        self._write(choice)

    def _write(self, choice: KernelChoice) -> None:
        first = time = fallbacks = 0
        for node in choice.nodes:
            if node in choice.calls:
                if len(self.steps) > first and self._storage.times[node] == time:
                    self.steps[-1] = replace(self.steps[-1], has_barrier=False)
                self.steps.append(self._step(node, choice.calls[node]))
                time = self._storage.times[node]
            elif node in choice.reasons:
                first = self._end_segment(first)
                self.schedule.append(Fallback(fallbacks, node.name, node.op, choice.reasons[node]))
                fallbacks += 1
        self._end_segment(first)

    def _end_segment(self, first: int) -> int:
        """Schedule the steps from `first` on, and return the index of the next step."""
        if len(self.steps) > first:
            self.schedule.append(Segment(first, len(self.steps)))
        return len(self.steps)

    def _step(self, node: Node, call: KernelCall) -> Step:
        operands = tuple(self._operand(node, index, operand) for index, operand in enumerate(call.operands))
        return Step(
            symbol=call.code.symbol,
            operands=operands,
            label=node.name,
            op=node.op,
            summary=call.spec.summary,
            outputs=tuple(str(value.type) for value in node.outputs),
            flops=estimated_affine(call.flops),
            bytes=estimated_affine(call.bytes),
            grid=call.grid,
            flag=self._flags.get(node),
            may_not_end=may_run_forever([node]),
            ranges=tuple(
                StepRange(each.first, each.spec.symbol, each.spec.summary, each.grid, each.operands)
                for each in call.ranges
            ),
        )

    def _operand(self, node: Node, index: int, operand: Operand) -> Address:
        storage = self._storage
        match operand:
            case Scratch():
                return storage.address(Place(ARENA, storage.scratch[node, index]), node)
            case Out():
                return storage.address(storage.places[node.outputs[operand.index]], node)
            case In():
                return storage.address(storage.place(node.required_input(operand.index)), node)
            case Outer():
                return storage.address(storage.place(outer_values(node, self._graph.constants)[operand.index]), node)
            case Packed():
                return self._in_weights(storage.weights.packed(node.required_input(operand.index), operand), node)
            case Block():
                return self._in_weights(storage.weights.block(node, operand), node)
            case Flag():
                number = self._flags.setdefault(node, len(self._flags))
                return Address(self._flags_base, Affine(b=number * FLAG_BYTES))

    def _in_weights(self, item: WeightItem, node: Node) -> Address:
        return self._storage.address(Place(WEIGHTS, offset=Affine(b=item.offset)), node)
