"""Steps of recurrent layers on a GPU: a program runs some rows through time, all units one block after the other.

Each unit needs the state of all units. Threads exchange it through scratch memory that no other program touches, so
barriers among the program's own threads suffice. States alternate between two buffers, so that nothing is overwritten
that may still be read before the next barrier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.algebra import Algebra, Operand, Reg
from lathe.core.kernels.cuda.product import edge_mask, join_masks, load_factors, multiply, zero_sums
from lathe.core.kernels.cuda.source import Source, Writer, text_of
from lathe.core.kernels.recurrent.cuda_spec import RecurrentSpec
from lathe.core.kernels.shared.cuda_product import F32
from lathe.core.kernels.target import GpuTarget
from lathe.core.ops.nn.fused import scalar_body

_UPDATE, _RESET = 2, 3  # buffers of a GRU
_CELL = 2  # the distance from the buffers of the state to those of an LSTM's cell


def generate(spec: RecurrentSpec, target: GpuTarget) -> Source:
    return _Recurrent(spec).source()


@dataclass(frozen=True, slots=True)
class _Units:
    """Variables of a block of units: their indices [1, units], and masks of those that exist.

    `mask` is None if all do; `both` is the mask of rows and units.
    """

    index: str
    mask: str | None
    both: str


@dataclass(frozen=True, slots=True)
class _Step:
    """A step: its time, the offsets of the states before and after it, and a mask of active sequences (None: all)."""

    time: str
    before: str
    after: str
    active: str | None


class _Recurrent:
    """Writes the kernel of one spec."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec, self.w = spec, Writer(spec.symbol)
        self.e = Algebra(self.w)
        for name, present in self._operands().items():
            if present:
                self.w.operand(name, DType.INT32 if name == "lengths" else F32)
        w, tile = self.w, spec.tile
        self.row = w.let(f"tl.program_id(0) * {tile.rows} + tl.arange(0, {tile.rows})[:, None]", "row")
        self.row_mask = w.let(f"{self.row} < {text_of(spec.batch)}", "inside")
        self.direction = w.let("tl.program_id(1)", "direction")
        self.size = w.let(f"{text_of(spec.batch)} * {len(spec.backwards) * spec.hidden}", "size")
        self.rows = w.let(f"({self.direction} * {text_of(spec.batch)} + {self.row}) * {spec.hidden}", "rows")

    def _operands(self) -> dict[str, bool]:
        spec = self.spec
        h0, c0 = spec.initial
        return {
            "g": True, "r": True, "bias": spec.bias, "lengths": spec.lengths, "h0": h0, "c0": c0,
            "peep": spec.peepholes, "y": True, "h": True, "c": spec.cell == "LSTM", "state": True,
        }  # fmt: skip

    def source(self) -> Source:
        spec, w = self.spec, self.w
        length = w.let(f"tl.load(lengths + {self.row}, {self.row_mask}, other=0)", "length") if spec.lengths else None
        self._begin(length)
        with w.block(f"for s in range(0, {text_of(spec.steps)})"):
            now = self._current_step(length)
            {"RNN": self._rnn, "GRU": self._gru, "LSTM": self._lstm}[spec.cell](now)
            self._barrier()
        self._end()
        return w.source(spec.tile.warps, spec.tile.stages)

    # Time

    def _begin(self, length: str | None) -> None:
        """Write code that stores the states before the first step: as given, or zero.

        `length` is the variable of the sequences' lengths, if there are any; one of 0 steps begins with zero.
        """
        starts = [("h0", 0, self.spec.initial[0])]
        if self.spec.cell == "LSTM":
            starts.append(("c0", _CELL, self.spec.initial[1]))
        with self._units() as units:
            for name, buffer, given in starts:
                value = self._load(name, self.rows, units) if given else Reg(zero_sums(self.w, self.spec.tile), F32)
                if given and length is not None:
                    value = self.e.select(Reg(self.w.let(f"{length} > 0", "begins"), DType.BOOL), value, 0.0)
                self._store_state(self._buffer(buffer), units, value)
        self._barrier()

    def _current_step(self, length: str | None) -> _Step:
        w, steps = self.w, text_of(self.spec.steps)
        forth, back = "s", f"{steps} - 1 - s"
        times: dict[tuple[bool, ...], str] = {(False,): forth, (True,): back}
        time = w.let(times.get(self.spec.backwards, f"tl.where({self.direction} == 0, {forth}, {back})"), "t")
        before = w.let(f"(s % 2) * {self.size}", "before")
        after = w.let(f"{self.size} - {before}", "after")
        return _Step(time, before, after, w.let(f"{time} < {length}", "active") if length is not None else None)

    def _end(self) -> None:
        last = self.w.let(f"({text_of(self.spec.steps)} % 2) * {self.size}", "last")
        finals = [("h", last)]
        if self.spec.cell == "LSTM":
            finals.append(("c", self._offset_buffer(last, _CELL)))
        with self._units() as units:
            for name, place in finals:
                self.e.store(name, f"{self.rows} + {units.index}", self._state(place, units), units.both)

    def _barrier(self) -> None:
        """Write a barrier: all threads of the program store before one of them loads."""
        self.w.line("tl.debug_barrier()")

    # Cells

    def _rnn(self, now: _Step) -> None:
        with self._units() as units:
            (gate,) = self._gates((0,), now, units, now.before)
            self._store_step(now, units, self._activate(0, gate))

    def _gru(self, now: _Step) -> None:
        """Write code for a step of a GRU, whose gates are in the order update, reset, hidden."""
        e = self.e
        if self.spec.linear_before_reset:
            with self._units() as units:
                update, reset = self._gates((0, 1), now, units, now.before)
                late = self._sums((2,), units, now.before)[0]
                hidden = e.add(self._input_part(2, now, units), e.mul(self._activate(0, reset), late))
                self._mix(now, units, self._activate(0, update), self._activate(1, hidden))
            return
        with self._units() as units:
            update, reset = (self._activate(0, gate) for gate in self._gates((0, 1), now, units, now.before))
            self._store_state(self._buffer(_UPDATE), units, update)
            self._store_state(self._buffer(_RESET), units, e.mul(reset, self._state(now.before, units)))
        self._barrier()
        with self._units() as units:
            (gate,) = self._gates((2,), now, units, self._buffer(_RESET))
            self._mix(now, units, self._state(self._buffer(_UPDATE), units), self._activate(1, gate))

    def _mix(self, now: _Step, units: _Units, update: Reg, hidden: Reg) -> None:
        old = self.e.mul(update, self._state(now.before, units))
        self._store_step(now, units, self.e.add(self.e.mul(self.e.sub(1.0, update), hidden), old))

    def _lstm(self, now: _Step) -> None:
        """Write code for a step of an LSTM, whose gates are in the order input, output, forget, cell.

        Peepholes are in the order input, output, forget.
        """
        e, spec = self.e, self.spec
        with self._units() as units:
            enter, leave, forget, candidate = self._gates((0, 1, 2, 3), now, units, now.before)
            memory = self._state(self._offset_buffer(now.before, _CELL), units)
            enter = self._activate(0, self._with_peephole(0, enter, memory, units))
            forget_gate = e.sub(1.0, enter)
            if not spec.input_forget:
                forget_gate = self._activate(0, self._with_peephole(2, forget, memory, units))
            new = e.add(e.mul(forget_gate, memory), e.mul(enter, self._activate(1, candidate)))
            leave = self._activate(0, self._with_peephole(1, leave, new, units))
            self._store_state(self._offset_buffer(now.after, _CELL), units, self._select_active(now, new, memory))
            self._store_step(now, units, e.mul(leave, self._activate(2, new)))

    def _with_peephole(self, index: int, gate: Reg, memory: Reg, units: _Units) -> Reg:
        if not self.spec.peepholes:
            return gate
        at = f"({self.direction} * 3 + {index}) * {self.spec.hidden} + {units.index}"
        return self.e.add(gate, self.e.mul(self.e.load("peep", at, F32, units.mask), memory))

    def _activate(self, index: int, gate: Reg) -> Reg:
        value: Operand = gate
        if self.spec.clip is not None:
            value = self.e.min(self.e.max(gate, -self.spec.clip), self.spec.clip)
        result: Reg = scalar_body(self.e, self.spec.activations[index], [value])[0]
        return result

    def _store_step(self, now: _Step, units: _Units, new: Reg) -> None:
        """Write code that stores `new` as the state and the result of a step, for a block of units.

        A sequence that has ended keeps its state; its result is 0.
        """
        old = self._state(now.before, units) if now.active is not None else new
        self._store_state(now.after, units, self._select_active(now, new, old))
        result = new if now.active is None else self.e.select(Reg(now.active, DType.BOOL), new, 0.0)
        self.e.store("y", f"{now.time} * {self.size} + {self.rows} + {units.index}", result, units.both)

    def _select_active(self, now: _Step, new: Reg, old: Reg) -> Reg:
        return new if now.active is None else self.e.select(Reg(now.active, DType.BOOL), new, old)

    # Gates

    def _gates(self, gates: Sequence[int], now: _Step, units: _Units, state: str) -> list[Reg]:
        """For each of `gates`, the sum of the input's contribution, the state's product and the bias.

        `state` is the offset of the state in scratch.
        """
        sums = self._sums(gates, units, state)
        return [self.e.add(self._input_part(g, now, units), each) for g, each in zip(gates, sums, strict=True)]

    def _sums(self, gates: Sequence[int], units: _Units, state: str) -> list[Reg]:
        """For each of `gates`, the product of the state at offset `state` in scratch by its weights, plus its bias."""
        w, spec, depth = self.w, self.spec, self.spec.tile.depth
        sums = [zero_sums(w, spec.tile) for _ in gates]
        with w.block(f"for k in range(0, {spec.hidden}, {depth})"):
            across, down = (w.let(f"k + tl.arange(0, {depth})[{ways}]", "k") for ways in ("None, :", ":, None"))
            left, right = (edge_mask(w, k, spec.hidden, depth) for k in (across, down))
            states = load_factors(w, "state", f"{state} + {self.rows} + {across}", F32, F32, self.row_mask, left)
            for gate, total in zip(gates, sums, strict=True):
                at = f"({self._gate(gate)} + {down}) * {spec.hidden} + {units.index}"
                multiply(w, total, states, load_factors(w, "r", at, F32, F32, right, units.mask), spec.precision)
        if not spec.bias:
            return [Reg(total, F32) for total in sums]
        biases = [self.e.load("bias", f"{self._gate(gate)} + {units.index}", F32, units.mask) for gate in gates]
        return [self.e.add(Reg(total, F32), bias) for total, bias in zip(sums, biases, strict=True)]

    def _input_part(self, gate: int, now: _Step, units: _Units) -> Reg:
        """The block of the input's contribution to gate `gate`, which operand G holds."""
        spec = self.spec
        wide = len(spec.backwards) * spec.gates * spec.hidden
        row = f"({now.time} * {text_of(spec.batch)} + {self.row}) * {wide}"
        return self._load("g", f"{row} + {self._gate(gate)}", units)

    def _gate(self, gate: int) -> str:
        """The offset of a gate's first unit among the gates of all directions."""
        return f"({self.direction} * {self.spec.gates} + {gate}) * {self.spec.hidden}"

    # Memory

    @contextmanager
    def _units(self) -> Iterator[_Units]:
        """Code written inside runs for each block of units."""
        w, wide, hidden = self.w, self.spec.tile.columns, self.spec.hidden
        with w.block(f"for u in range(0, {hidden}, {wide})"):
            index = w.let(f"u + tl.arange(0, {wide})[None, :]", "unit")
            mask = edge_mask(w, index, hidden, wide)
            yield _Units(index, mask, join_masks(self.row_mask, mask) or self.row_mask)

    def _load(self, pointer: str, at: str, units: _Units) -> Reg:
        return self.e.load(pointer, f"{at} + {units.index}", F32, units.both)

    def _buffer(self, index: int) -> str:
        return f"{index} * {self.size}"

    def _offset_buffer(self, place: str, buffers: int) -> str:
        return f"{place} + {self._buffer(buffers)}"

    def _state(self, place: str, units: _Units) -> Reg:
        return self._load("state", f"{place} + {self.rows}", units)

    def _store_state(self, place: str, units: _Units, value: Reg) -> None:
        self.e.store("state", f"{place} + {self.rows} + {units.index}", value, units.both)
