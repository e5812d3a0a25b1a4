"""`Session`: a model ready to run. Checks feeds, finds the batch size, and picks the executable for their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from core.errors import FeedError, LatheError, ModelError, SessionClosed, UnsupportedError, VerifyError
from core.feeds import check_feeds, feeds_of
from core.ir.dim import Dim, broken
from core.ir.types import TensorType, ValueType
from core.plan.plan import Memory
from core.runtime.assumed import Assumed
from core.runtime.call import Calls, Run
from core.runtime.checked import Checks
from core.runtime.devices import HOST, loss_of
from core.runtime.executable import Executable
from core.runtime.given import Binding, Given, Sizes, is_any_size
from core.runtime.packed import Feed, LazyPacked, MakePacked, items_of
from core.runtime.profile import Profile, profile
from core.runtime.record import Record, run_recorded
from core.runtime.runner import Endless, Runner, memory_of, supposed_by
from core.runtime.shadows import ShadowInputs
from core.runtime.shapes import Made, Maker, Shape, Shapes
from core.runtime.variants import Fed, Ranks, Variants

_REFUSED = 64  # choices of ranks that nodes do not take; when there are more, they are forgotten together
_VARIANTS = 4  # sessions of other choices of the defaults that are fed, or of open ranks

# Shapes beyond the batch size get an executable each; the ones not used for longest are dropped.
_SPECIALISATIONS = 8


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Whether rows of different callers may share a run, and why (not).

    `supposed`: the code for all batch sizes is right as long as none of these dimensions is negative. Others get code
    for just that size.
    """

    batchable: bool
    reason: str
    symbol: str | None = None
    supposed: tuple[Dim, ...] = ()

    @property
    def divisible(self) -> bool:
        """Whether a batch may run in pieces of any size."""
        return self.batchable and not self.supposed

    def of(self, sizes: Sizes) -> BatchInfo:
        """What holds of the code for these sizes: that for any sizes has no `n` that counts rows."""
        return BatchInfo(False, "the rows are one of the sizes") if is_any_size(sizes) else self


_Choice = TypeVar("_Choice", Fed, Ranks)


@dataclass(frozen=True, slots=True)
class PackInfo:
    """Whether sequences of different lengths share a run, their tokens one after the other, and why (not). `tokens`:
    the most of a run."""

    packable: bool
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Description:
    """What a session says about its model, whatever shapes it runs with."""

    name: str
    inputs: Mapping[str, ValueType]
    outputs: Mapping[str, ValueType]
    batching: BatchInfo
    max_batch: int
    packing: PackInfo | None = None  # None: nobody asked for it
    may_not_end: bool = False  # data can make a run of some shapes go on for ever
    defaults: Mapping[str, ValueType] = field(default_factory=dict)  # inputs that a run may leave out
    any_size: Sizes = ()  # what the symbols of the inputs are in code for any sizes; empty where there is none
    in_parts: bool = False  # that code is in parts, with references between them
    # The inputs as the model declares them, where `inputs` assumes more (`passes/assumptions.py`).
    declared: Mapping[str, ValueType] = field(default_factory=dict)

    @property
    def has_variants(self) -> bool:
        """Whether some runs need other code, which is made of the graph."""
        return bool(self.defaults or self.declared or self.rankless)

    @property
    def rankless(self) -> tuple[str, ...]:
        """The inputs whose ranks the model leaves open."""
        types = self.inputs.items()
        return tuple(name for name, type_ in types if isinstance(type_, TensorType) and type_.shape is None)


def _one_set_of_shapes(binding: Sizes) -> Made:
    """What a session with a fixed executable would be asked for by mistake."""
    raise UnsupportedError(f"the model has one set of shapes, not {binding}")


def _nothing_assumed() -> Session:
    raise UnsupportedError("the code assumes nothing of the inputs that the model does not declare")


def _no_variant(fed: Fed) -> Session:
    raise UnsupportedError(f"the model has no defaults {', '.join(sorted(fed))}")


def _no_ranks(ranks: Ranks) -> Session:
    raise UnsupportedError(f"the session has no code for the ranks {dict(ranks)}")


