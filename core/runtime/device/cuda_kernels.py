"""Compiles many kernels for GPUs in several processes, because Triton's passes hold the interpreter lock."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.cuda import Source, binary_for, binary_key, cached, generate, triton_version
from lathe.core.kernels.gemm.cublaslt_spec import LibrarySpec
from lathe.core.kernels.target import GpuTarget
from lathe.core.runtime.host import child_python
from lathe.core.runtime.host.cpus import available_cpus

_MIN_PER_PROCESS = 4  # the least kernels per process: starting one takes as long as compiling two or three


def compile_ahead(
    specs: Iterable[KernelSpec], target: GpuTarget, cache: ObjectCache, workers: int | None = None
) -> None:
    """Compile kernels that the cache lacks in several processes; do nothing if fewer than 8 are missing.

    There are at most `workers` processes, this one among them, by default one per available processor, and each gets at
    least 4 kernels. Nothing happens if a single process would do all, or without Triton. A kernel that does not compile
    is skipped. The later call that needs it (`binary_for`) compiles it again, and raises the error.
    """
    made = {binary_key(spec, target): spec for spec in specs if not isinstance(spec, LibrarySpec)}
    missing = {key: spec for key, spec in made.items() if cached(spec, target, cache) is None}
    count = min(workers or available_cpus(), len(missing) // _MIN_PER_PROCESS)
    if count < 2 or not triton_version():
        return
    mine, *others = (dict(list(missing.items())[first::count]) for first in range(count))
    with ExitStack() as ending, tempfile.TemporaryDirectory() as folder:
        children = []
        for index, share in enumerate(others):
            jobs = Path(folder) / f"{index}.json"
            jobs.write_text(json.dumps(_jobs(share, target)))
            children.append(ending.enter_context(_child(jobs, cache, target)))
            ending.callback(children[-1].kill)  # if this process is interrupted
        for spec in mine.values():
            with suppress(RuntimeError):
                binary_for(spec, target, cache)
        for child in children:
            child.wait()


def compile_jobs(jobs: Path, folder: Path, arch: int) -> None:
    """In a child process: compile the kernels in the file `jobs` into the cache `folder`, for the architecture `arch`.

    `compile_ahead` has written `jobs`. Kernels that do not compile are skipped.
    """
    from lathe.core.kernels.cuda.compiler import compile_source

    cache, target = ObjectCache(folder), GpuTarget(arch=arch)
    for key, source in json.loads(jobs.read_text()):
        with suppress(RuntimeError):
            cache.put_if_possible(key, compile_source(Source.from_bytes(source.encode()), target).to_bytes())


def _jobs(share: Mapping[str, KernelSpec], target: GpuTarget) -> Sequence[tuple[str, str]]:
    return [(key, generate(spec, target).to_bytes().decode()) for key, spec in share.items()]


def _child(jobs: Path, cache: ObjectCache, target: GpuTarget) -> subprocess.Popen[bytes]:
    """Start a child that compiles the kernels in `jobs` into the cache, and ends with this process.

    Kernels that it has compiled before its end stay in the cache.
    """
    arguments = ["--while-stdin", "kernels", str(jobs), str(cache.folder), str(target.arch)]
    return subprocess.Popen(
        child_python.command("lathe.core.compiler.child_stages", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_python.environment(),
    )
