"""Whatever makes a plan give wrong results, the checker finds: plans with random changes, run step by step.

The steps run on a simulated device, whose kernels are references over memory, so that any plan can be tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from core.check.plans import check_plan
from core.errors import DeviceError, PlanError
from core.ir.graph import Array
from core.kernels.catalog import In, Out
from core.kernels.reference import ReferenceKernel, object_of
from core.plan.plan import ARENA, WEIGHTS, Address, Planned, weight_chunks
from core.reference import interpret
from tests.core.check.cases import GPU, Case, N, case, joined, optimized, written
from tests.core.check.faults import address_at, moved, operands, with_operand, with_step
from tests.core.random_nets import Net

_TRIES = 150
_BITS = 40  # of an address inside a base


class Machine:
    """Memory for each base, full of NaN, and the steps of a plan one after the other."""

    def __init__(self, planned: Planned, feeds: Mapping[str, Array], n: int) -> None:
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
        """The outputs. DeviceError for memory that is not there."""
        for step in self.plan.steps:
            kernel = ReferenceKernel(object_of(self.planned.specs[step.symbol]))
            kernel.run((1, 1, 1), [self._place(each) for each in step.operands], self.n, self.view)
        for name, base in self.plan.copies:
            address, type_ = self.plan.located[name]
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


def changed(made: Case, rng: Random) -> Planned:
    """The plan with one or two random changes, most of which make it wrong."""
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


def is_right(made: Case, planned: Planned) -> bool:
    """Whether a plan gives what the graph means, for two batch sizes."""
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


@pytest.mark.parametrize("made", simulated_cases(), ids=lambda made: made.name)
def test_plans_that_give_wrong_results_are_found(made: Case) -> None:
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
