"""The checker finds every plan that gives wrong results: plans with random changes are run step by step.

The steps run on a simulated device, whose kernels are reference operators over memory, so any plan can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from lathe.core.check.plans import check_plan
from lathe.core.errors import DeviceError, PlanError
from lathe.core.ir.graph import Array
from lathe.core.kernels.call import In, Out
from lathe.core.kernels.reference.cpu import ReferenceKernel, object_of
from lathe.core.plan.plan import ARENA, WEIGHTS, Address, PlannedGraph, weight_chunks
from lathe.core.reference import interpret
from tests.core.check.cases import GPU, Case, N, case, joined, optimized, written
from tests.core.check.faults import address_at, moved, operands, with_operand, with_step
from tests.core.random_nets import Net

_TRIES = 150
_BITS = 40  # bits of an address for the offset in a base; the bits above them number the base


class Machine:
    """Runs the steps of a plan one by one, with memory for each base that starts full of NaN."""

    def __init__(self, planned: PlannedGraph, feeds: Mapping[str, Array], n: int) -> None:
        self.planned, self.plan, self.n = planned, planned.plan, n
        self.blocks = {ARENA: np.full(self.plan.arena.at(max(n, 1)), 0xFF, np.uint8)}
        self.blocks[WEIGHTS] = np.frombuffer(b"".join(map(bytes, weight_chunks(planned))), np.uint8).copy()
        for port in self.plan.inputs:
            self.blocks[port.base] = np.ascontiguousarray(feeds[port.name]).reshape(-1).view(np.uint8).copy()
        for port in self.plan.outputs:
            nbytes = int(np.prod(port.type.evaluate({"n": n}))) * port.type.dtype.itemsize  # type: ignore[union-attr]
            self.blocks[port.base] = np.full(nbytes, 0xFF, np.uint8)

    def view(self, address: int, nbytes: int) -> Array:
        base, at = (address >> _BITS) - 1, address & ((1 << _BITS) - 1)
        block = self.blocks.get(base)
        if block is None or at + nbytes > block.nbytes:
            raise DeviceError(f"{nbytes} bytes at {at} of base {base}")
        return block[at : at + nbytes]

    def run(self) -> dict[str, Array]:
        """The outputs. DeviceError if a step accesses bytes outside of its blocks."""
        for step in self.plan.steps:
            kernel = ReferenceKernel(object_of(self.planned.specs[step.symbol]))
            kernel.run((1, 1, 1), [self._place(each) for each in step.operands], self.n, self.view)
        for name, base in self.plan.copies:
            address, type_ = self.plan.value_addresses[name]
            nbytes = int(np.prod(type_.evaluate({"n": self.n}))) * type_.dtype.itemsize
            self.blocks[base][:nbytes] = self.view(self._place(address), nbytes)
        return {port.name: self.blocks[port.base] for port in self.plan.outputs}

    def _place(self, address: Address) -> int:
        at = address.offset.at(max(self.n, 1))
        if at < 0:
            raise DeviceError(f"address {at}")
        return (address.base + 1 << _BITS) + at


def simulated_cases() -> list[Case]:
    def chain(b, x):  # type: ignore[no-untyped-def]
        h = b("Exp", x)
        weight = b.constant(np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16))
        y = b("Softmax", b("MatMul", h, weight))
        return [b("Add", b("Tanh", y), h), b("Relu", b("MatMul", y, weight))]

    rng = np.random.default_rng(3)
    net = optimized(Net(lambda below: int(rng.integers(below))).grow(10))
    nets = [case("net", net, target=GPU)] if all(_is_native(node.op) for node in net.nodes) else []
    return [case("chain", written(chain, N, 16), target=GPU), joined(target=GPU), *nets]


def _is_native(op: str) -> bool:
    return op != "Det"


def changed(made: Case, rng: Random) -> PlannedGraph:
    """The plan with one or two random changes, which mostly make it wrong."""
    planned = made.planned
    for _ in range(rng.choice((1, 1, 2))):
        now = replace(made, planned=planned)
        places = [place for place, _ in operands(now, In, Out)]
        place = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            planned = with_operand(now, place, address_at(now, rng.choice(places)))
        elif kind == 1:
            planned = with_operand(now, place, moved(address_at(now, place), b=16 * rng.randrange(-8, 9)))
        elif kind == 2:
            other = address_at(now, rng.choice(places))
            planned = with_operand(now, place, Address(address_at(now, place).base, other.offset))
        else:
            given = list(now.plan.steps[place[0]].operands)
            rng.shuffle(given)
            planned = with_step(now, place[0], operands=tuple(given))
    return planned


def is_right(made: Case, planned: PlannedGraph) -> bool:
    """True if a plan gives the graph's results for two batch sizes."""
    for n in (1, 3):
        rng = np.random.default_rng(n)
        feeds = {}
        for value in made.graph.inputs:
            shape = value.tensor.evaluate({"n": n})
            feeds[value.name] = rng.uniform(-1, 1, shape).astype(value.dtype.numpy)
        want = interpret(made.graph, feeds)
        try:
            got = Machine(planned, feeds, n).run()
        except (DeviceError, ValueError):
            return False
        for name, array in want.items():
            if not np.allclose(got[name].view(array.dtype).reshape(array.shape), array, 1e-4, 1e-5):
                return False
    return True


@pytest.mark.sample(3)
@pytest.mark.parametrize("made", simulated_cases(), ids=lambda made: made.name)
def test_the_checker_finds_plans_with_wrong_results(made: Case) -> None:
    assert is_right(made, made.planned)
    wrong = 0
    for seed in range(_TRIES):
        planned = changed(made, Random(seed))
        if is_right(made, planned):
            continue
        wrong += 1
        with pytest.raises(PlanError):
            check_plan(made.graph, planned, made.target)
    assert wrong > _TRIES // 3
