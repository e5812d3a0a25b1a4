"""The result of compiling, and making it ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from lathe.core.codegen.jit import Library
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array, Graph
from lathe.core.plan.plan import Plan
from lathe.core.runtime.artifact.bundle import Chunks
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.device.devices import HOST, open_device
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.host.memory import concatenate
from lathe.core.runtime.host.plan_memory import DeviceBlock
from lathe.core.runtime.host.weight_sharing import DeduplicatedWeights
from lathe.core.runtime.session.partitioned import PartitionedRunner
from lathe.core.runtime.session.placed import PlacedRunner, Wiring
from lathe.core.runtime.session.runner import Runner


@dataclass(frozen=True)
class Compiled:
    """Code for one set of shapes on one device, before it is loaded: plan, object code of the kernels, and weights."""

    plan: Plan
    objects: dict[str, bytes]  # symbol -> object file, or the binary for a GPU's driver
    weights: Callable[[], Chunks]  # the weight block, chunk by chunk
    states: Mapping[str, Array] = field(default_factory=dict)  # initial values
    findings: Mapping[str, str] = field(default_factory=dict)  # the tuner's choices: problem -> kernel
    device: str = HOST


@dataclass(frozen=True)
class Split:
    """Code for one set of shapes whose nodes are placed on several devices.

    `states`: the initial values of states that several parts use.
    """

    parts: tuple[Compiled, ...]
    wiring: Wiring
    states: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Partitioned:
    """Dynamic-shape code in parts.

    `script` is the outer graph, which the references run; each of its `PART` nodes (script.py) runs one of the parts.
    The sizes of a part's plan are symbols of the script. The code is valid as long as no dimension of `supposed` is
    negative. `sizes`: see `Plan.sizes`. `notes` tell people what runs on the references, and why.
    """

    script: Graph
    parts: tuple[Compiled, ...]
    supposed: tuple[Dim, ...]
    notes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()


def make_runner(
    compiled: Compiled,
    threads: int,
    max_batch: int,
    independent: bool,
    held: DeduplicatedWeights | None = None,
    adopted: Mapping[str, DeviceBlock] | None = None,
) -> Runner:
    """A runner with code and weights in memory, and with states at their initial values.

    `independent`: rows do not depend on each other, so that a batch may run in chunks. `held`: the weights, if they are
    in memory already. `adopted`: by name, states in device memory that another runner owns and frees; they keep their
    values. `threads` and `independent` matter only on the host, `max_batch` and `adopted` only on other devices. The
    caller closes the result.

    DeviceMemoryError if a device has too little memory for batches of `max_batch`. ArtifactError if the object code
    cannot be loaded on this machine or device. UnsupportedError or DeviceLost if the device cannot be used.
    """
    made: Runner
    there = adopted or {}
    if compiled.device == HOST:
        weights = held or DeduplicatedWeights(concatenate(compiled.weights(), compiled.plan.weights))
        made = Executable(compiled.plan, Library(compiled.objects), weights, threads, independent)
    else:
        device = open_device(compiled.device)
        chunks: Iterable[bytes | memoryview] = compiled.weights() if held is None else [held.block.data]
        made = DeviceExecutable(compiled.plan, device, compiled.objects, chunks, max_batch, there)
    with ExitStack() as failing:
        failing.callback(made.close)
        for name, initial in compiled.states.items():
            if name not in there:
                made.set_state(name, initial)
        failing.pop_all()
    return made


def make_placed_runner(content: Split, make: Callable[[Compiled], Runner]) -> Runner:
    """A runner of all parts; `make` makes the runner of each. If it fails, the runners made so far are closed."""
    with ExitStack() as failing:
        parts: list[Runner] = []
        for part in content.parts:
            parts.append(make(part))
            failing.callback(parts[-1].close)
        failing.pop_all()
    return PlacedRunner(parts, content.wiring, content.states)


def make_partitioned_runner(
    content: Partitioned, threads: int, max_batch: int, held: Sequence[DeduplicatedWeights | None] = ()
) -> PartitionedRunner:
    """A runner of a script and its parts, all of which are on the host.

    `held`: the weights of each part, or None where they are not in memory yet. ValueError for a part of another device.
    If a part fails, the earlier ones are closed.
    """
    with ExitStack() as failing:
        parts: list[Executable] = []
        for part, weights in zip(content.parts, held or [None] * len(content.parts), strict=True):
            if part.device != HOST:
                raise ValueError(f"a part of a script is for {part.device}, expected {HOST}")
            made = make_runner(part, threads, max_batch, False, weights)
            failing.callback(made.close)
            assert isinstance(made, Executable)
            parts.append(made)
        failing.pop_all()
    return PartitionedRunner(content.script, parts, content.sizes, content.supposed, content.notes)
