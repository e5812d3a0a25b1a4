"""`compile` and `load_compiled`: from a model or an artifact to a session, with whole compiled models in the cache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from lathe.core.compiler import pipeline
from lathe.core.compiler.code_cache import cache_key, compile_dynamic
from lathe.core.compiler.description import describe_model
from lathe.core.compiler.free_memory import NODE_BYTES, drop_llvm_code, release_memory
from lathe.core.compiler.options import Options, with_placement
from lathe.core.compiler.options import make_options as make_options
from lathe.core.compiler.sessions import load_artifact, make_session
from lathe.core.compiler.specialise import CompileSource, NewShapes
from lathe.core.compiler.symbol_binding import other_symbols
from lathe.core.compiler.tuner import read_findings
from lathe.core.errors import ArtifactError, UnsupportedError
from lathe.core.frontends.content_digest import ModelContent, content_of_bytes, content_of_file
from lathe.core.frontends.external import ExternalFiles
from lathe.core.frontends.onnx import import_model, load
from lathe.core.frontends.proto import parse_model
from lathe.core.ir.graph import Graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.artifact import artifact
from lathe.core.runtime.artifact.bundle import FileIdentity
from lathe.core.runtime.artifact.compiled import Compiled, Partitioned, Split
from lathe.core.runtime.artifact.store import Store, open_store
from lathe.core.runtime.host.memory import return_to_system
from lathe.core.runtime.session.session import Description, Session


def compile(
    model: Graph | str | os.PathLike[str] | bytes,
    device: str | Sequence[str] = "cpu",
    precision: Literal["float32", "tf32", "bfloat16", "float16", "int8-activations"] = "float32",
    threads: int | None = None,
    max_batch: int = 32,
    optimize: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    tune: Literal["off", "default", "full", "background"] | float = "default",
    record: str | os.PathLike[str] | None = None,
    winograd: bool = True,
    new_shapes: NewShapes = "default",
    packing: int | None = None,
    placement: Literal["first", "cost"] | Mapping[str, str] = "first",
    device_memory: Mapping[str, int] | None = None,
) -> Session:
    """A session that runs `model` (a graph, a path to an ONNX file, or its bytes). The caller closes it.

    `threads` defaults to the processors this process may use. `max_batch` is the batch size that kernels are chosen
    for; every batch size runs. `optimize=False` keeps the nodes as the model's author wrote them, for comparisons: only
    the required passes run. Object code and compiled models are cached in `cache_dir` (default: `LATHE_CACHE_DIR`,
    otherwise the user's cache folder); a model that is given as a graph is not cached, except for object code.

    `tune` bounds the seconds of measuring alternative kernels ("off": 0; "default": 1; "full": no bound). The findings
    are cached, too. `record` names an artifact whose findings take priority; with `tune="off"` only these findings
    count, and equal models give equal code. `winograd=False` computes every product by its definition: the rounding
    errors of Winograd's convolution are relative to larger intermediate numbers, which shows in results that are much
    smaller than the terms of their sums.

    `tune="background"` compiles without measuring, and measures everything in a child process while that code runs. The
    tuned code then replaces the first code (`Session.settle` waits for that). This needs the path of a file, and the
    cache.

    A model with symbolic dimensions besides the batch size gets dynamic-shape code. The first run waits for that code,
    and a combination of sizes that occurs often gets code of its own in the background. Nodes without a dynamic kernel
    run on their references. A model with no dynamic kernel at all is compiled for each combination that occurs: the
    first run waits, later combinations are compiled in the background, and meanwhile the references answer if that is
    faster. `new_shapes="wait"` waits for each combination, unless every node has a dynamic kernel, and compiles nothing
    in the background. With "background" a run waits only if the references would take too long, fail, or answer
    another run of the combination. Models with states, and models on other devices, have no dynamic-shape code: each
    combination waits for its code.

    `packing` compiles a model of sequences for tokens, whatever the lengths: `Session.run_packed` concatenates
    sequences, at most `packing` tokens per run, without padding. This requires a proof that each sequence gets the
    result that it would get alone; `Session.packing` says whether there is one, and why not.

    `device` names a device ("cuda", "cuda:1"; see core/runtime/device/devices.py), or several, most preferred first.
    The first device runs all nodes that it has kernels for, within `device_memory` (bytes by device, by default all of
    it), then the next one. On the last one, values and weights that exceed the memory wait on the host between their
    uses. The CPU runs the rest. `placement="cost"` gives a device only nodes whose gain outweighs the copies, and
    a mapping from names of nodes to devices overrides everything else. `Session.explain` shows where nodes run, and the
    copies.

    ModelError if the model is not valid; UnsupportedError if it needs a feature that Lathe lacks, for an unknown device
    or precision, and for `tune="background"` without a file or cache. ValueError for another option out of range,
    ArtifactError if `record` is no artifact, OSError if a file cannot be read, DeviceMemoryError if a device has too
    little memory; for a `cache_dir` that cannot be used, the errors of `Store`.
    """
    findings = read_findings(Path(record)) if record is not None else None
    options = make_options(
        device, precision, threads, max_batch, optimize, cache_dir, tune, findings, winograd, packing
    )
    options = with_placement(options, placement, device_memory)
    if isinstance(model, Graph):
        return compile_uncached(model, _without_background(options), new_shapes)
    store = open_store(options.cache_dir)
    if store is None:
        return compile_uncached(load(model), _without_background(options), new_shapes)
    if isinstance(model, bytes):
        return compile_cached(store, model, options, new_shapes)
    return compile_cached(store, Path(model), options, new_shapes, Path(model))


def _without_background(options: Options) -> Options:
    """The same options; UnsupportedError if they ask for tuning in the background, which needs a file and a cache."""
    if options.tune_later:
        raise UnsupportedError('tune="background" needs the path of a file, and a cache folder that can be written')
    return options


def compile_cached(
    store: Store,
    model: bytes | Path,
    options: Options,
    new_shapes: NewShapes,
    file: Path | None = None,
    looked_for: ModelContent | None = None,
) -> Session:
    """A session of a model, from the store if it has the compiled code; otherwise compiled and stored.

    `file`: the path of the model, if it has one. `looked_for`: an earlier digest of the same file, which may have
    changed since. UnsupportedError for tuning in the background without a `file`; otherwise the errors of `compile`.
    """
    if file is None:
        options = _without_background(options)
    beside = ExternalFiles.beside(file) if file is not None else None
    content = content_of_file(model) if isinstance(model, Path) else content_of_bytes(model, looked_for, beside is None)
    key = cache_key(content, model, options, beside)
    path = store.model(key)
    source = CompileSource(file, key, store) if file is not None and options.tune_later else None
    with suppress(ArtifactError):
        session = load_artifact(path, options, new_shapes, source)
        store.used(path)
        return session
    if isinstance(model, Path):  # the file may have changed since its key was computed, so it is read and keyed again
        return compile_cached(store, model.read_bytes(), options, new_shapes, file, content)
    files, size = beside if content.may_have_external_data else None, len(model)
    parsed = parse_model(model, files is not None)
    del model  # frees its memory for the next steps
    graphs = [import_model(parsed, files)]
    del parsed
    size += NODE_BYTES * len(graphs[0].nodes)
    made = store_artifact(store, path, graphs.pop(), options, new_shapes)  # the callee has the only reference
    return_to_system(size)  # memory of packing weights and generating code
    session = made if isinstance(made, Session) else load_artifact(path, options, new_shapes, source, made)
    session.prepare()
    drop_llvm_code(size)
    return session


def store_artifact(
    store: Store, path: Path, graph: Graph, options: Options, new_shapes: NewShapes
) -> Session | FileIdentity:
    """Compile a graph into an artifact at `path` in the store; returns the identity of the written file.

    If the file cannot be written (full disk), returns a session of the compiled code instead. Otherwise dynamic-shape
    code is compiled into the store, too, with `new_shapes` "default", or "wait" if each node has a dynamic kernel.
    """
    graph, description, ahead = describe_model(graph, options)
    content = compile_content(graph, description.batching, options)
    source = _artifact_graph(graph, description)
    if source is None and not isinstance(content, Graph):
        # Frees tensors that the optimized graph has in other layouts, before weights are packed.
        graph = Graph(graph.name)
    try:
        written = artifact.save(path, description, options.kept(), content, False, source)
        store.added(path)
    except OSError:
        return make_session(description, content, graph, options, new_shapes)
    if new_shapes == "default" or (new_shapes == "wait" and not description.in_parts):
        compile_dynamic(CompileSource(path, written.digest, store), graph, description, options, ahead)
    return written


def _artifact_graph(graph: Graph, description: Description) -> Graph | None:
    """The graph, if an artifact must hold it besides compiled code, as some runs need other code; otherwise None."""
    return graph if description.has_variants else None


def compile_uncached(graph: Graph, options: Options, new_shapes: NewShapes = "default") -> Session:
    """A session whose compiled model is not cached, except for object code."""
    graph, description, _ = describe_model(graph, options)
    session = make_session(
        description, compile_content(graph, description.batching, options), graph, options, new_shapes
    )
    release_memory(graph)
    return session


def compile_to(path: Path, graph: Graph, options: Options) -> None:
    """Compile a graph into an artifact, the file `path`; dynamic-shape code goes into the store, if there is one.

    OSError if the file cannot be written; otherwise the errors of `compile`.
    """
    graph, description, ahead = describe_model(graph, options)
    content, source = compile_content(graph, description.batching, options), _artifact_graph(graph, description)
    written = artifact.save(path, description, options.kept(), content, source=source)
    store = open_store(options.cache_dir)
    if store is not None:
        compile_dynamic(CompileSource(path, written.digest, store), graph, description, options, ahead)


def compile_content(graph: Graph, batching: BatchInfo, options: Options) -> Compiled | Split | Graph:
    """Compiled code for all batch sizes, or `graph` itself if its code must be compiled for each shape.

    It must if there are symbolic dimensions besides the batch size, or assumptions that exclude batch sizes. Such
    assumptions do not count for a graph with states, because the states belong to one compiled code.
    """
    if other_symbols(graph, batching) or (batching.supposed and not graph.states):
        return graph
    made = pipeline.build(graph, options, batching, ())
    if isinstance(made, Partitioned):
        raise UnsupportedError("dynamic-shape code is not code for a batch size")
    parts = made.parts if isinstance(made, Split) else (made,)
    return graph if any(part.plan.supposed for part in parts) and not graph.states else made


def load_compiled(
    path: str | os.PathLike[str],
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    new_shapes: NewShapes = "default",
    tune: Literal["off", "default", "full"] | float = "default",
) -> Session:
    """A session from an artifact, such as `lathe compile` writes; native code in it runs without compiling.

    For a model with symbolic dimensions besides the batch size, the artifact holds the graph: its code is loaded from
    the cache, or compiled and cached, as for `compile`. `new_shapes` and `tune` are as for `compile`. The caller closes
    the session.

    `threads` defaults to the processors this process may use. Compiled code uses at most the number of threads that it
    was compiled for. ArtifactError if the artifact is missing, damaged, owned neither by this user nor by root,
    writable by other users, or made for another machine or version; UnsupportedError or DeviceMemoryError if a device
    of its code is missing or too small.
    """
    return load_artifact(Path(path), make_options(threads=threads, cache_dir=cache_dir, tune=tune), new_shapes)
