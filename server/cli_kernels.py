"""`lathe kernels` compiles ahead for a GPU that is not here; `lathe load-kernels` puts the result into a cache."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from core.amounts import amount
from core.precisions import CHOICES
from server.cli_model import model_errors
from server.terminal import console, fail


def kernels(
    target: Annotated[str, typer.Option(help="The GPU: sm_90, or sm_90/132/232448/62914560 with its facts.")],
    model: Annotated[
        list[Path], typer.Option(help="An ONNX file; repeat the option for several.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .tar, .tar.gz or .tar.xz.")],
    precision: Annotated[list[str] | None, typer.Option(help=f"{CHOICES}; repeat the option for several.")] = None,
    max_batch: Annotated[int, typer.Option(help="The batch size to choose kernels for.", min=1)] = 32,
    tune: Annotated[
        str, typer.Option(help="off; default or full: with the kernels that tuning would measure on the GPU.")
    ] = "off",
    size: Annotated[
        list[str] | None, typer.Option(help="Size of a symbolic dimension, NAME=SIZE; repeat the option for several.")
    ] = None,
) -> None:
    """Compile the GPU kernels of models into one file, without a GPU; `lathe load-kernels` reads it where the GPU is.

    Kernels that the file has already are kept. Needs Triton: pip install 'lathe[cuda]'.
    """
    import core
    from core.ahead import compile_kernels
    from core.runtime.carried import read_tar, write_tar
    from core.runtime.store import Store

    sizes = _sizes(size or [])
    started = time.perf_counter()
    with model_errors(), tempfile.TemporaryDirectory() as folder, console.status("compiling"):
        store = Store(Path(folder))
        if output.exists():
            read_tar(output, store)
        for path in model:
            for kind in precision or ["float32"]:
                graph = core.load(path)
                compile_kernels(graph, target, folder, kind, max_batch, tune, sizes)
        count = write_tar(output, store)
    seconds = time.perf_counter() - started
    console.print(f"{output}: {count} kernels, {amount(output.stat().st_size)}, in {seconds:.1f} s", soft_wrap=True)


def load_kernels(
    file: Annotated[Path, typer.Argument(help="What `lathe kernels` wrote.", exists=True, dir_okay=False)],
) -> None:
    """Put the GPU kernels of a file into the cache of this machine.

    They are machine code: read only files that you trust.
    """
    from core.runtime.carried import read_tar
    from core.runtime.store import open_store

    store = open_store(None)
    if store is None:
        raise fail("the cache folder (LATHE_CACHE_DIR) cannot be written")
    with model_errors():
        count = read_tar(file, store)
    console.print(f"{count} files put into {store.root}", soft_wrap=True)


def _sizes(given: list[str]) -> dict[str, int]:
    pairs = [text.partition("=") for text in given]
    for name, _, number in pairs:
        if not name or not number.isdecimal() or int(number) < 1:
            raise fail(f"--size {name}={number}: expected NAME=SIZE with a size from 1 on")
    return {name: int(number) for name, _, number in pairs}
