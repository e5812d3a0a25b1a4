"""Many kernels for GPUs at once: in several processes, as Triton's passes hold the interpreter's lock."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from core.codegen.cache import ObjectCache
from core.kernels.catalog import KernelSpec
from core.kernels.catalog.cuda.library import LibrarySpec
from core.kernels.cuda import Source, binary_for, binary_key, cached, generate, triton_version
from core.kernels.target import GpuTarget
from core.runtime import child_python
from core.runtime.cpus import available_cpus

_EACH = 4  # kernels that are worth a process: starting one takes as long as compiling two or three


def compile_ahead(
    specs: Iterable[KernelSpec], target: GpuTarget, cache: ObjectCache, workers: int | None = None
) -> None:
    """Put the binaries of kernels into the cache, by as many processes as there are processors where that is worth it.

    What does not compile is left to whoever asks for it, who meets the error where it belongs.
    """
    made = {binary_key(spec, target): spec for spec in specs if not isinstance(spec, LibrarySpec)}
    missing = {key: spec for key, spec in made.items() if cached(spec, target, cache) is None}
    count = min(workers or available_cpus(), len(missing) // _EACH)
    if count < 2 or not triton_version():
        return
    mine, *others = (dict(list(missing.items())[first::count]) for first in range(count))
    with ExitStack() as ending, tempfile.TemporaryDirectory() as folder:
        children = []
        for index, share in enumerate(others):
            jobs = Path(folder) / f"{index}.json"
            jobs.write_text(json.dumps(_jobs(share, target)))
            children.append(ending.enter_context(_child(jobs, cache, target)))
            ending.callback(children[-1].kill)  # where this process is interrupted
        for spec in mine.values():
            with suppress(RuntimeError):
                binary_for(spec, target, cache)
        for child in children:
            child.wait()


def compile_jobs(jobs: Path, folder: Path, arch: int) -> None:
    """In a child: what `compile_ahead` wrote down."""
    from core.kernels.cuda.compiler import compile_source

    cache, target = ObjectCache(folder), GpuTarget(arch=arch)
    for key, source in json.loads(jobs.read_text()):
        with suppress(RuntimeError):
            cache.put(key, compile_source(Source.from_bytes(source.encode()), target).to_bytes())


def _jobs(share: Mapping[str, KernelSpec], target: GpuTarget) -> Sequence[tuple[str, str]]:
    return [(key, generate(spec, target).to_bytes().decode()) for key, spec in share.items()]


def _child(jobs: Path, cache: ObjectCache, target: GpuTarget) -> subprocess.Popen[bytes]:
    """It ends with this process, and leaves what it has done by then."""
    arguments = ["--while-stdin", "kernels", str(jobs), str(cache.folder), str(target.arch)]
    return subprocess.Popen(
        child_python.command("core.children", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_python.environment(),
    )
