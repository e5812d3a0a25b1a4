"""Stages that the server runs in child processes, as command lines over files: nothing is pickled.

    python -m lathe.core.compiler.child_stages parse MODEL.onnx OUT [--external]
        Write OUT/graph.lir, OUT/weights.bin and OUT/report.json. With --external, tensors may lie in other files of
        MODEL.onnx's folder.
    python -m lathe.core.compiler.child_stages compile IR OUT [options]
        Write OUT/model.lathe, an artifact for `lathe.load_compiled`.
    python -m lathe.core.compiler.child_stages specialise MODEL ORIGIN BINDING OPTIONS FED
        Compile one shape of a model (a file) into the cache, for sessions that compile in the background.
    python -m lathe.core.compiler.child_stages kernels JOBS CACHE ARCH
        Compile kernels for GPUs into the cache, see cuda_kernels.py.

With --while-stdin before the stage, the process exits when its standard input closes, that is, with its parent.

Exit status 0; or 2 with {"error": ...} on standard output for any LatheError, such as an invalid model; or 5 with the
same if a device has too little memory for the model; or 1 with a traceback on standard error for other exceptions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from lathe.core.compiler import code_cache, custom_operators, pipeline
from lathe.core.compiler import compile as compile_module
from lathe.core.compiler.options import Options, with_placement
from lathe.core.compiler.packing import takes_tokens
from lathe.core.errors import DeviceMemoryError, FeedError, LatheError
from lathe.core.exit_status import ExitStatus
from lathe.core.frontends.onnx import load
from lathe.core.frontends.zip_map import maps_as_tensors
from lathe.core.ir.dim import parse_dim
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.types import TensorType
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.runtime.artifact.store import cache_dir

COMPILED = "model.lathe"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage; returns the exit status 0, 2 or 5. Exceptions other than LatheError are not caught."""
    arguments = _parser().parse_args(argv)
    if arguments.while_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        if modules := os.environ.get(custom_operators.MODULES):
            custom_operators.load_operators(modules)
        _STAGES[arguments.stage](arguments)
    except LatheError as error:
        print(json.dumps({"error": str(error)}))
        return ExitStatus.DEVICE_TOO_SMALL if isinstance(error, DeviceMemoryError) else ExitStatus.INPUT_REFUSED
    return 0


def parse(model: Path, out: Path, external: bool = False) -> None:
    """Read and verify an ONNX file; write graph.lir (IR text), weights.bin and report.json to the folder `out`.

    Maps of ZipMap become tensors (`maps_as_tensors`). `external`: tensors may lie in other files of the model's folder.
    ModelError if the model is not valid or not supported, OSError if a file cannot be read or written.
    """
    graph = load(model, external)
    maps_as_tensors(graph)
    weights = Weights()
    text = print_graph(graph, weights)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    (out / "graph.lir").write_text(text)
    with (out / "weights.bin").open("wb") as file:
        file.writelines(weights.chunks)
    (out / "report.json").write_text(json.dumps(report(graph)))


def report(graph: Graph) -> dict[str, object]:
    """A parsed model's name, types of inputs and outputs as text, number of nodes, and elements of all constants."""
    return {
        "name": graph.name,
        "inputs": {value.name: str(value.type) for value in graph.inputs},
        "outputs": {value.name: str(value.type) for value in graph.outputs},
        "nodes": len(graph.nodes),
        "parameters": sum(array.size for array in graph.constants.values()),
    }


def read_parsed(folder: Path) -> Graph:
    """The graph that `parse` wrote to `folder`; its large constants are read-only views of the mapped weights.bin.

    Types are inferred and the graph is verified again, because graph.lir may have been damaged since. Damaged values of
    weights are not noticed. ModelError if the text is malformed or the graph is invalid, OSError if a file is missing.
    """
    weights = folder / "weights.bin"
    data = np.memmap(weights, np.uint8, "r") if weights.stat().st_size else b""
    graph = parse_graph((folder / "graph.lir").read_text(), data)
    infer_graph(graph)
    verify(graph, "reading parsed IR")
    return graph


