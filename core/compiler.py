"""The compiler, one line per stage: graph in, running session or artifact out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypedDict

from core.any_size import for_any_size, has_kernels, stand_in, supposed_of_sizes
from core.codegen.jit import compiler_version, llvm_version
from core.codegen.target import host
from core.described import describe, described
from core.errors import ArtifactError, ModelError, UnsupportedError
from core.frontends.beside import Content, content_at, content_of_bytes, digests
from core.frontends.external import ExternalFiles
from core.frontends.onnx import import_model, load
from core.frontends.proto import parse_model
from core.in_parts import in_parts_for
from core.ir.dim import Dim
from core.ir.graph import Graph
from core.kernels.catalog import Selector
from core.kernels.cpu import object_for
from core.kernels.target import Target
from core.ops.registry import revisions
from core.options import Options, with_placement
from core.options import make_options as make_options
from core.packing import packed_maker
from core.passes.assumptions import as_one_batch
from core.passes.fed_sizes import with_shadows
from core.passes.feed_defaults import with_fed, with_ranks, with_types
from core.passes.pipeline import PassReport
from core.passes.recompute import Recompute
from core.plan.plan import Plan, Planned, weight_chunks
from core.plan.planner import make_plan, plan_for_no_batch
from core.plan.probe import misfit
from core.plan.within import plan_within
from core.rewriting import Rewritten, rewritten
from core.runtime import artifact
from core.runtime.bundle import MAGIC, Written
from core.runtime.compiled import Compiled, InParts, Split, ready, ready_in_parts, ready_split
from core.runtime.devices import open_device
from core.runtime.executable import Executable
from core.runtime.given import Sizes, is_any_size
from core.runtime.in_parts import PartsRunner
from core.runtime.memory import give_back, machine_bytes
from core.runtime.room import Block
from core.runtime.runner import Runner
from core.runtime.session import BatchInfo, Description, Session
from core.runtime.shapes import Made, Maker
from core.runtime.store import Store, open_store
from core.runtime.trial import host_bench
from core.runtime.variants import Fed, Ranks
from core.sizes import bind, input_symbols, other_symbols, supposed_of, varying_in
from core.specialise import Make, NewShapes, Source, maker, note_of
from core.split import split
from core.tidy import NODE, drop_compiler, tidy
from core.tune import Record, choices, read_findings

_BY_DEFINITION = "winograd=False: every product is computed by its definition"


def compile(
    model: Graph | str | os.PathLike[str] | bytes,
    device: str | Sequence[str] = "cpu",
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32",
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
    """A session that runs `model` (a graph, a path to an ONNX file, or its bytes).

    `threads` defaults to the processors this process may use. `max_batch` is the batch size to choose kernels for;
    every batch size runs. Object code, and what a file or bytes were compiled to, are kept in `cache_dir` (default:
    `LATHE_CACHE_DIR`, else the user's cache folder).

    `tune` bounds how long alternatives are timed, in seconds ("default": 1; "full": until all are); what is found is
    kept in the cache, too. `record` names an artifact whose choices go first: with "off", they alone count, and equal
    models give equal code. `winograd=False` computes every product by its definition: Winograd's convolution rounds
    like one of larger numbers, which shows where results are much smaller than what they are sums of.

    "background" compiles without measuring, and measures everything in a child process while that serves; the tuned
    code then takes its place (`Session.settle` waits for it). It needs the path of a file, and the cache.

    A model with symbolic dimensions besides the batch size is compiled for any sizes; the first run waits for that, and
    a combination that comes often gets code of its own in the background. Nodes without a kernel that takes any sizes
    run on their references. A model of which no node has one is compiled for each combination that a run shows. The
    first one is waited for; others are compiled in the background, and the references answer meanwhile where that is
    faster. `new_shapes="wait"` waits for each combination, unless every node has a kernel for any sizes, and has
    nothing compiled in the background; "background" waits for none.

    `packing` compiles a model of sequences for tokens instead, whatever the lengths: `Session.run_packed` lays
    sequences one after the other, so many tokens to a run at most, where that is proven to give what each would get
    alone; `Session.packing` says whether, and why not.

    `device` names where to run ("cuda", "cuda:1"; see core/runtime/devices.py), or several, in the order of preference.
    The first one runs all it has kernels for, as far as `device_memory` (bytes by device) lets it, then the next one,
    and the CPU what is left; `placement="cost"` gives a device only what is worth the copies, and a mapping from names
    of nodes to devices goes before all else. `Session.explain` says what runs where, and what travels.

    ModelError when the model is not acceptable; UnsupportedError for a device or precision Lathe does not have.
    """
    findings = read_findings(Path(record)) if record is not None else None
    options = make_options(
        device, precision, threads, max_batch, optimize, cache_dir, tune, findings, winograd, packing
    )
    options = with_placement(options, placement, device_memory)
    if isinstance(model, Graph):
        return unkept(model, _here_and_now(options), new_shapes)
    store = open_store(options.cache_dir)
    if store is None:
        return unkept(load(model), _here_and_now(options), new_shapes)
    if isinstance(model, bytes):
        return kept(store, model, options, new_shapes)
    return kept(store, Path(model), options, new_shapes, Path(model))


def _here_and_now(options: Options) -> Options:
    """UnsupportedError for options that need a file and a cache."""
    if options.tune_later:
        raise UnsupportedError('tune="background" needs the path of a file, and a cache folder that can be written')
    return options


def kept(
    store: Store,
    model: bytes | Path,
    options: Options,
    new_shapes: NewShapes,
    file: Path | None = None,
    looked_for: Content | None = None,
) -> Session:
    """A session from the compiled model in the store, which is made and put there when it is missing or of no use.
    `file`: where the model lies. `looked_for`: the content that lay there before."""
    if file is None:
        options = _here_and_now(options)
    beside = ExternalFiles.beside(file) if file is not None else None
    content = content_at(model) if isinstance(model, Path) else content_of_bytes(model, looked_for, beside is None)
    key = _key_of(content, model, options, beside)
    path = store.model(key)
    source = Source(file, key, store) if file is not None and options.tune_later else None
    with suppress(ArtifactError):
        session = opened(path, options, new_shapes, source)
        store.used(path)
        return session
    if isinstance(model, Path):  # by now it may be another file than the one that was looked for
        return kept(store, model.read_bytes(), options, new_shapes, file, content)
    files, size = beside if content.names_files else None, len(model)
    parsed = parse_model(model, files is not None)
    del model  # its memory is of use to what follows
    graphs = [import_model(parsed, files)]
    del parsed
    size += NODE * len(graphs[0].nodes)
    made = saved(store, path, graphs.pop(), options, new_shapes)  # which has the only reference then
    give_back(size)  # what packing and generating code took
    session = made if isinstance(made, Session) else opened(path, options, new_shapes, source, made)
    session.prepare()
    drop_compiler(size)
    return session


def saved(store: Store, path: Path, graph: Graph, options: Options, new_shapes: NewShapes) -> Session | Written:
    """Compile into the store; a session only where the disk is full: what was compiled still runs."""
    graph, description, ahead = described(graph, options)
    content = content_of(graph, description.batching, options)
    source = _source_of(graph, description)
    if source is None and not isinstance(content, Graph):
        graph = Graph(graph.name)  # tensors that the optimized graph lays out otherwise go before they are packed
    try:
        written = artifact.save(path, description, options.kept(), content, False, source)
        store.added(path)
    except OSError:
        return session_of(description, content, graph, options, new_shapes)
    if new_shapes == "default" or (new_shapes == "wait" and not description.in_parts):
        _compile_for_any(Source(path, written.digest, store), graph, description, options, ahead)
    return written


def _compile_for_any(
    source: Source, graph: Graph, description: Description, options: Options, ahead: Rewritten | None
) -> None:
    """Put the code for any sizes into the store, where sessions of `source` look for it: no run waits for it then."""
    binding, chosen = description.any_size, for_any_size(replace(options, findings=()))
    if not binding or source.place(binding, chosen).exists():
        return
    with suppress(Exception):  # whatever it is: a model is not refused by what only stands in
        _compile_into(source, graph, description, binding, chosen, ahead)


def _source_of(graph: Graph, description: Description) -> Graph | None:
    """The graph that an artifact holds beside compiled code: only where some runs need other code."""
    return graph if description.has_variants else None


def model_key(model: bytes | Path, options: Options, beside: ExternalFiles | None = None) -> str:
    """A digest of everything that compiling depends on. A file is not in memory as a whole meanwhile. Tensors may lie
    in the files `beside`."""
    return _key_of(content_at(model) if isinstance(model, Path) else content_of_bytes(model), model, options, beside)


def _key_of(content: Content, model: bytes | Path, options: Options, beside: ExternalFiles | None) -> str:
    outside: list[str] = []
    if content.names_files and beside is not None:
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


def unkept(graph: Graph, options: Options, new_shapes: NewShapes = "default") -> Session:
    """A session that leaves nothing behind but object code."""
    graph, description, _ = described(graph, options)
    session = session_of(description, content_of(graph, description.batching, options), graph, options, new_shapes)
    tidy(graph)
    return session


def compile_to(path: Path, graph: Graph, options: Options) -> None:
    """Compile into an artifact, one file; see runtime/artifact.py. Code for any sizes goes into the store."""
    graph, description, ahead = described(graph, options)
    content, source = content_of(graph, description.batching, options), _source_of(graph, description)
    written = artifact.save(path, description, options.kept(), content, source=source)
    store = open_store(options.cache_dir)
    if store is not None:
        _compile_for_any(Source(path, written.digest, store), graph, description, options, ahead)


def content_of(graph: Graph, batching: BatchInfo, options: Options) -> Compiled | Split | Graph:
    """Compiled code; or the graph itself where there is no one code for everything: where other dimensions than the
    batch size show only in a run, or some batch sizes need code of their own. State belongs to one code."""
    if other_symbols(graph, batching) or (batching.supposed and not graph.states):
        return graph
    made = build(graph, options, batching, ())
    if isinstance(made, InParts):
        raise UnsupportedError("code for any sizes is no code for a batch size")
    parts = made.parts if isinstance(made, Split) else (made,)
    return graph if any(part.plan.supposed for part in parts) and not graph.states else made


def session_of(
    description: Description, content: Compiled | Split | Graph, graph: Graph, options: Options, new_shapes: NewShapes
) -> Session:
    """A session that holds everything in memory; of the graph only what it needs."""
    batching = description.batching
    others = _others_of(lambda: graph, description, options, new_shapes, None)
    if not isinstance(content, Graph):
        return Session(description, fixed=Made(loaded(content, options, batching)), **others)

    def make(binding: Sizes, chosen: Options) -> Runner:
        return executable(content, chosen, batching, binding)

    packed = packed_maker(lambda: content, description, options, partial(_stored_on_host, source=None))
    made = _maker_of(content, description, make, options, new_shapes, None)
    return Session(description, made, packed=packed, **others)


class _Others(TypedDict, total=False):
    """The arguments of a session that make further sessions, for runs with other inputs."""

    variant: Callable[[Fed], Session]
    declared: Callable[[], Session]
    ranked: Callable[[Ranks], Session]


def _others_of(
    graph: Callable[[], Graph], description: Description, options: Options, new_shapes: NewShapes, source: Source | None
) -> _Others:
    """The functions that make sessions for runs with other inputs; empty where no run needs other code."""
    others: _Others = {}
    if description.defaults:
        others["variant"] = variants_of(graph, options, new_shapes, source)
    if description.declared:
        others["declared"] = lambda: _as_declared(with_types(graph(), description.declared), options)
    if description.rankless and not options.devices:
        others["ranked"] = lambda ranks: _of_ranks(with_ranks(graph(), dict(ranks)), options, new_shapes)
    return others


def _as_declared(graph: Graph, options: Options) -> Session:
    """A session that assumes nothing of its inputs. Runs that need it are rare, so nothing is kept of them."""
    chosen = _without_packing(options)
    description = describe(graph, chosen)
    make = partial(_stored, lambda: graph, description, source=None)
    return Session(description, _maker_of(graph, description, make, chosen, "wait", None))


def _of_ranks(graph: Graph, options: Options, new_shapes: NewShapes) -> Session:
    """A session of a graph whose inputs have known ranks; the model leaves them open."""
    chosen = _without_packing(options)
    opened_up, description, _ = described(graph, chosen)
    make = partial(_stored, lambda: opened_up, description, source=None)
    others = _others_of(lambda: opened_up, description, chosen, new_shapes, None)
    return Session(description, _maker_of(opened_up, description, make, chosen, new_shapes, None), **others)


def _without_packing(options: Options) -> Options:
    """Options for runs that share nothing with others."""
    return replace(options, packing=0)


def variants_of(
    graph: Callable[[], Graph], options: Options, new_shapes: NewShapes, source: Source | None
) -> Callable[[Fed], Session]:
    """Makes sessions that take defaults of a graph as inputs. They compile, or look into the store, when they run.
    `source` is the file that holds the graph, where there is one."""
    chosen = _without_packing(options)  # a default belongs to one request

    def variant(fed: Fed) -> Session:
        opened_up, description, _ = described(with_fed(graph(), fed), chosen)
        own = replace(source, fed=tuple(sorted(fed))) if source is not None else None
        make = partial(_stored, lambda: opened_up, description, source=own)
        others = _others_of(lambda: opened_up, description, chosen, new_shapes, None)
        return Session(description, _maker_of(opened_up, description, make, chosen, new_shapes, own), **others)

    return variant


def load_compiled(
    path: str | os.PathLike[str],
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    new_shapes: NewShapes = "default",
    tune: Literal["off", "default", "full"] | float = "default",
) -> Session:
    """A session from an artifact, such as `lathe compile` writes, without compiling.

    A model with symbolic dimensions besides the batch size compiles for each new combination when it first meets it,
    and keeps the result in the cache; `new_shapes` and `tune` say how, as for `compile`.

    `threads` defaults to the processors this process may use, and is at most what the artifact was compiled for.
    ArtifactError when the artifact is damaged or was made for another machine or version.
    """
    return opened(Path(path), make_options(threads=threads, cache_dir=cache_dir, tune=tune), new_shapes)


def opened(
    path: Path,
    options: Options,
    new_shapes: NewShapes,
    source: Source | None = None,
    written: Written | None = None,
) -> Session:
    """A session from an artifact. Of the options those count that an artifact does not keep. `source` is what it was
    compiled from, where it is to be tuned in the background; `written` is what this process has just saved there."""
    stored = artifact.load(path, options.threads, written)
    mine = {"threads": options.threads, "cache_dir": options.cache_dir}
    chosen = Options(**{**stored.options, **mine, "tune": options.tune, "tune_later": options.tune_later})
    store = open_store(options.cache_dir)
    own = Source(path, stored.digest, store) if store is not None else None
    others = _others_of(cache(stored.source), stored.description, chosen, new_shapes, own)
    if isinstance(stored.content, Graph):
        graph, source = stored.content, own
        make = partial(_stored, lambda: graph, stored.description, source=source)
        packed = packed_maker(lambda: graph, stored.description, chosen, partial(_stored_on_host, source=source))
        made = _maker_of(graph, stored.description, make, chosen, new_shapes, source)
        return Session(stored.description, made, packed=packed, **others)
    if source is None:
        return Session(stored.description, fixed=Made(stored.content), **others)
    make = partial(_stored, partial(_graph_in, source.path), stored.description, source=source)
    fixed = Made(stored.content, note_of(chosen), last=False)
    return Session(stored.description, maker(make, chosen, "wait", None, source), fixed, **others)


def _maker_of(
    graph: Graph, description: Description, make: Make, options: Options, new_shapes: NewShapes, source: Source | None
) -> Maker:
    """State belongs to one executable: where there is some, nothing else may take its place. What runs on other devices
    is compiled by the run that needs it."""
    if graph.states or options.devices:
        return maker(make, options, "wait", None, source)
    general = None
    if new_shapes != "wait" or (description.any_size and not description.in_parts):
        make_any = partial(_stored_for_any, source=source)
        general = stand_in(graph, description, options, make_any, source, waits=new_shapes == "wait")
    return maker(make, options, new_shapes, general, source)


def specialise(path: Path, origin: str, binding: Sizes, options: Options, fed: tuple[str, ...] = ()) -> None:
    """Put the code of one shape of a model, an ONNX file or an artifact that holds a graph, into the store, or that for
    any sizes. The defaults named in `fed` are inputs."""
    store = open_store(options.cache_dir)
    if store is None:
        raise UnsupportedError(f"the cache folder {options.cache_dir} cannot be written")
    graph = as_one_batch(with_fed(_graph_in(path), fed))[0] if fed else _graph_in(path)
    if not {name for name, _ in binding} <= set(input_symbols(graph)):
        graph = with_shadows(graph)
    description, source = describe(graph, options), Source(path, origin, store, fed)
    _compile_into(source, graph, description, binding, options)


def _compile_into(
    source: Source,
    graph: Graph,
    description: Description,
    binding: Sizes,
    options: Options,
    ahead: Rewritten | None = None,
) -> None:
    """Put the code of one shape, or that for any sizes, into the store. `ahead`: see `build`."""
    description = replace(description, batching=description.batching.of(binding))
    _keep(source, description, binding, options, build(graph, options, description.batching, binding, ahead))


def _graph_in(path: Path) -> Graph:
    """The graph that is compiled of an ONNX file, or that an artifact holds."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return as_one_batch(load(path))[0]
    return artifact.load_graph(path)


def executable(
    graph: Graph,
    options: Options,
    batching: BatchInfo,
    binding: Sizes,
    adopted: Mapping[str, Block] | None = None,
) -> Runner:
    """Compile for one set of shapes, or for any sizes, and load the result. `adopted`: see `ready`."""
    batching = batching.of(binding)
    return loaded(build(graph, options, batching, binding), options, batching, adopted)


def host_executable(graph: Graph, options: Options, batching: BatchInfo, binding: Sizes) -> Executable:
    """As `executable`, for those who share memory with what runs. UnsupportedError where options name devices."""
    return _on_host(executable(graph, options, batching, binding))


def _on_host(made: Runner) -> Executable:
    if not isinstance(made, Executable):
        made.close()
        devices = ", ".join(dict.fromkeys(share.device for share in made.shares))
        raise UnsupportedError(f"expected code for the CPU alone, got {devices}")
    return made


def _stored(
    graph: Callable[[], Graph], description: Description, binding: Sizes, options: Options, source: Source | None
) -> Runner:
    """As `executable`, from the store where the same source was compiled for these shapes before."""
    batching = description.batching.of(binding)
    description = replace(description, batching=batching)
    if source is None:
        return executable(graph(), options, batching, binding)
    path = source.place(binding, options)
    with suppress(ArtifactError):
        found = artifact.load_executable(path, options.threads)
        source.store.used(path)
        return found
    whole = graph()
    compiled = build(whole, options, batching, binding)
    with suppress(OSError, ArtifactError):  # a full disk costs memory, and the next process's time
        written = _keep(source, description, binding, options, compiled)
        found = artifact.load_executable(path, options.threads, written)  # mapped: other shapes can share its weights
        tidy(whole)
        return found
    return loaded(compiled, options, batching)


def _stored_on_host(
    graph: Callable[[], Graph], description: Description, binding: Sizes, options: Options, source: Source | None
) -> Executable:
    """As `_stored`. UnsupportedError where options name devices."""
    return _on_host(_stored(graph, description, binding, options, source))


def _stored_for_any(
    graph: Callable[[], Graph], description: Description, binding: Sizes, options: Options, source: Source | None
) -> Executable | PartsRunner:
    """As `_stored`, of code for any sizes."""
    made = _stored(graph, description, binding, options, source)
    return made if isinstance(made, PartsRunner) else _on_host(made)


def _keep(
    source: Source, description: Description, binding: Sizes, options: Options, compiled: Compiled | Split | InParts
) -> Written:
    path = source.place(binding, options)
    written = artifact.save(path, description, options.kept(), compiled, durable=False)
    source.store.added(path)
    return written


def loaded(
    compiled: Compiled | Split | InParts,
    options: Options,
    batching: BatchInfo,
    adopted: Mapping[str, Block] | None = None,
) -> Runner:
    """Compiled code and weights in memory, ready to run. DeviceMemoryError where a device has no room for its part."""
    if isinstance(compiled, InParts):
        return ready_in_parts(compiled, options.threads, options.max_batch)
    if isinstance(compiled, Split):
        return ready_split(
            compiled, lambda part: ready(part, options.threads, options.max_batch, independent=False, adopted=adopted)
        )
    return ready(compiled, options.threads, options.max_batch, batching.divisible)


def build(
    graph: Graph, options: Options, batching: BatchInfo, binding: Sizes, ahead: Rewritten | None = None
) -> Compiled | Split | InParts:
    """The whole pipeline for one set of shapes, or for any sizes: in parts, where some nodes have no kernel for any.
    `ahead`: what step 2 gives, if it was done before. UnsupportedError where no node has a kernel."""
    if not options.optimize:  # what the author wrote: products by their definition, too
        options = replace(options, winograd=False)
    # 1. the batch size becomes `n`, every other symbol a number; in code for any sizes all become sizes of a table
    whole, graph = graph, bind(graph, batching, binding)
    varying = varying_in(binding)
    supposed = supposed_of(graph, *varying) if binding or batching.supposed else ()  # else `describe` found none
    # 2. rewrite: fold, fuse, lay out
    graph, reports = ahead or rewritten(graph, options)
    if ahead is None and is_any_size(binding) and not has_kernels(graph, options):
        return in_parts_for(whole, options, batching, binding)
    supposed = tuple(dict.fromkeys((*supposed, *supposed_of(graph, *varying), *supposed_of_sizes(graph, binding))))
    if not batching.batchable and not graph.states and (node := misfit(graph)) is not None:
        return Compiled(plan_for_no_batch(graph, target_of(options), node), {}, list)
    if options.devices:
        return split(graph, options, [report.line for report in reports if report.changed], supposed)
    # 3. measure alternatives, as far as the options allow
    store = open_store(options.cache_dir)
    compiled = partial(object_for, target=host(), cache=store.objects if store else None)
    record = Record(store.tuning, host()) if store else None
    choose = choices(graph, target_of(options), options, record, host_bench(compiled))
    # 4. choose kernels, share memory, give addresses
    planned, reports = planned_of(graph, options, choose, reports, supposed)
    check_fits(planned.plan, machine_bytes())
    if is_any_size(binding) and (planned.plan.fallbacks.nodes or planned.plan.copies):
        return in_parts_for(whole, options, batching, binding)
    # 5. native code for every distinct kernel, from the cache where it has been made before
    objects = {name: compiled(spec) for name, spec in planned.specs.items()}
    # 6. constants in the layouts the kernels want
    log = [*([] if options.winograd else [_BY_DEFINITION]), *(report.line for report in reports if report.changed)]
    sizes = tuple(name for name, _ in binding) if is_any_size(binding) else ()
    plan = replace(planned.plan, log=tuple(log), sizes=sizes)
    states = {state.value.name: state.initial for state in graph.states}
    return Compiled(plan, objects, lambda: weight_chunks(planned), states, choose.used)


def target_of(options: Options) -> Target:
    """The host, and how exact its products have to be."""
    return replace(host(), tf32=options.precision == "tf32")


def planned_of(
    graph: Graph, options: Options, choose: Selector, reports: list[PassReport], supposed: tuple[Dim, ...]
) -> tuple[Planned, list[PassReport]]:
    """The plan, within the options' memory where they name any; and what passes have done, this one included."""
    plan = partial(
        make_plan,
        target=target_of(options),
        threads=options.threads,
        choose=choose,
        winograd=options.winograd,
        supposed=supposed,
    )
    if options.memory is None:
        return plan(graph), reports
    start = time.perf_counter()
    planned, changed, result = plan_within(graph, options.memory, plan)
    nodes, seconds = (len(graph.nodes), len(changed.nodes)), time.perf_counter() - start
    report = PassReport(Recompute.name, result.changed, *nodes, seconds, result.notes)
    return planned, [*reports, report]


def check_fits(plan: Plan, machine: int) -> None:
    """ModelError when not even one row has room in the memory of a machine."""
    needed = plan.arena.at(1) + plan.weights
    if needed > machine:
        message = f"needs {needed} bytes for weights and the results of one row, this machine has {machine}"
        raise ModelError(message, where="model")
