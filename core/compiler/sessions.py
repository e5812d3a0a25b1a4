"""Sessions: of compiled code in memory, of artifacts, and of variants of a model with other inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TypedDict

from lathe.core.compiler.code_cache import _read_graph, cached_dynamic, cached_on_host, cached_runner
from lathe.core.compiler.description import describe, describe_model
from lathe.core.compiler.dynamic_shapes import stand_in
from lathe.core.compiler.options import Options
from lathe.core.compiler.options import make_options as make_options
from lathe.core.compiler.packing import make_packed_maker
from lathe.core.compiler.pipeline import compile_executable, load_code
from lathe.core.compiler.specialise import CompileSource, Make, NewShapes, make_shape_compiler, note_of
from lathe.core.ir.graph import Graph
from lathe.core.passes.lowering.input_variants import with_constants, with_default_inputs, with_ranks, with_types
from lathe.core.runtime.artifact import artifact
from lathe.core.runtime.artifact.bundle import FileIdentity
from lathe.core.runtime.artifact.compiled import Compiled, Split
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.session.executables import ShapeCode, ShapeCompiler
from lathe.core.runtime.session.run_inputs import CodeBinding
from lathe.core.runtime.session.runner import Runner
from lathe.core.runtime.session.session import Description, Session
from lathe.core.runtime.session.variants import FedDefaults, Ranks, Sizes, values_of


def make_session(
    description: Description, content: Compiled | Split | Graph, graph: Graph, options: Options, new_shapes: NewShapes
) -> Session:
    """A session without an artifact. `content` is compiled code, or the graph if code is compiled for each shape."""
    batching = description.batching
    others = session_makers(lambda: graph, description, options, new_shapes, None)
    if not isinstance(content, Graph):
        return Session(description, fixed=ShapeCode(load_code(content, options, batching)), **others)

    def make(binding: CodeBinding, chosen: Options) -> Runner:
        return compile_executable(content, chosen, batching, binding)

    packed = make_packed_maker(lambda: content, description, options, partial(cached_on_host, source=None))
    made = make_maker(content, description, make, options, new_shapes, None)
    return Session(description, made, packed=packed, **others)


class _SessionMakers(TypedDict, total=False):
    """Arguments of `Session`: functions that make further sessions, for runs whose inputs the session's code excludes.

    `variant`: fed defaults; `declared`: inputs that break the assumptions of the code; `ranked`: ranks left open;
    `sized`: values of size inputs.
    """

    variant: Callable[[FedDefaults], Session]
    declared: Callable[[], Session]
    ranked: Callable[[Ranks], Session]
    sized: Callable[[Sizes], Session]


def session_makers(
    graph: Callable[[], Graph],
    description: Description,
    options: Options,
    new_shapes: NewShapes,
    source: CompileSource | None,
) -> _SessionMakers:
    """The functions with which a session makes further sessions, as keyword arguments of `Session`.

    Each is present only if a run may need it: the model has defaults, is compiled under assumptions about its inputs,
    leaves ranks open (and no device is named), or has size inputs.
    """
    others: _SessionMakers = {}
    if description.defaults:
        others["variant"] = variant_maker(graph, options, new_shapes, source)
    if description.declared:
        others["declared"] = lambda: _declared_session(with_types(graph(), description.declared), options)
    if description.rankless and not options.devices:
        others["ranked"] = lambda ranks: _narrowed_session(with_ranks(graph(), dict(ranks)), options, new_shapes)
    if description.size_inputs:
        others["sized"] = lambda sizes: _narrowed_session(
            with_constants(graph(), values_of(sizes)), options, new_shapes
        )
    return others


def _declared_session(graph: Graph, options: Options) -> Session:
    """A session of `graph`, which has the declared input types, so that the code assumes no more about them.

    Runs that need it are rare, so its code is not cached, except for object code, and every new shape waits for its
    code.
    """
    chosen = _without_packing(options)
    description = describe(graph, chosen)
    make = partial(cached_runner, lambda: graph, description, source=None)
    return Session(description, make_maker(graph, description, make, chosen, "wait", None))


def _narrowed_session(graph: Graph, options: Options, new_shapes: NewShapes) -> Session:
    """A session of `graph`, a copy of a model in which open ranks, or the values of size inputs, are those of a run."""
    chosen = _without_packing(options)
    opened_up, description, _ = describe_model(graph, chosen)
    make = partial(cached_runner, lambda: opened_up, description, source=None)
    others = session_makers(lambda: opened_up, description, chosen, new_shapes, None)
    return Session(description, make_maker(opened_up, description, make, chosen, new_shapes, None), **others)


def _without_packing(options: Options) -> Options:
    """The options without packing, for runs that share no packed run with others."""
    return replace(options, packing=0)


def variant_maker(
    graph: Callable[[], Graph], options: Options, new_shapes: NewShapes, source: CompileSource | None
) -> Callable[[FedDefaults], Session]:
    """A function that makes a session in which the defaults of given names are inputs that a run feeds.

    The session compiles or loads its code when it first runs.
    """
    chosen = _without_packing(options)  # a fed default belongs to one request, so its rows share no run

    def variant(fed: FedDefaults) -> Session:
        opened_up, description, _ = describe_model(with_default_inputs(graph(), fed), chosen)
        own = replace(source, fed=tuple(sorted(fed))) if source is not None else None
        make = partial(cached_runner, lambda: opened_up, description, source=own)
        others = session_makers(lambda: opened_up, description, chosen, new_shapes, None)
        return Session(description, make_maker(opened_up, description, make, chosen, new_shapes, own), **others)

    return variant


def load_artifact(
    path: Path,
    options: Options,
    new_shapes: NewShapes,
    source: CompileSource | None = None,
    written: FileIdentity | None = None,
) -> Session:
    """A session from an artifact; of `options`, only threads, cache folder and tuning count.

    `source`: the file from which the artifact was compiled, if the code is to be tuned in the background. `written`:
    the identity of the artifact's file, if this process has just written it. Errors as for `load_compiled`.
    """
    stored = artifact.load(path, options.threads, written)
    mine = {"threads": options.threads, "cache_dir": options.cache_dir}
    chosen = Options(**{**stored.options, **mine, "tune": options.tune, "tune_later": options.tune_later})
    store = open_store(options.cache_dir)
    own = CompileSource(path, stored.digest, store) if store is not None else None
    others = session_makers(cache(stored.source), stored.description, chosen, new_shapes, own)
    if isinstance(stored.content, Graph):
        graph, source = stored.content, own
        make = partial(cached_runner, lambda: graph, stored.description, source=source)
        packed = make_packed_maker(lambda: graph, stored.description, chosen, partial(cached_on_host, source=source))
        made = make_maker(graph, stored.description, make, chosen, new_shapes, source)
        return Session(stored.description, made, packed=packed, **others)
    if source is None:
        return Session(stored.description, fixed=ShapeCode(stored.content), **others)
    make = partial(cached_runner, partial(_read_graph, source.path), stored.description, source=source)
    fixed = ShapeCode(stored.content, note_of(chosen), last=False)
    return Session(stored.description, make_shape_compiler(make, chosen, "wait", None, source), fixed, **others)


def make_maker(
    graph: Graph,
    description: Description,
    make: Make,
    options: Options,
    new_shapes: NewShapes,
    source: CompileSource | None,
) -> ShapeCompiler:
    """The compiler of code for the shapes of a session, with a stand-in that answers while code for a shape is missing.

    `make` compiles or loads code for one binding. There is no stand-in, and every run waits for code of its shape, if
    the model has states or runs on other devices, and with `new_shapes="wait"` unless all nodes have dynamic kernels.
    """
    if graph.states or options.devices:
        return make_shape_compiler(make, options, "wait", None, source)
    general = None
    if new_shapes != "wait" or (description.any_size and not description.in_parts):
        make_any = partial(cached_dynamic, source=source)
        general = stand_in(graph, description, options, make_any, source, waits=new_shapes == "wait")
    return make_shape_compiler(make, options, new_shapes, general, source)