def compile_stage(arguments: argparse.Namespace) -> None:
    """Compile parsed IR into an artifact, load it, and run it once on zeros, with 1 for every symbolic dimension.

    The run is left out if an input is no tensor, has no known rank, or holds strings. A FeedError of the run is
    ignored, as a model may refuse zeros as data. If the model is compiled for packed runs, the run leaves the packed
    code in the cache, so that a session of the artifact serves sequences of every length at once. Unfinished files of
    an earlier attempt are deleted.
    """
    graph = read_parsed(arguments.ir)
    options = pipeline.make_options(
        arguments.device,
        arguments.precision,
        arguments.threads,
        arguments.max_batch,
        True,
        arguments.cache,
        arguments.tune,
        packing=arguments.packing or (arguments.token_packing if takes_tokens(graph) else None),
    )
    if arguments.device_memory is not None:
        options = with_placement(options, "first", {arguments.device: arguments.device_memory})
    arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in arguments.out.glob(f".{COMPILED}.*"):  # left by an attempt that was interrupted
        left.unlink()
    compile_module.compile_to(arguments.out / COMPILED, graph, options)
    with compile_module.load_compiled(
        arguments.out / COMPILED, options.threads, arguments.cache, tune="off"
    ) as session:
        feeds = _zeros(graph)
        if feeds is not None:
            with suppress(FeedError):
                session.run(feeds)


def parse_stage(arguments: argparse.Namespace) -> None:
    parse(arguments.model, arguments.out, arguments.external)


def specialise_stage(arguments: argparse.Namespace) -> None:
    """Compile the code of one shape, or dynamic-shape code, into the cache.

    The arguments are those of `CompileSource.command`: JSON, in which tuples are lists.
    """
    binding = tuple((str(name), parse_dim(str(size))) for name, size in json.loads(arguments.binding))
    options = Options(**json.loads(arguments.options))
    code_cache.specialise(arguments.model, arguments.origin, binding, options, tuple(json.loads(arguments.fed)))


def kernels_stage(arguments: argparse.Namespace) -> None:
    from lathe.core.runtime.device.cuda_kernels import compile_jobs

    compile_jobs(arguments.jobs, arguments.folder, arguments.arch)


_STAGES = {"parse": parse_stage, "compile": compile_stage, "specialise": specialise_stage, "kernels": kernels_stage}


def _exit_with_stdin() -> None:
    """Wait until standard input closes, then exit the process at once with status 1.

    Uses os.read: the interpreter's own reader would hold its lock when the process ends.
    """
    while os.read(0, 1):
        pass
    os._exit(1)


def _zeros(graph: Graph) -> dict[str, Array] | None:
    """Zeros for each input, symbolic dimensions 1; None if an input is no tensor, has no rank, or holds strings."""
    feeds = {}
    for value in graph.inputs:
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype.numpy.kind == "O":
            return None
        feeds[value.name] = np.zeros(type_.evaluate(dict.fromkeys(type_.symbols, 1)), type_.dtype.numpy)
    return feeds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lathe.core.compiler.child_stages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--while-stdin", action="store_true")
    stages = parser.add_subparsers(dest="stage", required=True)
    parsing = stages.add_parser("parse")
    parsing.add_argument("model", type=Path)
    parsing.add_argument("out", type=Path)
    parsing.add_argument("--external", action="store_true")
    compiling = stages.add_parser("compile")
    compiling.add_argument("ir", type=Path)
    compiling.add_argument("out", type=Path)
    compiling.add_argument("--threads", type=int)
    compiling.add_argument("--max-batch", type=int, default=32)
    compiling.add_argument("--precision", default="float32")
    compiling.add_argument("--device", default="cpu")
    compiling.add_argument("--device-memory", type=int)
    compiling.add_argument("--packing", type=int)
    compiling.add_argument("--token-packing", type=int, help="as --packing, but only for models of tokens")
    compiling.add_argument("--tune", default="default")
    compiling.add_argument("--cache", default=cache_dir())
    specialising = stages.add_parser("specialise")
    specialising.add_argument("model", type=Path)
    for name in ("origin", "binding", "options", "fed"):
        specialising.add_argument(name)
    kernels = stages.add_parser("kernels")
    kernels.add_argument("jobs", type=Path)
    kernels.add_argument("folder", type=Path)
    kernels.add_argument("arch", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
