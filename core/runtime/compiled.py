"""What compiling produced, and how it is made ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from core.codegen.jit import Library
from core.ir.dim import Dim
from core.ir.graph import Array, Graph
from core.plan.plan import Plan
from core.runtime.bundle import Chunks
from core.runtime.device_executable import DeviceExecutable
from core.runtime.devices import HOST, open_device
from core.runtime.executable import Executable
from core.runtime.in_parts import PartsRunner
from core.runtime.memory import joined
from core.runtime.placed import Placed, Wiring
from core.runtime.room import Block
from core.runtime.runner import Runner
from core.runtime.sharing import SharedWeights


@dataclass(frozen=True)
class Compiled:
    """Code for one set of shapes on one device."""

    plan: Plan
    objects: dict[str, bytes]  # symbol -> object file, or what a GPU's driver loads
    weights: Callable[[], Chunks]  # the weight block, piece by piece
    states: Mapping[str, Array] = field(default_factory=dict)  # initial values
    findings: Mapping[str, str] = field(default_factory=dict)  # what the tuner chose: problem -> kernel
    device: str = HOST


@dataclass(frozen=True)
class Split:
    """Code for one set of shapes where nodes are spread over devices. `states` are the first values of those that no
    part keeps to itself."""

    parts: tuple[Compiled, ...]
    wiring: Wiring
    states: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class InParts:
    """Code for any sizes in parts. `script` is what the references run: each node `PART` (script.py) stands for one of
    the parts, whose plans name the symbols of the script that are their sizes. It is right as long as nothing of
    `supposed` is negative. `sizes`: see `Plan.sizes`. `notes` say for people what runs on the references, and why."""

    script: Graph
    parts: tuple[Compiled, ...]
    supposed: tuple[Dim, ...]
    notes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()


def ready(
    compiled: Compiled,
    threads: int,
    max_batch: int,
    independent: bool,
    held: SharedWeights | None = None,
    adopted: Mapping[str, Block] | None = None,
) -> Runner:
    """Code and weights in memory. `held`: the weights, where they are in memory already; `adopted`: states that live on
    the device already. DeviceMemoryError where a device has no room for batches of `max_batch`."""
    made: Runner
    there = adopted or {}
    if compiled.device == HOST:
        weights = held or SharedWeights(joined(compiled.weights(), compiled.plan.weights))
        made = Executable(compiled.plan, Library(compiled.objects), weights, threads, independent)
    else:
        device = open_device(compiled.device)
        chunks: Iterable[bytes | memoryview] = compiled.weights() if held is None else [held.block.data]
        made = DeviceExecutable(compiled.plan, device, compiled.objects, chunks, max_batch, there)
    for name, initial in compiled.states.items():
        if name not in there:
            made.set_state(name, initial)
    return made


def ready_split(content: Split, make: Callable[[Compiled], Runner]) -> Runner:
    """All parts in memory, where `make` puts each of them."""
    with ExitStack() as failing:
        parts: list[Runner] = []
        for part in content.parts:
            parts.append(make(part))
            failing.callback(parts[-1].close)
        failing.pop_all()
    return Placed(parts, content.wiring, content.states)


def ready_in_parts(
    content: InParts, threads: int, max_batch: int, held: Sequence[SharedWeights | None] = ()
) -> PartsRunner:
    """The parts of a script in memory. `held`: the weights of each, where they are in memory already."""
    with ExitStack() as failing:
        parts: list[Executable] = []
        for part, weights in zip(content.parts, held or [None] * len(content.parts), strict=True):
            made = ready(part, threads, max_batch, False, weights)
            if not isinstance(made, Executable):
                raise TypeError(f"a part of a script is for {part.device}, expected the host")
            parts.append(made)
            failing.callback(made.close)
        failing.pop_all()
    return PartsRunner(content.script, parts, content.sizes, content.supposed, content.notes)