class Session:
    """A compiled model. `run` may be called from any number of threads at once."""

    def __init__(
        self,
        description: Description,
        maker: Maker | None = None,
        fixed: Made | None = None,
        packed: MakePacked | None = None,
        variant: Callable[[Fed], Session] | None = None,
        declared: Callable[[], Session] | None = None,
        ranked: Callable[[Ranks], Session] | None = None,
    ) -> None:
        """`fixed` is the code of a model without other symbols; else `maker` gives it for their values, and `packed`,
        where sequences can be packed, for all of them. `variant` gives a session that takes some defaults as inputs,
        and compiles when it runs; `declared` one for inputs that do not fit what the code assumes of them; `ranked` one
        for ranks that the model leaves open."""
        self.description = description
        self._shapes = Shapes(maker or Maker(_one_set_of_shapes), _SPECIALISATIONS, fixed)
        self._packed = LazyPacked(packed) if packed is not None else None
        self._variants = Variants(variant or _no_variant, _VARIANTS)
        self._declared: Variants[Fed, Session] = Variants(lambda _: (declared or _nothing_assumed)(), 1)
        self._ranked = Variants(ranked or _no_ranks, _VARIANTS)
        self._refused: set[Ranks] = set()
        self._rankless = description.rankless if ranked is not None else ()
        self._shadows = ShadowInputs(description.inputs)
        self._checks = Checks(description.inputs)
        self._assumed = Assumed(description.declared, self.inputs) if description.declared else None
        self._closed = False
        self._is_fixed = fixed is not None
        self._output_names = tuple(description.outputs)
        self._calls = Calls(description.inputs, self._output_names, description.batching.symbol)
        # Of a model with one set of shapes its code knows best: loops may have been unrolled. A default that is fed may
        # bring them back.
        by_code = any(_endless(fixed.executable)) if fixed is not None else True
        self.may_not_end = description.may_not_end and (by_code or bool(description.defaults))

    @property
    def inputs(self) -> Mapping[str, ValueType]:
        """Types of the inputs by name."""
        return self._shadows.callers

    @property
    def defaults(self) -> Mapping[str, ValueType]:
        """Types, by name, of further inputs that a run may leave out: the model has values for them. Of old models
        these may be all weights. The first run that feeds some of them compiles the model once more."""
        return self.description.defaults

    @property
    def outputs(self) -> Mapping[str, ValueType]:
        """Types of the outputs by name."""
        return self.description.outputs

    @property
    def batching(self) -> BatchInfo:
        return self.description.batching

    @property
    def packing(self) -> PackInfo | None:
        """Whether `run_packed` takes sequences of different lengths; None where nobody asked for it."""
        return self.description.packing

    @property
    def max_batch(self) -> int:
        return self.description.max_batch

    @property
    def memory(self) -> Memory | None:
        """What the plan needs: of the shape used last, else of code for any sizes. None before there is any code."""
        packed = self._packed.made if self._packed is not None else None
        if packed is not None:
            return packed.tokens.plan.memory
        executables = [*self._shapes.standing(), *self._shapes.made().values()]
        return memory_of(executables[-1]) if executables else None

    @property
    def devices(self) -> tuple[str, ...]:
        """What runs parts of the model besides the host ("cuda:0"), as far as its shapes are known."""
        made = [share.device for runner in self._shapes.made().values() for share in runner.shares]
        others = [device for session in self._others() for device in session.devices]
        return tuple(dict.fromkeys(device for device in [*made, *others] if device != HOST))

    @property
    def lost(self) -> str:
        """Why every run raises DeviceLost from now on: what happened to a device of `devices`; "" while all work. A
        session that is made after this one and all others on the device are closed may run there again."""
        return next(filter(None, map(loss_of, self.devices)), "")

    def run(self, feeds: Mapping[str, Any], record: Record | None = None) -> dict[str, Any]:
        """Outputs by name for inputs by name, as NumPy arrays. `record`, when given, is called with
        each kernel that ran, its begin and end (`core.runtime.record.KernelRun`).

        A default that is fed takes the place of the model's own value, for this run.

        FeedError when an input is missing, unknown, or does not fit its type; SessionClosed after `close`.
        """
        try:
            whole = self._shadows.beside(feeds)
            if record is None and (results := self._calls.run(whole)) is not None:
                return results
            if fed := self._fed(feeds):
                return self._run_variant(self._variants, fed, feeds, record)
            if self._strays(feeds):
                return self._run_variant(self._declared, frozenset(), feeds, record)
            if ranks := self._ranks(feeds):
                return self._run_variant(self._ranked, ranks, feeds, record)
            n, arrays, binding = self._bind(whole)
        except (AttributeError, TypeError):
            check_feeds(feeds, self.inputs)  # only now: it would cost every run a part of a microsecond
            raise
        if self._packed is not None and (feed := self._feed(n, arrays, binding)).tokens:
            return self._packed.get().run([feed], record)[0]
        return dict(zip(self._output_names, self._run(n, arrays, binding, record), strict=True))

    def __call__(self, /, *arrays: Any, **named: Any) -> Any:
        """Run with one array, for a model with one input, or with arrays by the names of the inputs. Returns the
        output, or a mapping from names to outputs where there are several.

        FeedError as of `run`, and for an array without a name where a model takes several inputs.
        """
        results = self.run(feeds_of(self.inputs, arrays, named))
        return next(iter(results.values())) if len(results) == 1 else results

    def run_packed(self, feeds: Sequence[Mapping[str, Any]], record: Record | None = None) -> list[dict[str, Any]]:
        """The outputs for each of many feeds, whose sequences may be of different lengths: what `run` would give for
        each of them, computed together without padding. `record`: as of `run`.

        UnsupportedError where the model was not compiled with `packing`, or cannot be packed; else as `run`.
        """
        if self._packed is None:
            reason = self.packing.reason if self.packing is not None else "it was compiled without `packing`"
            raise UnsupportedError(f"model {self.description.name} does not pack sequences: {reason}")
        for feed in feeds:
            check_feeds(feed, self.inputs)
        if any(self._fed(feed) or self._strays(feed) for feed in feeds):  # each with code of its own
            return [self.run(feed, record) for feed in feeds]
        bound = [self._feed(*self._bind(feed)) for feed in feeds]
        if not all(feed.tokens for feed in bound):  # an empty one has nothing to be packed
            return [self.run(feed, record) for feed in feeds]
        return self._packed.get().run(bound, record)

    def _feed(self, n: int, arrays: list[NDArray[Any]], binding: Binding) -> Feed:
        """Of a model that packs: the only other dimension is the length."""
        return Feed(dict(zip(self.inputs, arrays, strict=True)), n, binding[0][1])

    def _fed(self, feeds: Mapping[str, Any]) -> Fed:
        """The defaults among the feeds."""
        return frozenset(feeds.keys() & self.defaults.keys()) if self.defaults else frozenset()

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether inputs of these shapes are as the code assumes, beyond what the model declares. Others run by code of
        their own, and share it with no other rows. Inputs that do not fit the model at all fit here."""
        return self._assumed is None or self._assumed.fits(shapes)

    def _strays(self, feeds: Mapping[str, Any]) -> bool:
        """Whether feeds do not fit what the code assumes."""
        if self._assumed is None:
            return False
        return not self._assumed.fits({name: np.shape(feed) for name, feed in feeds.items()})

    def _ranks(self, feeds: Mapping[str, Any]) -> Ranks:
        """The ranks of the inputs that the model leaves open; empty where there is no code for those."""
        if not self._rankless or any(name not in feeds for name in self._rankless):
            return ()
        ranks = tuple((name, np.ndim(feeds[name])) for name in self._rankless)
        if ranks not in self._refused:
            try:
                self._ranked.get(ranks)
                return ranks
            except SessionClosed:
                raise
            except LatheError:  # the nodes do not take them: the references say what is wrong
                if len(self._refused) >= _REFUSED:
                    self._refused.clear()
                self._refused.add(ranks)
        return ()

    def _others(self) -> list[Session]:
        """The sessions that there are for runs with other inputs."""
        kinds = (self._variants.made(), self._declared.made(), self._ranked.made())
        return [session for made in kinds for session in made.values()]

    def _run_variant(
        self, variants: Variants[_Choice, Session], choice: _Choice, feeds: Mapping[str, Any], record: Record | None
    ) -> dict[str, Any]:
        while True:
            with suppress(SessionClosed):  # too many others came in this moment; or this session is closed, too
                return variants.get(choice).run(feeds, record)
            if self._closed:
                raise SessionClosed("the session is closed")

    def _run(self, n: int, arrays: list[NDArray[Any]], binding: Binding, record: Record | None) -> list[Any]:
        """By the code of this shape, or by what stands in while that is being made."""
        given = Given(n, arrays, binding, record)
        with self._shapes.enter(binding) as shape:
            results = self._shapes.meanwhile(shape, given)
            if results is not None:
                self._keep_standing(shape, given)
                return results
            with self._code(shape) as executable:
                reason = broken(supposed_by(executable), {"n": n})
                if not reason and record is not None:
                    return run_recorded(executable, n, arrays, record)
                if not reason:
                    results = executable.run(n, arrays)
                    every = not binding and not supposed_by(executable)
                    self._calls.keep(arrays, n, executable, shape, partial(_call_of, executable), every)
                    return results
        return self._run(n, arrays, self._apart(n, binding, reason), record)

    def _keep_standing(self, shape: Shape, given: Given) -> None:
        """Have further runs of these sizes take the short way to what stands in for code of their own."""
        run = self._shapes.standing_call(shape, given) if shape.standing is not None else None
        if run is not None and shape.standing is not None:
            self._calls.keep(given.arrays, given.rows, shape.standing, shape, lambda n: run, False)

    def profile(self, feeds: Mapping[str, Any], runs: int = 10) -> Profile:
        """Median time of every step over some runs, beside the least time that this machine would need."""
        if fed := self._fed(feeds):
            return self._variants.get(fed).profile(feeds, runs)
        if self._strays(feeds):
            return self._declared.get(frozenset()).profile(feeds, runs)
        if ranks := self._ranks(feeds):
            return self._ranked.get(ranks).profile(feeds, runs)
        n, arrays, binding = self._bind(self._shadows.beside(feeds))
        if self._packed is not None and (feed := self._feed(n, arrays, binding)).tokens:
            packed = self._packed.get()
            return profile(packed.tokens, *packed.arrays([feed], items_of([feed], n * feed.length)), runs)
        with self._executable(binding) as executable:
            reason = broken(supposed_by(executable), {"n": n})
            if not reason:
                return profile(executable, n, arrays, runs)
        with self._executable(self._apart(n, binding, reason)) as executable:
            return profile(executable, n, arrays, runs)

    def explain(self, batch: int = 1) -> str:
        """What the passes did, which kernel runs each node and how much of the work that is for a batch of so many
        rows, what falls back and why, and the memory it takes."""
        lines = [f"model {self.description.name}"]
        lines.append(f"batching: {'yes' if self.batching.batchable else 'no'} - {self.batching.reason}")
        lines += self._explain_packing(batch)
        states, executables = self._shapes.states(), self._shapes.made()
        if not states and self._packed is None:
            lines.append("no shapes seen yet: the model is compiled for each combination of its other dimensions")
        for binding, state in states.items():
            if state:
                lines.append(f"for {', '.join(f'{name}={value}' for name, value in binding) or 'all shapes'}: {state}")
            if binding in executables:
                lines += executables[binding].explain(batch)
        for runner in self._shapes.standing():
            lines += ["code for any sizes:", *runner.explain(batch)]
        for fed, session in self._variants.made().items():
            lines += [f"with {', '.join(sorted(fed))} fed:", session.explain(batch)]
        for ranks, session in self._ranked.made().items():
            lines += [f"for {', '.join(f'{name} of rank {rank}' for name, rank in ranks)}:", session.explain(batch)]
        for session in self._declared.made().values():
            lines += ["with inputs as the model declares them:", session.explain(batch)]
        return "\n".join(lines)

    def _explain_packing(self, tokens: int) -> list[str]:
        if self.packing is None:
            return []
        lines = [f"packing: {'yes' if self.packing.packable else 'no'} - {self.packing.reason}"]
        packed = self._packed.get() if self._packed is not None else None
        if packed is None:
            return lines
        lines += [f"tokens, at most {self.packing.tokens} in a run:", *packed.tokens.explain(tokens)]
        if packed.sequences is not None:
            lines += ["what is computed of whole sequences:", *packed.sequences.explain(1)]
        return lines

    def prepare(self) -> None:
        """Load what answers for shapes without code of their own, if it is kept somewhere: the first run need not."""
        self._shapes.prepare()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is compiled, tuned or captured in the background; whether that was so within `timeout`
        seconds."""
        own = self._shapes.settle(timeout) and all(each.settle(timeout) for each in self._shapes.made().values())
        return own and all(session.settle(timeout) for session in self._others())

    def runs(self) -> dict[int, int]:
        """Where `may_not_end`: which run goes on now in which thread (its identifier). No two runs of a process have
        the same number. One call of `run` may take several, one after the other."""
        return {thread: run for host in self._endless() for thread, run in host.runs().items()}

    def interrupt(self, run: int | None = None) -> None:
        """Break off this run (see `runs`), or all under way: at the next round of a loop it raises Interrupted.
        Nothing happens where it has ended. Whoever wants it to end asks again until it has."""
        for host in self._endless():
            host.interrupt(run)

    def _endless(self) -> list[Endless]:
        """What runs that may not end, also where better code has taken its place meanwhile."""
        packed = self._packed.made if self._packed is not None else None
        runners = [*self._shapes.runners(), *(packed.runners if packed is not None else ())]
        own = [host for runner in runners for host in _endless(runner)]
        variants = [*self._variants.alive(), *self._declared.alive(), *self._ranked.alive()]
        return own + [host for session in variants for host in session._endless()]

    def close(self) -> None:
        """End what goes on in the background; free code and memory as soon as the runs in flight have ended."""
        self._closed = True
        self._calls.close()
        self._shapes.close()
        if self._packed is not None:
            self._packed.close()
        self._variants.close()
        self._declared.close()
        self._ranked.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- feeds ----------------------------------------------------------------------------------------------------

    def _bind(self, feeds: Mapping[str, Any]) -> tuple[int, list[NDArray[Any]], Binding]:
        if self._closed:
            raise SessionClosed("the session is closed")
        for name in feeds.keys() - self.description.inputs.keys():
            optional = f", and may take {len(self.defaults)} more (Session.defaults)" if self.defaults else ""
            raise FeedError(f"unknown input '{name}'; the model has {', '.join(self.inputs) or 'none'}{optional}")
        arrays, values = self._checks.of(feeds)
        others = tuple(sorted((name, value) for name, value in values.items() if name != self.batching.symbol))
        if reason := broken(self.batching.supposed, values):
            return self._alone(values, reason), arrays, tuple(sorted(values.items()))
        n = values.pop(self.batching.symbol, 1) if self.batching.symbol else 1
        return n, arrays, others

    def _apart(self, n: int, binding: Binding, reason: str) -> Binding:
        """What code for a batch of just `n` rows is bound to. `reason`: why other code does not fit."""
        values = {**dict(binding), self.batching.symbol or "": n}
        self._alone(values, reason)
        return tuple(sorted(values.items()))

    def _alone(self, values: Mapping[str, int], reason: str) -> int:
        """The batch size of a run that needs code of its own, where the batch symbol is one of those that are bound.
        FeedError where there is none but the one code."""
        n = values[self.batching.symbol or ""]
        if self._is_fixed or self._packed is not None:
            raise FeedError(f"a batch of {n} does not fit the model: {reason}")
        return n

    @contextmanager
    def _executable(self, binding: Sizes) -> Iterator[Runner]:
        with self._shapes.enter(binding) as shape, self._code(shape) as executable:
            yield executable

    @contextmanager
    def _code(self, shape: Shape) -> Iterator[Runner]:
        """As `Shapes.executable`. FeedError where the sizes that were fed turn out not to fit the model."""
        with ExitStack() as stack:
            try:
                executable = stack.enter_context(self._shapes.executable(shape))
            except ModelError as error:
                if not shape.binding or isinstance(error, VerifyError | UnsupportedError):
                    raise
                rows = dict(shape.binding).get(self.batching.symbol or "")
                sizes = ", ".join(f"{name} = {value}" for name, value in shape.binding)
                fed = f"inputs with {sizes} do" if rows is None else f"a batch of {rows} does"
                raise FeedError(f"{fed} not fit the model: {error}") from error
            yield executable


def _call_of(runner: Runner, n: int) -> Run:
    return runner.call(n) if isinstance(runner, Executable) else partial(runner.run, n)


def _endless(runner: Runner) -> list[Endless]:
    """The parts of a run that may go on for ever."""
    return [host for host in runner.hosts if host.may_not_end]
