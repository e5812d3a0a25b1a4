"""Compiled code in the store: found by source and shapes, or compiled and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lathe.core.codegen.jit import compiler_version, llvm_version
from lathe.core.codegen.target import host
from lathe.core.compiler import pipeline
from lathe.core.compiler.description import describe
from lathe.core.compiler.dynamic_shapes import dynamic_options
from lathe.core.compiler.free_memory import release_memory
from lathe.core.compiler.options import Options
from lathe.core.compiler.options import make_options as make_options
from lathe.core.compiler.pipeline import compile_executable, load_code, require_host
from lathe.core.compiler.run_passes import OptimizedGraph
from lathe.core.compiler.specialise import CompileSource
from lathe.core.compiler.symbol_binding import input_symbols
from lathe.core.errors import ArtifactError, UnsupportedError
from lathe.core.frontends.content_digest import ModelContent, content_of_bytes, content_of_file, digests
from lathe.core.frontends.external import ExternalFiles
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph
from lathe.core.ops.opdef.registry import revisions
from lathe.core.passes.lowering.input_variants import with_default_inputs
from lathe.core.passes.lowering.length_inputs import with_length_inputs
from lathe.core.passes.proofs.assumptions import assume_one_batch
from lathe.core.runtime.artifact import artifact
from lathe.core.runtime.artifact.bundle import MAGIC, FileIdentity
from lathe.core.runtime.artifact.compiled import Compiled, Partitioned, Split
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.device.devices import open_device
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.session.dynamic_shapes import warn_of_failure
from lathe.core.runtime.session.partitioned import PartitionedRunner
from lathe.core.runtime.session.run_inputs import CodeBinding, batching_for
from lathe.core.runtime.session.runner import Runner
from lathe.core.runtime.session.session import Description


def compile_dynamic(
    source: CompileSource, graph: Graph, description: Description, options: Options, ahead: OptimizedGraph | None
) -> None:
    """Compile dynamic-shape code into the store, where sessions of `source` look for it, so that no run waits.

    Nothing is done if the model gets no such code, or the store has it. A failure raises no error; `warn_of_failure`
    decides whether it becomes a warning. If the store cannot be written, sessions compile the code themselves. `ahead`:
    the graph after the passes, if they ran already.
    """
    binding, chosen = description.any_size, dynamic_options(replace(options, findings=()))
    if not binding or source.place(binding, chosen).exists():
        return
    try:
        _compile_into(source, graph, description, binding, chosen, ahead)
    except OSError:  # the store cannot be written
        return
    except Exception as error:  # any error: a stand-in that fails must not make the model fail
        warn_of_failure(error)


def model_key(model: bytes | Path, options: Options, beside: ExternalFiles | None = None) -> str:
    """The cache key of a compiled model: a digest of model, options, host, devices and versions of the compilers.

    Registered custom operators count, too, and so do the contents of the files `beside`, which may hold tensors of the
    model.
    """
    return cache_key(
        content_of_file(model) if isinstance(model, Path) else content_of_bytes(model), model, options, beside
    )


def cache_key(content: ModelContent, model: bytes | Path, options: Options, beside: ExternalFiles | None) -> str:
    outside: list[str] = []
    if content.may_have_external_data and beside is not None:
        outside = digests(model.read_bytes() if isinstance(model, Path) else model, beside)
    parts = (
        content.digest,
        *outside,
        options.key,
        host().key,
        compiler_version(),
        llvm_version(),
        revisions(),
        *(f"{name} {open_device(name).target.key}" for name in options.devices),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def specialise(path: Path, origin: str, binding: CodeBinding, options: Options, fed: tuple[str, ...] = ()) -> None:
    """Compile one shape of the model at `path`, or its dynamic-shape code, into the store.

    `origin` identifies the model in cache keys; `binding` has the value of each symbol. `fed` names defaults of the
    model that become inputs. Code that the store has already is compiled again and replaced. UnsupportedError if the
    default cache folder cannot be used; for another folder, the errors of `Store`.
    """
    store = open_store(options.cache_dir)
    if store is None:
        raise UnsupportedError(f"the cache folder {options.cache_dir} cannot be written")
    graph = assume_one_batch(with_default_inputs(_read_graph(path), fed))[0] if fed else _read_graph(path)
    if not {name for name, _ in binding} <= set(input_symbols(graph)):
        graph = with_length_inputs(graph)
    description, source = describe(graph, options), CompileSource(path, origin, store, fed)
    _compile_into(source, graph, description, binding, options)


def _compile_into(
    source: CompileSource,
    graph: Graph,
    description: Description,
    binding: CodeBinding,
    options: Options,
    ahead: OptimizedGraph | None = None,
) -> None:
    """Compile the code of one shape, or dynamic-shape code, and write it to the store.

    `ahead`: the graph after the passes, if they ran before.
    """
    description = replace(description, batching=batching_for(description.batching, binding))
    compiled = pipeline.build(graph, options, description.batching, binding, ahead)
    _store_code(source, description, binding, options, compiled)


def _read_graph(path: Path) -> Graph:
    """The graph in the file at `path`: that of an artifact, or an ONNX model as `assume_one_batch` rewrites it."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return assume_one_batch(load(path))[0]
    return artifact.load_graph(path)


def cached_runner(
    graph: Callable[[], Graph],
    description: Description,
    binding: CodeBinding,
    options: Options,
    source: CompileSource | None,
) -> Runner:
    """Code for one binding, ready to run: loaded from the store, or compiled and put there.

    The key in the store is made of `source`, `binding`, options and host. Without a `source`, or if the store cannot be
    written, the code is compiled into memory, and only the object code of its kernels is cached. If the
    stored file is damaged, the code is compiled again. `graph` is called only to compile. The caller closes the result.
    """
    batching = batching_for(description.batching, binding)
    description = replace(description, batching=batching)
    if source is None:
        return compile_executable(graph(), options, batching, binding)
    path = source.place(binding, options)
    with suppress(ArtifactError):
        found = artifact.load_executable(path, options.threads)
        source.store.used(path)
        return found
    whole = graph()
    compiled = pipeline.build(whole, options, batching, binding)
    with suppress(OSError, ArtifactError):  # a full disk only costs memory, and compiling again in the next process
        written = _store_code(source, description, binding, options, compiled)
        # Mapped, so that other shapes can share its weights.
        found = artifact.load_executable(path, options.threads, written)
        release_memory(whole)
        return found
    return load_code(compiled, options, batching)


def cached_on_host(
    graph: Callable[[], Graph],
    description: Description,
    binding: CodeBinding,
    options: Options,
    source: CompileSource | None,
) -> Executable:
    """As `cached_runner`, for code of the CPU alone.

    UnsupportedError if the options name other devices, or if the code is dynamic-shape code in parts.
    """
    return require_host(cached_runner(graph, description, binding, options, source))


def cached_dynamic(
    graph: Callable[[], Graph],
    description: Description,
    binding: CodeBinding,
    options: Options,
    source: CompileSource | None,
) -> Executable | PartitionedRunner:
    """As `cached_runner`, for dynamic-shape code: whole (`Executable`) or in parts (`PartitionedRunner`).

    UnsupportedError if the options name devices.
    """
    made = cached_runner(graph, description, binding, options, source)
    return made if isinstance(made, PartitionedRunner) else require_host(made)


def _store_code(
    source: CompileSource,
    description: Description,
    binding: CodeBinding,
    options: Options,
    compiled: Compiled | Split | Partitioned,
) -> FileIdentity:
    path = source.place(binding, options)
    written = artifact.save(path, description, options.kept(), compiled, durable=False)
    source.store.added(path)
    return written
