"""Checks the weight block: every constant that a step reads must be in it, as it is or in the kernel's layout."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from lathe.core.check.boxes import Box
from lathe.core.check.facts import Facts, StepFacts
from lathe.core.errors import PlanError
from lathe.core.ir.graph import Array
from lathe.core.kernels.call import Block, Flag, Operand, Packed
from lathe.core.plan.plan import FLAG_BYTES, WEIGHTS, Address


class Weights:
    """The items of a plan's weight block, sorted by offset. An operand that has passed a check is not checked again.

    PlanError if items overlap, or lie outside the `plan.weights` bytes of the block.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._items = sorted(facts.planned.weights, key=lambda item: item.offset)
        self._starts = [item.offset for item in self._items]
        self._checked: set[tuple[object, ...]] = set()
        for before, after in pairwise(self._items):
            if before.offset + before.nbytes > after.offset:
                raise PlanError(f"weights at {before.offset} reach beyond {after.offset}, where the next ones begin")
        end = max((item.offset + item.nbytes for item in self._items), default=0)
        if min(self._starts, default=0) < 0 or end > facts.plan.weights:
            raise PlanError(f"weights lie up to byte {end}, expected from 0 to {facts.plan.weights}")

    def check_operand(self, each: StepFacts, index: int, address: Address) -> None:
        """PlanError unless operand `index`, which is no value (packed weights, a block or a flag), is at `address`.

        Packed weights and blocks: the item of the weight block at this offset must have the expected bytes, and the
        offset must not depend on the batch size. Flag: `address` must be that of the flag number of the step.
        """
        if (each.index, index, address) in self._checked:
            return
        operand = each.call.operands[index]
        where = f"{each}, operand {index}"
        if isinstance(operand, Flag):
            expected = Address(self._facts.plan.flags_base, type(address.offset)(b=(each.step.flag or 0) * FLAG_BYTES))
            if each.step.flag is None or address != expected:
                raise PlanError(f"{where}: the flag is at {address}, expected {expected}")
        else:
            expected_data = self._expected_data(each, operand)
            if address.offset.a or address.base != WEIGHTS or not self._holds(address.offset.b, expected_data):
                raise PlanError(f"{where}: {operand} should lie at {address}, where other weights are")
        self._checked.add((each.index, index, address))

    def check_constant(self, where: object, index: int | None, box: Box, base: int, at: int) -> None:
        """PlanError unless the constant `box.home` is in the weight block, where a step reads its part `box`.

        The step reads the part at byte `at` of base `base`. `where` and `index` (of the operand) are for the message.
        """
        if (box.home, base, at - box.start) in self._checked:
            return
        if base != WEIGHTS or not self._holds(at - box.start, self._facts.graph.constants[box.home]):
            operand = f", operand {index}" if index is not None else ""
            raise PlanError(
                f"{where}{operand}: constant %{box.home.name} is not at byte {at - box.start} of base {base}"
            )
        self._checked.add((box.home, base, at - box.start))

    def end_of(self, offset: int) -> int:
        """The end of the item of the weight block with the byte at this offset; the offset itself if there is none."""
        index = bisect_right(self._starts, offset) - 1
        return max(self._items[index].offset + self._items[index].nbytes, offset) if index >= 0 else offset

    def _expected_data(self, each: StepFacts, operand: Operand) -> Array:
        if isinstance(operand, Block):
            return operand.data
        value = each.node.input(operand.index) if isinstance(operand, Packed) else None
        if not isinstance(operand, Packed) or value is None or value not in self._facts.graph.constants:
            raise PlanError(f"{each} has operand {operand}, which is no constant of its node")
        return operand.pack(self._facts.graph.constants[value])

    def _holds(self, offset: int, expected: Array) -> bool:
        """Whether the item at this offset has the bytes of the array `expected`; true for an empty array."""
        index = bisect_right(self._starts, offset) - 1
        if expected.nbytes == 0:
            return True
        if index < 0 or self._starts[index] != offset:
            return False
        data = self._items[index].data
        if data is expected:
            return True
        return data.nbytes == expected.nbytes and np.array_equal(_bytes(data), _bytes(expected))


def _bytes(array: Array) -> Array:
    """The bytes of an array in row-major order, without a copy of a contiguous one."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
