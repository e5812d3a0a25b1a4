"""When a session compiles what: its shapes as they come, in the run that waits or in the background, and tuned plans.

A new shape is compiled twice in the background: at once without measuring, then with it. A child process does the work
where the model lies in a file and the result can be kept in the store; what it left there is then loaded. What answers
before is code for any sizes or the references, see `any_size.stand_in`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from core.codegen.target import host
from core.errors import UnsupportedError
from core.ops.registry import are_everywhere, revisions
from core.options import Options
from core.runtime.any_size import AnySize
from core.runtime.background import Background
from core.runtime.given import Sizes
from core.runtime.runner import Runner, serves_none
from core.runtime.shapes import Made, Maker, Stage, StandIn
from core.runtime.store import Store

NewShapes: TypeAlias = Literal["default", "wait", "background"]
Make: TypeAlias = Callable[[Sizes, Options], Runner]

_CHOICES = ("default", "wait", "background")


@dataclass(frozen=True)
class Source:
    """A file that a child process can compile: an ONNX model, or an artifact that holds a graph. `origin` names what
    is made from it in the store. `fed` names the defaults that are inputs, sorted."""

    path: Path
    origin: str
    store: Store
    fed: tuple[str, ...] = ()

    def place(self, binding: Sizes, options: Options) -> Path:
        """Where the code of a shape is kept."""
        fed = [json.dumps(self.fed)] if self.fed else []
        key = "\n".join((self.origin, repr(binding), options.key, host().key, revisions(), *fed))
        return self.store.model(hashlib.sha256(key.encode()).hexdigest())

    def command(self, binding: Sizes, options: Options) -> list[str]:
        """Arguments for children.py that put the code of a shape into its place."""
        sizes = json.dumps(binding, default=str)  # of a line: dimensions as text
        return ["specialise", str(self.path), self.origin, sizes, *map(json.dumps, (asdict(options), self.fed))]


def maker(
    make: Make,
    options: Options,
    new_shapes: NewShapes,
    general: StandIn | None,
    source: Source | None,
) -> Maker:
    """For a model without state. The first shape of a session is tuned as the options say before it runs, unless it is
    to wait for the background like the others. ValueError for unknown `new_shapes`."""
    if new_shapes not in _CHOICES:
        raise ValueError(f"new_shapes is {new_shapes!r}, expected {', '.join(map(repr, _CHOICES))}")
    if isinstance(general, AnySize):  # most shapes share its weights: those of Strassen's lie otherwise
        options = replace(options, winograd=False)
    quick, tuned = replace(options, tune=0.0), replace(options, tune=options.tune or options.tune_later)
    stages = [_stage(make, chosen, source, chosen == tuned) for chosen in (quick, tuned)]
    waits = new_shapes == "wait" and not options.tune_later
    return Maker(
        now=lambda binding: _made(make(binding, options), options, options == tuned),
        later=() if waits else tuple(stages),
        at_hand=lambda binding: source is not None and source.place(binding, options).exists(),
        general=general,
        first=new_shapes == "background",
    )


def _stage(make: Make, options: Options, source: Source | None, last: bool) -> Stage:
    def run(binding: Sizes, background: Background) -> Made:
        if source is not None and not source.place(binding, options).exists():
            done = are_everywhere() and background.run_child(
                source.command(binding, options), patient=bool(options.tune)
            )
            if not done and options.tune:
                raise UnsupportedError("measuring needs a child process, and it failed")
        return _made(make(binding, options), options, last)

    return run


def _made(runner: Runner, options: Options, last: bool) -> Made:
    return Made(runner, note_of(options), last or serves_none(runner))


def note_of(options: Options) -> str:
    """What `explain` says of code that was compiled with these options."""
    return "tuned" if options.tune else "compiled without measuring"
