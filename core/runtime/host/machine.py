"""The peak rates of one thread of this machine: multiply-adds per second, and bytes read from memory per second.

They are measured once, in some tens of milliseconds, and then cached in the store. They give the roofline: a node that
does `flops` operations and moves `bytes` takes at least max(flops / peak, bytes / bandwidth).
"""

from __future__ import annotations

import ctypes
import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lathe.core.codegen.jit import Library, compile_text
from lathe.core.codegen.target import has_fma, host
from lathe.core.files import replace_file
from lathe.core.kernels.target import Target
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.host.memory import address_of, aligned_bytes

_CHAINS = 12  # independent sums: enough for two units with a latency of four or five cycles
_BUFFER = 96 << 20  # bytes: more than any last-level cache that one core has for itself
_TURNS = 1 << 17
_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates of one CPU thread, or of a whole device.

    `flops`: float32 operations per second, where a multiply-add counts as two. `bandwidth`: bytes per second.
    """

    flops: float
    bandwidth: float

    def seconds(self, flops: int, nbytes: int, threads: int = 1) -> float:
        """The least seconds for `flops` operations and `nbytes` bytes, if `threads` threads share them evenly."""
        return max(flops / self.flops, nbytes / self.bandwidth) / threads

    def limit(self, flops: int, nbytes: int) -> str:
        """What bounds this work, the operations or the bytes: "compute" or "memory"."""
        return "compute" if flops / self.flops >= nbytes / self.bandwidth else "memory"


@functools.cache
def peaks() -> Peaks:
    """The peak rates of one thread of this machine, found once per process.

    They come from the default store, if they were measured there for the same target. Otherwise they are measured, and
    stored there if possible.
    """
    store = open_store(None)
    path = store.root / "machine.json" if store else None
    known = _read(path) if path else None
    if known is not None:
        return known
    found = measure(host())
    if path is not None:
        _write(path, found)
    return found


def measure(target: Target) -> Peaks:
    """Measure the peak rates of one thread with code compiled for `target`."""
    with Library({"multiply": compile_text(_source(target), target)}, further=("read",)) as library:
        multiply = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_int64, ctypes.c_float)(library.address("multiply"))
        read = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_int64, ctypes.c_void_p)(library.address("read"))
        block = aligned_bytes(_BUFFER)
        block[:] = 0
        stride = _CHAINS * target.vector_bytes
        flops = 2 * _CHAINS * target.lanes * _TURNS
        return Peaks(
            flops=flops / _least_seconds(lambda: multiply(_TURNS, 0.5)),
            bandwidth=_BUFFER / _least_seconds(lambda: read(_BUFFER // stride, address_of(block))),
        )


def _least_seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several trials, because every disturbance makes a trial slower."""
    times = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _source(target: Target) -> str:
    """LLVM text of the two loops that are timed, with enough independent sums to keep all units busy.

    `multiply(turns, x)` does multiply-adds in registers, `read(turns, p)` adds up memory from `p` on.
    """
    vector = f"<{target.lanes} x float>"
    spread = f"""%one = insertelement {vector} undef, float %given, i32 0
  %x = shufflevector {vector} %one, {vector} undef, <{target.lanes} x i32> zeroinitializer"""
    advance = f"%at = getelementptr [{_CHAINS} x {vector}], ptr %given, i64 %i"
    if has_fma(target):
        multiply = "%y{i} = call {v} @llvm.fma({v} %s{i}, {v} %x, {v} %x)"
        declared = f"declare {vector} @llvm.fma({vector}, {vector}, {vector})"
    else:
        multiply, declared = "%m{i} = fmul {v} %s{i}, %x\n  %y{i} = fadd {v} %m{i}, %x", ""
    read = """%p{i} = getelementptr {v}, ptr %at, i64 {i}
  %l{i} = load {v}, ptr %p{i}
  %y{i} = fadd {v} %s{i}, %l{i}"""
    loops = _loop("multiply", "float %given", spread, "", multiply, target.lanes)
    return loops + _loop("read", "ptr %given", "", advance, read, target.lanes) + declared


def _loop(name: str, parameter: str, before: str, first: str, step: str, lanes: int) -> str:
    """LLVM text of a function `name` with one argument, `parameter`: a loop that adds to `_CHAINS` vectors.

    `before` runs once, `first` once per iteration, and `step` once per vector and iteration. The sums start with
    different values and the result depends on all of them, so that LLVM can remove none.
    """
    chains, vector = range(_CHAINS), f"<{lanes} x float>"
    starts = [f"<{', '.join([f'float {i}.0'] * lanes)}>" for i in chains]
    phis = "\n  ".join(f"%s{i} = phi {vector} [ {starts[i]}, %entry ], [ %y{i}, %head ]" for i in chains)
    steps = "\n  ".join(step.format(i=i, v=vector) for i in chains)
    sums = "\n  ".join(f"%t{i} = fadd {vector} %{f't{i - 1}' if i > 1 else 'y0'}, %y{i}" for i in chains[1:])
    return f"""
define float @{name}(i64 %turns, {parameter}) {{
entry:
  {before}
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %head ]
  {phis}
  {first}
  {steps}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %turns
  br i1 %more, label %head, label %out
out:
  {sums}
  %r = extractelement {vector} %t{_CHAINS - 1}, i32 0
  ret float %r
}}
"""


def _read(path: Path) -> Peaks | None:
    try:
        data = json.loads(path.read_bytes())
        return Peaks(float(data["flops"]), float(data["bandwidth"])) if data["target"] == host().key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, found: Peaks) -> None:
    with suppress(OSError):
        replace_file(path, json.dumps({"target": host().key, **asdict(found)}).encode())
