"""`lathe kernels` compiles GPU kernels ahead of time; `lathe load-kernels` copies them into a machine's cache."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from lathe.core.byte_sizes import format_bytes
from lathe.core.precisions import PRECISION_CHOICES
from lathe.server.cli.model import model_errors
from lathe.server.cli.terminal import console, fail


def kernels(
    target: Annotated[
        str,
        typer.Option(
            help="Compile for this GPU: sm_90, or sm_90/132/232448/62914560 with the number of its multiprocessors, "
            "the bytes of shared memory per block, and the bytes of L2 cache."
        ),
    ],
    model: Annotated[
        list[Path],
        typer.Option(help="Compile this ONNX file; repeat the option for several.", exists=True, dir_okay=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write this .tar, .tar.gz or .tar.xz file.")],
    precision: Annotated[
        list[str] | None,
        typer.Option(help=f"Compute products in this precision: {PRECISION_CHOICES}; repeat the option for several."),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Choose kernels for this batch size.", min=1)] = 32,
    tune: Annotated[
        str,
        typer.Option(
            help="Include the candidates that tuning would measure on the GPU (default, full), or none (off)."
        ),
    ] = "off",
    size: Annotated[
        list[str] | None,
        typer.Option(help="Set the size of a symbolic dimension, NAME=SIZE; repeat the option for several."),
    ] = None,
) -> None:
    """Compile the GPU kernels of models into one file, on a machine without a GPU; `lathe load-kernels` loads it.

    Kernels that are in the file already are kept. Needs Triton: pip install '.[cuda]'.
    """
    import lathe
    from lathe.core.compiler.ahead_of_time import compile_kernels
    from lathe.core.runtime.artifact.store import Store
    from lathe.core.runtime.device.portable_cache import read_tar, write_tar

    sizes = _parse_sizes(size or [])
    started = time.perf_counter()
    with model_errors(), tempfile.TemporaryDirectory() as folder, console.status("compiling"):
        store = Store(Path(folder))
        if output.exists():
            read_tar(output, store)
        for path in model:
            for each in precision or ["float32"]:
                graph = lathe.load(path)
                compile_kernels(graph, target, folder, each, max_batch, tune, sizes)
        count = write_tar(output, store)
    seconds = time.perf_counter() - started
    console.print(
        f"{output}: {count} kernels, {format_bytes(output.stat().st_size)}, in {seconds:.1f} s", soft_wrap=True
    )


def load_kernels(
    file: Annotated[Path, typer.Argument(help="A file that `lathe kernels` wrote.", exists=True, dir_okay=False)],
) -> None:
    """Copy the GPU kernels of a file into this machine's cache.

    They are machine code: load only files that you trust.
    """
    from lathe.core.runtime.artifact.store import open_store
    from lathe.core.runtime.device.portable_cache import read_tar

    store = open_store(None)
    if store is None:
        raise fail("LATHE_CACHE_DIR: the cache folder is not writable")
    with model_errors():
        count = read_tar(file, store)
    console.print(f"{count} files copied into {store.root}", soft_wrap=True)


def _parse_sizes(options: list[str]) -> dict[str, int]:
    pairs = [text.partition("=") for text in options]
    for name, _, number in pairs:
        if not name or not number.isdecimal() or int(number) < 1:
            raise fail(f"--size {name}={number}: expected NAME=SIZE with a size of at least 1")
    return {name: int(number) for name, _, number in pairs}
