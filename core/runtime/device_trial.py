"""Kernels of a device on operands made for them, to be timed as they run in a model: see `core.tune`.

A sample is one graph of many launches between two events, so that neither the host nor the clock counts. Weights lie in
several copies that launches take in turn, together more than the cache of the device holds: in a model, too, a step's
weights were pushed out by those of all others since the last run. What steps hand on to each other stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf

import numpy as np

from core.codegen.cache import ObjectCache
from core.errors import DeviceError, DeviceLost, DeviceMemoryError
from core.ir.dim import evaluate
from core.kernels.catalog import Block, Flag, In, KernelCall, Operand, Out, Packed, Request, Scratch
from core.plan.plan import FLAG_BYTES
from core.runtime.device import Device, Function, Graph, HostBytes, Module, Several, Stream
from core.runtime.tape import Launch, grid_of, launch_one
from core.runtime.trial import Bench, Timed, Trials, contents
from core.runtime.upload import Uploader

_SAMPLE = 200e-6  # seconds: what a sample lasts at least
_LEAST_LAUNCHES, _MOST_LAUNCHES = 4, 256  # of a sample
_COLD = 2  # times the cache: what all copies of the weights take
_MOST_COPIES = 64
_MOST_BYTES = 1 << 28  # of all copies


def device_bench(device: Device, cache: ObjectCache | None = None) -> Bench:
    """Candidates on a device; objects come from the cache where they are there."""

    @contextmanager
    def opened(calls: Sequence[KernelCall], request: Request) -> Iterator[Trials]:
        with ExitStack() as ending:
            modules = [_module(device, call, cache, index == 0) for index, call in enumerate(calls)]
            for module in filter(None, modules):
                ending.callback(module.close)
            stream = device.stream()
            ending.callback(stream.close)

            @contextmanager
            def trials(n: int) -> Iterator[Sequence[Timed]]:
                with ExitStack() as ending:
                    memory = _Memory(device, stream, request, n)
                    ending.callback(memory.close)
                    made = []
                    for call, module in zip(calls, modules, strict=True):
                        made.append(_trial(call, module, memory))
                        ending.callback(made[-1].close)
                    yield made

            yield trials

    return opened


def _module(device: Device, call: KernelCall, cache: ObjectCache | None, preferred: bool) -> Module | None:
    """A candidate that does not compile, or that the device cannot take, is none; the preferred one has to."""
    try:
        return device.load({call.spec.symbol: device.code(call.spec, cache)})
    except (DeviceMemoryError, DeviceLost):
        raise
    except (DeviceError, RuntimeError):
        if preferred:
            raise
        return None


def _trial(call: KernelCall, module: Module | None, memory: _Memory) -> DeviceTrial | _Hopeless:
    """Of a function that runs in several ways, the one that is fastest."""
    function = module.function(call.spec.symbol) if module is not None else None
    if not isinstance(function, Several):
        return _Hopeless() if function is None else DeviceTrial(call, function, memory)
    trials = [DeviceTrial(call, function.by(memory.n, way), memory, way) for way in function.ways(memory.n)]
    best = min(trials, key=DeviceTrial.seconds, default=None)
    for trial in trials:
        if trial is not best:
            trial.close()
    return best or _Hopeless()


@dataclass(frozen=True, slots=True)
class _Hopeless:
    """In the place of a kernel that does not run here."""

    def seconds(self) -> float:
        return inf

    def settled(self, call: KernelCall) -> KernelCall:
        return call

    def close(self) -> None:
        """It holds nothing."""


class _Memory:
    """The operands of all candidates for a node, for one batch size: inputs and outputs are shared."""

    def __init__(self, device: Device, stream: Stream, request: Request, n: int) -> None:
        self.device, self.stream, self.n = device, stream, n
        self._request, self._uploader = request, Uploader(device, stream)
        self._shared: dict[Operand, tuple[int, ...]] = {}
        self._blocks: list[int] = []

    def places(self, operands: Sequence[Operand]) -> list[tuple[int, ...]]:
        """The addresses of each operand: one, or as many as it has copies. DeviceMemoryError without room."""
        made = {index: contents(o, self._request, self.n) for index, o in enumerate(operands) if self._is_weight(o)}
        copies = self._copies(sum(block.nbytes for block in made.values()))
        return [
            tuple(self._filled(made[index]) for _ in range(copies)) if index in made else self._place(operand)
            for index, operand in enumerate(operands)
        ]

    def _is_weight(self, operand: Operand) -> bool:
        return isinstance(operand, Packed) or (
            isinstance(operand, In) and self._request.constant(operand.index) is not None
        )

    def _copies(self, nbytes: int) -> int:
        wanted = -(-_COLD * self.device.target.l2_bytes // max(nbytes, 1))
        return max(min(wanted, _MOST_COPIES, _MOST_BYTES // max(nbytes, 1)), 1)

    def _place(self, operand: Operand) -> tuple[int, ...]:
        match operand:
            case In() | Out():
                if operand not in self._shared:
                    self._shared[operand] = (self._filled(contents(operand, self._request, self.n)),)
                return self._shared[operand]
            case Scratch(nbytes):
                return (self._allocated(evaluate(nbytes, {"n": self.n})),)
            case Flag():
                return (self._filled(np.zeros(FLAG_BYTES, np.uint8)),)
            case Block():
                return (self._filled(contents(operand, self._request, self.n)),)
            case _:
                raise ValueError(f"a trial of {self._request.node.op} has no {operand}")

    def _filled(self, data: HostBytes) -> int:
        address = self._allocated(data.nbytes)
        self._uploader.put(address, [data.data])
        return address

    def _allocated(self, nbytes: int) -> int:
        self._blocks.append(self.device.allocate(max(nbytes, 1)))
        return self._blocks[-1]

    def close(self) -> None:
        with suppress(DeviceError):
            self._uploader.close()
        while self._blocks:
            with suppress(DeviceError):  # after a fault every call fails: what is lost is lost
                self.device.free(self._blocks.pop())


class DeviceTrial:
    """One kernel for one batch size. Inputs hold small numbers (integers: zero), constants their values."""

    def __init__(self, call: KernelCall, function: Function, memory: _Memory, way: str | None = None) -> None:
        """`way`: which of several that a function offers this one is."""
        self._device, self._stream, self._n = memory.device, memory.stream, memory.n
        self._function, self._way = function, way
        self._grid = grid_of(call.grid, self._n)
        self._places = memory.places(call.operands)
        self._start, self._end = (self._device.event(timed=True) for _ in range(2))
        self._count = max(map(len, self._places), default=1)
        self._graph: Graph = self._captured()

    def _captured(self) -> Graph:
        """As many launches as a sample takes."""
        first = self._count
        for _ in range(2):  # the first time, code is loaded, too
            once = self._timed(lambda: self._give(first)) / first
        launches = min(max(int(_SAMPLE / max(once, 1e-9)), _LEAST_LAUNCHES), _MOST_LAUNCHES)
        self._count = max(launches, first)
        return self._stream.capture(lambda: self._give(self._count))

    def _give(self, count: int) -> None:
        turns = zip(*(cycle(each) for each in self._places), strict=True)
        for addresses in islice(turns, count):
            launch_one(Launch(self._function, self._grid, addresses), self._n, self._stream)

    def _timed(self, work: Callable[[], None]) -> float:
        self._stream.record(self._start)
        work()
        self._stream.record(self._end)
        self._end.synchronize()
        return self._end.since(self._start) / 1e9

    def seconds(self) -> float:
        """The time of one launch, as a mean over a sample."""
        return self._timed(lambda: self._stream.replay(self._graph)) / self._count

    def settled(self, call: KernelCall) -> KernelCall:
        return call if self._way is None else call.spec.settled(call, self._n, self._way)

    def close(self) -> None:
        for part in (self._graph, self._start, self._end):
            with suppress(DeviceError):
                part.close()
