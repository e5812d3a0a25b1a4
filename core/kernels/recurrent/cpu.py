"""Steps of recurrent layers: a task runs a block of rows through all time steps, with its state in the cache.

The weights of a vector of units lie together, gate by gate. Their sums are stored in scratch until all tiles of the
block are done. Then the cell is computed row by row, so that its code exists once and not for each tile height.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import accumulate, for_each_tile, zeros
from lathe.core.kernels.recurrent.spec import RecurrentSpec
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.fused import scalar_body

_F32 = DType.FLOAT32
_Visit: TypeAlias = Callable[[Val, Val, Val | None], None]  # row of the block, unit, mask


def generate(spec: RecurrentSpec, target: Target) -> Kernel:
    return _Recurrent(spec, target).kernel


@dataclass(frozen=True, slots=True)
class _Task:
    """The work of a task: `rows` rows of the batch from row `first` on, in one direction of the layer."""

    direction: Val
    first: Val  # row of the batch
    rows: Val


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a vector of units of one row at one step: the row, the time, the unit and the direction."""

    row: Val  # of the block
    entry: Val  # row of the batch
    item: Val  # time * batch + entry
    unit: Val
    direction: Val
    old: Val  # which half of `h` holds the state before the step
    mask: Val | None
    active: Val | None  # whether the row's sequence has not ended yet


