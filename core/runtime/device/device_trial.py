"""Times kernels of a device on operands made for them, as they run in a model: see `lathe.core.compiler.tuner`.

A sample is one graph of many launches between two events, so that the overhead of the host and the clock is negligible.
There are several copies of the weights, which launches use in turn and which together exceed the device's cache: in a
model, the weights of all other steps evict those of a step between two runs. Inputs and outputs are not copied, because
a step finds the results of the previous one in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf

import numpy as np

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.errors import DeviceError, DeviceLost, DeviceMemoryError
from lathe.core.ir.dim import evaluate
from lathe.core.kernels.call import Block, Flag, In, KernelCall, Operand, Out, Packed, Request, Scratch
from lathe.core.plan.plan import FLAG_BYTES
from lathe.core.runtime.device.device import Device, Function, Graph, HostBytes, Module, Stream, Tunable
from lathe.core.runtime.device.upload import Uploader
from lathe.core.runtime.host.device_tape import Launch, grid_of, launch_one
from lathe.core.runtime.host.trial import Bench, TimedKernel, Trials, contents

_SAMPLE = 200e-6  # the least seconds of a sample
_MIN_LAUNCHES, _MAX_LAUNCHES = 4, 256  # of a sample
_CACHE_MULTIPLE = 2  # all copies of the weights take this multiple of the cache
_MAX_COPIES = 64
_MAX_BYTES = 1 << 28  # of all copies


def device_bench(device: Device, cache: ObjectCache | None = None) -> Bench:
    """The bench that times kernels on a device. Their objects come from `cache`, or are compiled and added to it.

    A candidate that cannot be compiled or loaded takes infinitely long; for the first one, the preferred kernel, the
    error is raised. DeviceMemoryError if the operands do not fit the device.
    """

    @contextmanager
    def opened(calls: Sequence[KernelCall], request: Request) -> Iterator[Trials]:
        with ExitStack() as ending:
            modules = [_module(device, call, cache, index == 0) for index, call in enumerate(calls)]
            for module in filter(None, modules):
                ending.callback(module.close)
            stream = device.stream()
            ending.callback(stream.close)

            @contextmanager
            def trials(n: int) -> Iterator[Sequence[TimedKernel]]:
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
    """The loaded kernel of a candidate; None if it does not compile or the device cannot run it.

    With `preferred`, such an error is raised instead. Always raised are lack of memory, the loss of the device,
    UnsupportedError and ArtifactError.
    """
    try:
        return device.load({call.spec.symbol: device.code(call.spec, cache)})
    except (DeviceMemoryError, DeviceLost):
        raise
    except (DeviceError, RuntimeError):
        if preferred:
            raise
        return None


def _trial(call: KernelCall, module: Module | None, memory: _Memory) -> DeviceTrial | _FailedTrial:
    """The trial of a candidate's kernel; if it has several implementations, the trial of the fastest, found by timing.

    `module` is None for a kernel that could not be loaded: its trial takes infinitely long.
    """
    function = module.function(call.spec.symbol) if module is not None else None
    if not isinstance(function, Tunable):
        return _FailedTrial() if function is None else DeviceTrial(call, function, memory)
    trials = [DeviceTrial(call, function.by(memory.n, way), memory, way) for way in function.ways(memory.n)]
    best = min(trials, key=DeviceTrial.seconds, default=None)
    for trial in trials:
        if trial is not best:
            trial.close()
    return best or _FailedTrial()


@dataclass(frozen=True, slots=True)
class _FailedTrial:
    """The trial of a kernel that does not run here: its time is infinite."""

    def seconds(self) -> float:
        return inf

    def settled(self, call: KernelCall) -> KernelCall:
        return call

    def close(self) -> None:
        """No effect: it holds nothing."""


class _Memory:
    """The operands of all candidates for a node, for one batch size: inputs and outputs are shared."""

    def __init__(self, device: Device, stream: Stream, request: Request, n: int) -> None:
        self.device, self.stream, self.n = device, stream, n
        self._request, self._uploader = request, Uploader(device, stream)
        self._shared: dict[Operand, tuple[int, ...]] = {}
        self._blocks: list[int] = []

    def places(self, operands: Sequence[Operand]) -> list[tuple[int, ...]]:
        """The addresses of each operand: several for weights, which are copied, otherwise one.

        DeviceMemoryError if memory is too small.
        """
        made = {index: contents(o, self._request, self.n) for index, o in enumerate(operands) if self._is_weight(o)}
        copies = self._copies(sum(block.nbytes for block in made.values()))
        return [
            tuple(self._upload(made[index]) for _ in range(copies)) if index in made else self._place(operand)
            for index, operand in enumerate(operands)
        ]

    def _is_weight(self, operand: Operand) -> bool:
        return isinstance(operand, Packed) or (
            isinstance(operand, In) and self._request.constant(operand.index) is not None
        )

    def _copies(self, nbytes: int) -> int:
        wanted = -(-_CACHE_MULTIPLE * self.device.target.l2_bytes // max(nbytes, 1))
        return max(min(wanted, _MAX_COPIES, _MAX_BYTES // max(nbytes, 1)), 1)

    def _place(self, operand: Operand) -> tuple[int, ...]:
        match operand:
            case In() | Out():
                if operand not in self._shared:
                    self._shared[operand] = (self._upload(contents(operand, self._request, self.n)),)
                return self._shared[operand]
            case Scratch(nbytes):
                return (self._allocate(evaluate(nbytes, {"n": self.n})),)
            case Flag():
                return (self._upload(np.zeros(FLAG_BYTES, np.uint8)),)
            case Block():
                return (self._upload(contents(operand, self._request, self.n)),)
            case _:
                raise ValueError(f"a trial of {self._request.node.op} has no {operand}")

    def _upload(self, data: HostBytes) -> int:
        address = self._allocate(data.nbytes)
        self._uploader.put(address, [data.data])
        return address

    def _allocate(self, nbytes: int) -> int:
        self._blocks.append(self.device.allocate(max(nbytes, 1)))
        return self._blocks[-1]

    def close(self) -> None:
        with suppress(DeviceError):
            self._uploader.close()
        while self._blocks:
            with suppress(DeviceError):  # after a fault every call fails, and the memory is lost anyway
                self.device.free(self._blocks.pop())


class DeviceTrial:
    """One kernel for one batch size. Inputs hold small numbers (integers: zero), constants their values."""

    def __init__(self, call: KernelCall, function: Function, memory: _Memory, way: str | None = None) -> None:
        """`way`: the name of the implementation, for a function that has several."""
        self._device, self._stream, self._n = memory.device, memory.stream, memory.n
        self._function, self._way = function, way
        self._grid = grid_of(call.grid, self._n)
        self._places = memory.places(call.operands)
        self._start, self._end = (self._device.event(timed=True) for _ in range(2))
        self._count = max(map(len, self._places), default=1)
        self._graph: Graph = self._capture()

    def _capture(self) -> Graph:
        """A graph of 4 to 256 launches, as many as take about as long as a sample; notes their number."""
        first = self._count
        for _ in range(2):  # the first time includes loading code
            once = self._time(lambda: self._submit(first)) / first
        launches = min(max(int(_SAMPLE / max(once, 1e-9)), _MIN_LAUNCHES), _MAX_LAUNCHES)
        self._count = max(launches, first)
        return self._stream.capture(lambda: self._submit(self._count))

    def _submit(self, count: int) -> None:
        turns = zip(*(cycle(each) for each in self._places), strict=True)
        for addresses in islice(turns, count):
            launch_one(Launch(self._function, self._grid, addresses), self._n, self._stream)

    def _time(self, work: Callable[[], None]) -> float:
        self._stream.record(self._start)
        work()
        self._stream.record(self._end)
        self._end.synchronize()
        return self._end.since(self._start) / 1e9

    def seconds(self) -> float:
        """The time of one launch in seconds: the mean over one replay of the graph."""
        return self._time(lambda: self._stream.replay(self._graph)) / self._count

    def settled(self, call: KernelCall) -> KernelCall:
        return call if self._way is None else call.spec.settled(call, self._n, self._way)

    def close(self) -> None:
        for part in (self._graph, self._start, self._end):
            with suppress(DeviceError):
                part.close()
