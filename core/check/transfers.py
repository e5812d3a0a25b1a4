"""Checks the transfers of a plan: what they copy must be there, and nothing may touch it meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lathe.core.check.boxes import Spans
from lathe.core.check.facts import base_name
from lathe.core.check.memory import Memory
from lathe.core.errors import PlanError
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import ARENA, WEIGHTS, Address, Transfer

if TYPE_CHECKING:
    from lathe.core.check.symbolic_run import SymbolicRun

Runs = list[tuple[int, int, int]]  # start, end and shift of what a range of bytes holds, relative to its start


class TransferCheck:
    """The transfers of a plan in a symbolic run.

    While a copy into the arena is on its way, its bytes belong to nobody; while one out of it is on its way, they must
    stay as they are. The weight block counts as one tensor.
    """

    def __init__(self, run: SymbolicRun) -> None:
        self._run, plan = run, run.plan
        if not all(0 <= each.begin <= each.end <= len(plan.steps) for each in plan.transfers):
            raise PlanError(f"a transfer lies outside of the {len(plan.steps)} steps")
        self._held: dict[int, Runs] = {}  # by transfer on its way: what it copies
        self._claims: dict[int, int] = {}  # the shifts of arena bytes on their way
        self._weights: int | None = None  # the number of the weight block, as a shift
        if plan.transfers:
            run.memory[plan.swap_base] = Memory(plan.swap.at(plan.address_rows(run.n)))

    def cross(self, step: int) -> None:
        """The transfers before a step: some end, then some happen here, then others begin.

        PlanError at the first fault.
        """
        spans = [(index, each.begin, each.end) for index, each in enumerate(self._run.plan.transfers)]
        for index, begin, end in spans:
            if begin < end == step:
                self._end(index)
        for index, begin, end in spans:
            if begin == end == step:
                self._begin(index)
                self._end(index)
        for index, begin, end in spans:
            if begin == step < end:
                self._begin(index)

    def origin_of(self, address: Address) -> Address:
        """The place in the weight block of the weights at an address, which may be a copy of them in the arena.

        `address` itself if a whole item of the block is not there.
        """
        if address.base != ARENA or self._weights is None:
            return address
        at, memory = self._run.sizes.at(address), self._run.memory[ARENA]
        for _, _, shift in memory.runs(at, at + 1):
            origin = at - shift + self._weights
            end = self._run.weights.end_of(origin)
            if not memory.lacks(Spans([at], end - origin), shift):
                return Address(WEIGHTS, Affine(b=origin))
        return address

    def _begin(self, index: int) -> None:
        transfer = self._run.plan.transfers[index]
        low, high = self._arena_bytes(transfer)
        if low < 0 or high > self._run.plan.arena.at(self._run.plan.address_rows(self._run.n)):
            raise PlanError(f"{_name(transfer)} uses bytes {low} to {high} of the arena, for n = {self._run.n}")
        self._held[index] = self._source(transfer)
        if transfer.into and high > low:
            self._claims[index] = self._run.claim(f"a copy of %{transfer.name} on its way")
            self._write(ARENA, low, [(0, high - low, self._claims[index] - low)])

    def _end(self, index: int) -> None:
        transfer = self._run.plan.transfers[index]
        low, high = self._arena_bytes(transfer)
        held = self._held.pop(index)
        if self._source(transfer) != held:
            raise PlanError(f"{_name(transfer)}: its source changes on the way, for n = {self._run.n}")
        if not transfer.into:
            self._write(transfer.host.base, self._run.sizes.at(transfer.host), held)
        elif high > low:
            mine = (0, high - low, self._claims.pop(index) - low)
            if self._read(ARENA, low, high) != [mine]:
                raise PlanError(f"{_name(transfer)}: its bytes in the arena are used on the way, for n = {self._run.n}")
            self._run.memory[ARENA].wipe(low, high)
            self._write(ARENA, low, held)

    def _arena_bytes(self, transfer: Transfer) -> tuple[int, int]:
        low = self._run.sizes.at(Address(ARENA, transfer.arena))
        return low, low + transfer.nbytes.at(self._run.n)

    def _source(self, transfer: Transfer) -> Runs:
        run, nbytes = self._run, transfer.nbytes.at(self._run.n)
        low = run.sizes.at(transfer.host if transfer.into else Address(ARENA, transfer.arena))
        base = transfer.host.base if transfer.into else ARENA
        if base == WEIGHTS:
            if low < run.plan.resident or low + nbytes > run.plan.weights:
                raise PlanError(f"{_name(transfer)}: its bytes are not in host memory")
            if self._weights is None:
                self._weights = run.claim("the weight block")
            return [(0, nbytes, self._weights - low)]
        size = run.memory[base].size
        if low < 0 or size is None or low + nbytes > size:
            raise PlanError(f"{_name(transfer)} uses bytes {low} to {low + nbytes} of {base_name(run.plan, base)}")
        return self._read(base, low, low + nbytes)

    def _read(self, base: int, low: int, high: int) -> Runs:
        """What bytes hold; shifts are relative to `low`, so that they count for any place that the bytes move to."""
        return [(first - low, last - low, shift - low) for first, last, shift in self._run.memory[base].runs(low, high)]

    def _write(self, base: int, low: int, held: Runs) -> None:
        for first, last, shift in held:
            self._run.memory[base].write(Spans([low + first], last - first), shift + low)


def _name(transfer: Transfer) -> str:
    way = "into" if transfer.into else "out of"
    return f"the copy of %{transfer.name} {way} the arena before step {transfer.end}"