class _Recurrent:
    """Writes the kernel of one spec."""

    def __init__(self, spec: RecurrentSpec, target: Target) -> None:
        self.spec, self.lanes = spec, target.lanes
        self.kernel = k = Kernel(spec, target)
        self.batch, self.steps = k.dim(spec.batch), k.dim(spec.steps)
        self._operands()
        rows = self._rows_per_task()
        blocks = (self.batch + (rows - 1)) // rows
        with k.parallel(len(spec.backwards), blocks) as (direction, block):
            first = block * rows
            self._through_time(_Task(direction, first, k.ops.min(self.batch - first, rows)))

    def _operands(self) -> None:
        """Set the attributes for the operands, in the order of the spec, and for scratch; absent operands are None."""
        k, spec = self.kernel, self.spec
        index = iter(range(16))

        def following(dtype: DType = _F32) -> Pointer:
            return k.operand(next(index), dtype)

        self.gates = following()
        self.weights = [following() for _ in spec.stages]
        self.bias = following() if spec.bias else None
        self.lengths = following(DType.INT32) if spec.lengths else None
        self.initial = [following() if given else None for given in spec.initial]
        self.peepholes = following() if spec.peepholes else None
        self.y, self.last_h = following(), following()
        self.last_c = following() if spec.cell == "LSTM" else None
        scratch = k.scratch(next(index), spec.scratch_bytes, _F32)
        part = spec.block * spec.pitch
        self.h = scratch  # [2][block][pitch]
        self.extra = [scratch.at(part * i) for i in range(2, spec.buffers)]  # an LSTM's cell; a GRU's update and reset
        self.sums = scratch.at(part * spec.buffers)  # [block][gates of a stage][lanes]

    def _rows_per_task(self) -> Val:
        """Rows per task, whole tiles: an equal share of the batch for each thread, at most as many as scratch holds."""
        k, height = self.kernel, self.spec.height
        workers = k.ops.max(k.threads // len(self.spec.backwards), 1)
        share = (self.batch + workers - 1) // workers
        return k.ops.max(k.ops.min((share + (height - 1)) // height * height, self.spec.block), height)

    def _through_time(self, task: _Task) -> None:
        k, spec = self.kernel, self.spec
        self._start(task, self.initial[0], self.h)
        if spec.cell == "LSTM":
            self._start(task, self.initial[1], self.extra[0])
        with k.loop(0, self.steps) as step:
            time = self._time(task.direction, step)
            for stage in range(len(spec.stages)):
                with k.loop(0, spec.blocks) as block:
                    self._units(task, time, step, stage, block)
        half = self.steps % 2 * (spec.block * spec.pitch)
        self._end(task, self.h.at(half), self.last_h)
        if self.last_c is not None:
            self._end(task, self.extra[0], self.last_c)

    def _time(self, direction: Val, step: Val) -> Val:
        """The time at which step number `step` runs: counted from the end if the direction runs backwards.

        Of two directions, the second one does.
        """
        backwards, last = self.spec.backwards, self.steps - 1
        if len(backwards) == 1:
            return last - step if backwards[0] else step
        return self.kernel.ops.select(direction.equals(1), last - step, step)

    def _start(self, task: _Task, given: Pointer | None, state: Pointer) -> None:
        """Set the rows of a task in `state` to the state before the first step: that at `given`, or zero if None.

        A sequence without steps begins with zero (`_initial_state`).
        """

        def copy(row: Val, unit: Val, mask: Val | None) -> None:
            place = row * self.spec.pitch + unit
            if given is None:
                state.store(self.kernel.zeros(_F32, self.lanes), place)
            else:
                value = given.load(self._of_batch(task, row, unit), self.lanes, mask)
                state.store(self._initial_state(task.first + row, value), place)

        self._each_vector(task, copy)

    def _initial_state(self, entry: Val, state: Val) -> Val:
        """The vector `state` of batch row `entry`, or zero if the row's sequence has no steps.

        Such a sequence keeps this state to the end.
        """
        if self.lengths is None:
            return state
        empty = self.lengths.load(entry).equals(0)
        return self.kernel.ops.select(empty, self.kernel.zeros(_F32, self.lanes), state)

    def _end(self, task: _Task, state: Pointer, result: Pointer) -> None:
        def copy(row: Val, unit: Val, mask: Val | None) -> None:
            value = state.load(row * self.spec.pitch + unit, self.lanes)
            result.store(value, self._of_batch(task, row, unit), mask)

        self._each_vector(task, copy)

    def _each_vector(self, task: _Task, visit: _Visit) -> None:
        k = self.kernel
        with k.loop(0, task.rows) as row, k.loop(0, self.spec.blocks) as block:
            visit(row, block * self.lanes, self._mask(block * self.lanes))

    def _of_batch(self, task: _Task, row: Val, unit: Val) -> Val:
        """The offset of a unit of row `row` of the task in a state [directions, batch, hidden]."""
        return ((task.direction * self.batch) + task.first + row) * self.spec.hidden + unit

    def _mask(self, unit: Val) -> Val | None:
        hidden = self.spec.hidden
        return None if hidden % self.lanes == 0 else self.kernel.lane_mask(self.kernel.index(hidden) - unit, self.lanes)

    def _units(self, task: _Task, time: Val, step: Val, stage: int, block: Val) -> None:
        """Compute a stage of a step for vector number `block` of the units: its products, then its part of the cell."""
        k, spec = self.kernel, self.spec
        gates, old = spec.stages[stage], step % 2
        self._products(task, old, stage, block)
        unit = block * self.lanes
        mask = self._mask(unit)
        with k.loop(0, task.rows) as row:
            entry = task.first + row
            active = None if self.lengths is None else time < self.lengths.load(entry).cast(DType.INT64)
            place = _Place(row, entry, time * self.batch + entry, unit, task.direction, old, mask, active)
            sums = [self.sums.load((row * len(gates) + v) * self.lanes, self.lanes) for v in range(len(gates))]
            self._cell(place, stage, [self._add_bias(place, g, value) for g, value in zip(gates, sums, strict=True)])

    def _products(self, task: _Task, old: Val, stage: int, block: Val) -> None:
        """Multiply all rows' state by a stage's weights for vector number `block` of the units.

        `old` is the half of `self.h` with the state before the step. The results go to `self.sums`.
        """
        k, spec = self.kernel, self.spec
        count = len(spec.stages[stage])
        line = count * self.lanes
        weights = self.weights[stage].at((task.direction * spec.blocks + block) * (spec.hidden * line))
        source = self.h.at(old * (spec.block * spec.pitch)) if stage == 0 else self.extra[1]

        def tile(row: Val, height: int) -> None:
            sources = [source.at((row + r) * spec.pitch) for r in range(height)]
            width = spec.width(stage, height)
            for first in range(0, count, width):
                start, panel = zeros(k, height, width, self.lanes), weights.at(first * self.lanes)
                for r, values in enumerate(accumulate(k, start, sources, 1, panel, line, spec.hidden)):
                    for v, value in enumerate(values):
                        self.sums.store(value, ((row + r) * count + first + v) * self.lanes)

        for_each_tile(k, k.index(0), task.rows, spec.batch, spec.height, tile)

    # The cell

    def _cell(self, p: _Place, stage: int, sums: Sequence[Val]) -> None:
        match self.spec.cell, len(self.spec.stages), stage:
            case "RNN", _, _:
                self._finish(p, self._activate(0, self._input(p, 0) + sums[0]))
            case "LSTM", _, _:
                self._lstm(p, sums)
            case "GRU", 1, _:
                update = self._activate(0, self._input(p, 0) + sums[0])
                reset = self._activate(0, self._input(p, 1) + sums[1])
                self._mix(p, update, self._input(p, 2) + reset * sums[2])
            case "GRU", _, 0:
                self._reset(p, sums)
            case _:
                self._mix(p, self.extra[0].load(self._at(p), self.lanes), self._input(p, 2) + sums[0])

    def _reset(self, p: _Place, sums: Sequence[Val]) -> None:
        """A GRU's first stage: store the update gate, and the state times the reset gate, for the third gate's product.

        `sums` are the products of the two gates.
        """
        self.extra[0].store(self._activate(0, self._input(p, 0) + sums[0]), self._at(p))
        reset = self._activate(0, self._input(p, 1) + sums[1])
        self.extra[1].store(reset * self._state(p), self._at(p))

    def _mix(self, p: _Place, update: Val, candidate: Val) -> None:
        hidden = self._activate(1, candidate)
        self._finish(p, self.kernel.ops.fma(update, self._state(p) - hidden, hidden))

    def _lstm(self, p: _Place, sums: Sequence[Val]) -> None:
        memory = self.extra[0].load(self._at(p), self.lanes)
        enter, leave, forget, candidate = (self._input(p, gate) + value for gate, value in enumerate(sums))
        enter = self._activate(0, self._with_peephole(p, 0, enter, memory))
        forget = 1.0 - enter if self.spec.input_forget else self._activate(0, self._with_peephole(p, 2, forget, memory))
        following = self.kernel.ops.fma(forget, memory, enter * self._activate(1, candidate))
        leave = self._activate(0, self._with_peephole(p, 1, leave, following))
        new_memory = following if p.active is None else self.kernel.ops.select(p.active, following, memory)
        self.extra[0].store(new_memory, self._at(p))
        self._finish(p, leave * self._activate(2, following))

    def _finish(self, p: _Place, state: Val) -> None:
        """Store the new state and the step's result. If a sequence has ended, its state stays and its result is 0."""
        k, spec, result = self.kernel, self.spec, state
        if p.active is not None:
            result = k.ops.select(p.active, state, k.zeros(_F32, self.lanes))
            state = k.ops.select(p.active, state, self._state(p))
        self.h.store(state, (1 - p.old) * (spec.block * spec.pitch) + self._at(p))
        time, directions = p.item - p.entry, len(spec.backwards)  # time * batch
        at = time * directions + p.direction * self.batch + p.entry
        self.y.store(result, at * spec.hidden + p.unit, p.mask)

    def _at(self, p: _Place) -> Val:
        return p.row * self.spec.pitch + p.unit

    def _state(self, p: _Place) -> Val:
        """The vector of the hidden state at `p` before the step."""
        return self.h.load(p.old * (self.spec.block * self.spec.pitch) + self._at(p), self.lanes)

    def _input(self, p: _Place, gate: int) -> Val:
        """The vector of the input's contribution to gate `gate` at `p`, which operand G holds."""
        spec = self.spec
        at = (p.item * len(spec.backwards) + p.direction) * spec.gates + gate
        return self.gates.load(at * spec.hidden + p.unit, self.lanes, p.mask)

    def _add_bias(self, p: _Place, gate: int, value: Val) -> Val:
        if self.bias is None:
            return value
        at = (p.direction * self.spec.gates + gate) * self.spec.hidden + p.unit
        return value + self.bias.load(at, self.lanes, p.mask)

    def _with_peephole(self, p: _Place, gate: int, value: Val, memory: Val) -> Val:
        if self.peepholes is None:
            return value
        at = (p.direction * 3 + gate) * self.spec.hidden + p.unit
        return self.kernel.ops.fma(self.peepholes.load(at, self.lanes, p.mask), memory, value)

    def _activate(self, index: int, x: Val) -> Val:
        k, limit = self.kernel, self.spec.clip
        if limit is not None:
            x = k.ops.max(k.ops.min(x, limit), -limit)
        return k.ops.splat(scalar_body(k.ops, self.spec.activations[index], [x])[0], self.lanes)
