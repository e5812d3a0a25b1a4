"""Decides what a session compiles and when: new shapes, in a run that waits or in the background, and tuned plans.

A new shape is compiled twice in the background: at once without measuring, then with it. A child process does the work
if the model is a file and the result can be cached in the store, from which it is then loaded. Until then dynamic-shape
code or the references answer, see `dynamic_shapes.stand_in`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from lathe.core.codegen.target import host
from lathe.core.compiler.options import Options
from lathe.core.errors import UnsupportedError
from lathe.core.ops.opdef.registry import are_known_to_children, revisions
from lathe.core.runtime.artifact.store import Store
from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.dynamic_shapes import DynamicShapeCode
from lathe.core.runtime.session.executables import ShapeCode, ShapeCompiler, Stage, StandIn
from lathe.core.runtime.session.partitioned import PartitionedRunner
from lathe.core.runtime.session.run_inputs import CodeBinding
from lathe.core.runtime.session.runner import Runner, serves_none

NewShapes: TypeAlias = Literal["default", "wait", "background"]
Make: TypeAlias = Callable[[CodeBinding, Options], Runner]

_NEW_SHAPES = ("default", "wait", "background")


@dataclass(frozen=True)
class CompileSource:
    """A file that a child process can compile: an ONNX model, or an artifact that holds a graph.

    `origin` identifies the model in the cache keys of its code. `fed` names the defaults that are inputs, sorted.
    """

    path: Path
    origin: str
    store: Store
    fed: tuple[str, ...] = ()

    def place(self, binding: CodeBinding, options: Options) -> Path:
        """The path in the store of the code for this binding of the symbols, whether it exists or not."""
        fed = [json.dumps(self.fed)] if self.fed else []
        key = "\n".join((self.origin, repr(binding), options.key, host().key, revisions(), *fed))
        return self.store.model(hashlib.sha256(key.encode()).hexdigest())

    def command(self, binding: CodeBinding, options: Options) -> list[str]:
        """Arguments for child_stages.py: a child process compiles the code of one shape and stores it in the cache."""
        sizes = json.dumps(binding, default=str)  # dimensions as text
        return ["specialise", str(self.path), self.origin, sizes, *map(json.dumps, (asdict(options), self.fed))]


def make_shape_compiler(
    make: Make,
    options: Options,
    new_shapes: NewShapes,
    general: StandIn | None,
    source: CompileSource | None,
) -> ShapeCompiler:
    """The compiler of code for the shapes of a session; `make` compiles or loads code for one binding.

    With `new_shapes` "wait" a run waits for code of its shape, unless the stand-in `general` serves it, and nothing is
    compiled in the background, unless the options ask for tuning there. Otherwise code of a new shape is compiled in
    the background, first without measuring, then tuned; `general` answers meanwhile, and permanently if its native code
    leaves fewer nodes to references. The first shape of a session is tuned as the options say before it runs, unless
    `new_shapes` is "background" or `general` is quick. `source`: the file that a child process can compile; None: this
    process compiles. ValueError for unknown `new_shapes`.
    """
    if new_shapes not in _NEW_SHAPES:
        raise ValueError(f"new_shapes is {new_shapes!r}, expected {', '.join(map(repr, _NEW_SHAPES))}")
    if isinstance(
        general, DynamicShapeCode
    ):  # most shapes share its weights, and Strassen's products need another layout
        options = replace(options, winograd=False)
    quick, tuned = replace(options, tune=0.0), replace(options, tune=options.tune or options.tune_later)
    stages = [_stage(make, chosen, source, chosen == tuned, general) for chosen in (quick, tuned)]
    waits = new_shapes == "wait" and not options.tune_later
    return ShapeCompiler(
        now=lambda binding: _shape_code(make(binding, options), options, options == tuned),
        later=() if waits else tuple(stages),
        is_cached=lambda binding: source is not None and source.place(binding, options).exists(),
        general=general,
        first=new_shapes == "background",
    )


def _stage(make: Make, options: Options, source: CompileSource | None, last: bool, general: StandIn | None) -> Stage:
    def run(binding: CodeBinding, background: Background) -> ShapeCode | None:
        if source is not None and not source.place(binding, options).exists():
            done = are_known_to_children() and background.run_child(
                source.command(binding, options), patient=bool(options.tune)
            )
            if not done and options.tune:
                raise UnsupportedError("measuring needs a child process, and it failed")
        code = make(binding, options)
        if general is not None and _is_better(general, code):
            code.close()
            if source is not None:  # otherwise a later session would load the code, and not the stand-in
                source.place(binding, options).unlink(missing_ok=True)
            return None
        return _shape_code(code, options, last)

    return run


def _is_better(general: StandIn, code: Runner) -> bool:
    """Whether a stand-in with native code leaves fewer nodes to references than the code of a shape does.

    That is so if many values have sizes that only a run shows: dynamic-shape code in parts takes such sizes from the
    run, and has kernels for the nodes after them.
    """
    return any(_reference_nodes(other) < _reference_nodes(code) for other in general.runners)


def _reference_nodes(runner: Runner) -> int:
    """The number of nodes that run on references, those in subgraphs included."""
    if isinstance(runner, PartitionedRunner):
        return runner.reference_nodes
    return sum(share.plan.fallbacks.count_nodes() for share in runner.shares)


def _shape_code(runner: Runner, options: Options, last: bool) -> ShapeCode:
    return ShapeCode(runner, note_of(options), last or serves_none(runner))


def note_of(options: Options) -> str:
    """The note in `explain` on code compiled with these options: "tuned" or "compiled without measuring"."""
    return "tuned" if options.tune else "compiled without measuring"
