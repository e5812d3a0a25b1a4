"""`Session`: a compiled model that is ready to run. Checks inputs, binds the batch size, picks code for the shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError, LatheError, ModelError, SessionClosed, UnsupportedError, VerifyError
from lathe.core.feeds import check_feeds, feeds_from_call
from lathe.core.ir.dim import violated_assumption
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.plan.plan import Memory
from lathe.core.runtime.device.devices import HOST, loss_of
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.session.device_runs import DeviceRun, run_on_device, split_device_arrays
from lathe.core.runtime.session.executables import Shape, ShapeCache, ShapeCode, ShapeCompiler
from lathe.core.runtime.session.input_assumptions import InputAssumptions
from lathe.core.runtime.session.input_checks import InputChecks
from lathe.core.runtime.session.packed import Feed, LazyPacked, MakePacked, split_feeds
from lathe.core.runtime.session.prepared_calls import CallCache, Run
from lathe.core.runtime.session.profile import Profile, profile
from lathe.core.runtime.session.record import Record, run_recorded
from lathe.core.runtime.session.run_inputs import Binding, CodeBinding, RunInputs
from lathe.core.runtime.session.runner import Interruptible, Runner, Settling, batch_assumptions, memory_of, settle_all
from lathe.core.runtime.session.shadow_inputs import ShadowInputs
from lathe.core.runtime.session.variants import FedDefaults, Ranks, SessionCache, SizedSessions, Sizes, describe_size

_MAX_REFUSED = 64  # remembered ranks that the nodes do not take; at the limit, all of them are forgotten
_MAX_VARIANTS = 4  # cached sessions, each for one set of fed defaults or one choice of open ranks

# Each combination of sizes other than the batch size gets an executable; the least recently used are dropped.
_MAX_SHAPES = 8


_Choice = TypeVar("_Choice", FedDefaults, Ranks, Sizes)


@dataclass(frozen=True, slots=True)
class PackInfo:
    """Whether sequences of different lengths can share a run without padding (packing), and the reason.

    `tokens`: the most tokens of one run.
    """

    packable: bool
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Description:
    """Facts about a model that hold for all shapes: inputs, outputs, batching, packing, defaults."""

    name: str
    inputs: Mapping[str, ValueType]
    outputs: Mapping[str, ValueType]
    batching: BatchInfo
    max_batch: int
    packing: PackInfo | None = None  # None: compiled without `packing`
    may_not_end: bool = False  # a loop whose condition is data can go on for ever
    defaults: Mapping[str, ValueType] = field(default_factory=dict)  # inputs that a run may leave out
    any_size: CodeBinding = ()  # the sizes of dynamic-shape code by input symbol; empty if there is no such code
    in_parts: bool = False  # the dynamic-shape code is partitioned: references run between its parts
    size_inputs: tuple[str, ...] = ()  # inputs whose elements decide extents (`passes/proofs/size_inputs.py`)
    # The inputs as the model declares them, if `inputs` assumes more (`passes/proofs/assumptions.py`).
    declared: Mapping[str, ValueType] = field(default_factory=dict)

    @property
    def has_variants(self) -> bool:
        """Whether some runs need other code than the artifact's, which is compiled from the graph.

        These are runs that feed defaults, violate assumptions, choose ranks that the model leaves open, or feed size
        inputs.
        """
        return bool(self.defaults or self.declared or self.rankless or self.size_inputs)

    @property
    def rankless(self) -> tuple[str, ...]:
        """The inputs whose ranks the model leaves open."""
        types = self.inputs.items()
        return tuple(name for name, type_ in types if isinstance(type_, TensorType) and type_.shape is None)


def _refuse_shapes(binding: CodeBinding) -> ShapeCode:
    """Always raises UnsupportedError: the compiler of a session with fixed code, which has one set of shapes."""
    raise UnsupportedError(f"the model has one set of shapes, not {binding}")


def _refuse_declared() -> Session:
    raise UnsupportedError("the code assumes nothing about the inputs beyond what the model declares")


def _refuse_variant(fed: FedDefaults) -> Session:
    raise UnsupportedError(f"the model has no defaults {', '.join(sorted(fed))}")


def _refuse_sizes(sizes: Sizes) -> Session:
    raise UnsupportedError(f"the session has no code for the sizes {', '.join(name for name, *_ in sizes)}")


def _refuse_ranks(ranks: Ranks) -> Session:
    raise UnsupportedError(f"the session has no code for the ranks {dict(ranks)}")


class Session:
    """A compiled model. `run` may be called from any number of threads at once.

    `close`, or the end of a `with` block, frees the code and memory.
    """

    def __init__(
        self,
        description: Description,
        maker: ShapeCompiler | None = None,
        fixed: ShapeCode | None = None,
        packed: MakePacked | None = None,
        variant: Callable[[FedDefaults], Session] | None = None,
        declared: Callable[[], Session] | None = None,
        ranked: Callable[[Ranks], Session] | None = None,
        sized: Callable[[Sizes], Session] | None = None,
    ) -> None:
        """A session gets its code from one of two sources.

        `fixed` is the code of a model whose only symbol is the batch size. Otherwise `maker` compiles code for given
        values of the other symbols, and `packed` compiles code that takes packed sequences of all lengths. `variant`
        makes a session that takes some defaults as inputs, and compiles when it first runs. `declared` makes one for
        inputs that violate what the code assumes, `ranked` one for ranks that the model leaves open, `sized` one for
        the values of size inputs.
        """
        self.description = description
        self._shapes = ShapeCache(maker or ShapeCompiler(_refuse_shapes), _MAX_SHAPES, fixed)
        self._packed = LazyPacked(packed) if packed is not None else None
        self._variants = SessionCache(variant or _refuse_variant, _MAX_VARIANTS)
        self._declared: SessionCache[FedDefaults, Session] = SessionCache(lambda _: (declared or _refuse_declared)(), 1)
        self._ranked = SessionCache(ranked or _refuse_ranks, _MAX_VARIANTS)
        types = {name: description.inputs[name] for name in description.size_inputs if sized is not None}
        sizes = {name: type_ for name, type_ in types.items() if isinstance(type_, TensorType)}
        self._sized = SizedSessions(sized or _refuse_sizes, sizes)
        self._refused: set[Ranks] = set()
        self._rankless = description.rankless if ranked is not None else ()
        self._shadows = ShadowInputs(description.inputs)
        self._checks = InputChecks(description.inputs)
        self._assumed = InputAssumptions(description.declared, self.inputs) if description.declared else None
        self._closed = False
        self._is_fixed = fixed is not None
        self._output_names = tuple(description.outputs)
        self._calls = CallCache(description.inputs, self._output_names, description.batching.symbol)
        # If there is one set of shapes, its code decides: compilation may have unrolled the loops. Code for a fed
        # default may contain them again.
        by_code = any(_interruptible(fixed.executable)) if fixed is not None else True
        self.may_not_end = description.may_not_end and (by_code or bool(description.defaults))

    @property
    def inputs(self) -> Mapping[str, ValueType]:
        """Types of the inputs by name."""
        return self._shadows.caller_inputs

    @property
    def defaults(self) -> Mapping[str, ValueType]:
        """Types, by name, of further inputs that a run may leave out, because the model has values for them.

        In files of old exporters these may be all weights. The first run that feeds some of them compiles the model
        again.
        """
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
        """Whether `run_packed` takes sequences of different lengths; None if compiled without `packing`."""
        return self.description.packing

    @property
    def max_batch(self) -> int:
        return self.description.max_batch

    @property
    def memory(self) -> Memory | None:
        """The memory of the plan of the code for packed tokens, if that was used; otherwise of the shape used last.

        If no shape has code of its own, the memory of the dynamic-shape code; None before there is any code.
        """
        packed = self._packed.made if self._packed is not None else None
        if packed is not None:
            return packed.tokens.plan.memory
        executables = [*self._shapes.standing(), *self._shapes.cached_runners().values()]
        return memory_of(executables[-1]) if executables else None

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices besides the host that run parts of the model ("cuda:0"), for the shapes compiled so far."""
        made = [share.device for runner in self._shapes.cached_runners().values() for share in runner.shares]
        others = [device for session in self._other_sessions() for device in session.devices]
        return tuple(dict.fromkeys(device for device in [*made, *others] if device != HOST))

    @property
    def lost(self) -> str:
        """Why every run raises DeviceLost: what happened to a device of `devices`; "" while all devices work.

        After this session and all others on the device are closed, a new session may run there again.
        """
        return next(filter(None, map(loss_of, self.devices)), "")

    def run(self, feeds: Mapping[str, Any], record: Record | None = None) -> dict[str, Any]:
        """Outputs by name for inputs by name, as NumPy arrays.

        The outputs are new arrays; ONNX sequences are lists, and absent optionals None. A default that is fed replaces
        the model's own value for this run. `record` is called with each kernel that ran and its begin and end
        (`lathe.core.runtime.session.record.KernelRun`).

        FeedError when an input is missing, unknown, does not fit its type, or is refused by a node, and when a batch is
        too large for the memory; SessionClosed after `close`; Interrupted after `interrupt`; DeviceError if a device
        fails. A run that compiles code may raise the errors of `lathe.compile`.
        """
        try:
            if self._sized.names and (sizes := self._sized.choice(feeds)):
                return self._run_sized(sizes, feeds, record)
            whole = self._shadows.beside(feeds)
            if record is None and (results := self._calls.run(whole)) is not None:
                return results
            if fed := self._fed_defaults(feeds):
                return self._run_variant(self._variants, fed, feeds, record)
            if self._violates_assumptions(feeds):
                return self._run_variant(self._declared, frozenset(), feeds, record)
            if ranks := self._open_ranks(feeds):
                return self._run_variant(self._ranked, ranks, feeds, record)
            n, arrays, binding = self._bind(whole)
        except (AttributeError, TypeError):
            check_feeds(feeds, self.inputs)  # only on errors: on every run it would cost a part of a microsecond
            raise
        if self._packed is not None and (feed := self._packed_feed(n, arrays, binding)).tokens:
            return self._packed.get().run([feed], record)[0]
        return dict(zip(self._output_names, self._run(RunInputs(n, arrays, binding, record)), strict=True))

    def __call__(self, /, *arrays: Any, **named: Any) -> Any:
        """Run with one array, for a model with one input, or with arrays by the names of the inputs.

        Returns the output, or a mapping from names to outputs unless the model has exactly one. Errors as for `run`;
        FeedError also for a mapping, and for an array without a name unless it is the only argument for the only input.
        """
        results = self.run(feeds_from_call(self.inputs, arrays, named))
        return next(iter(results.values())) if len(results) == 1 else results

    def run_on_device(self, feeds: Mapping[str, Any]) -> DeviceRun:
        """As `run`, but the outputs stay in the GPU's memory, and inputs may be arrays there.

        An input may be any object with a CUDA Array Interface, such as a tensor of PyTorch on the session's GPU, or a
        NumPy array. The run waits for the stream that the interface names; for an object that names none, for the
        default stream. The caller closes the result: at most two may be open, and further runs wait.

        UnsupportedError unless all nodes run on one GPU, by code for the declared inputs. Otherwise the errors of
        `run`.
        """
        given, whole = split_device_arrays(feeds)
        sizes = self._sized.names or self._shadows.sources & given.keys()
        if sizes or self._fed_defaults(whole) or self._violates_assumptions(whole) or self._open_ranks(whole):
            raise UnsupportedError("run_on_device runs the code for the declared inputs, and these need other code")
        n, arrays, binding = self._bind(self._shadows.beside(whole))
        with ExitStack() as ending:
            executable = ending.enter_context(self._executable(binding))
            if reason := violated_assumption(batch_assumptions(executable), {"n": n}):
                raise UnsupportedError(reason)
            feed = dict(zip(self.description.inputs, arrays, strict=True)) | given
            outputs = run_on_device(executable, n, list(feed.values()), self._output_names, ending)
            return DeviceRun(outputs, ending.pop_all().close)

    def run_packed(self, feeds: Sequence[Mapping[str, Any]], record: Record | None = None) -> list[dict[str, Any]]:
        """The outputs by name for each of many feeds, whose sequences may have different lengths.

        The results are those of `run` for each feed, computed together without padding. If a feed has defaults, has no
        token, or violates what the code assumes, each feed runs by itself. `record`: as for `run`.

        UnsupportedError if the model was compiled without `packing` or cannot be packed; otherwise the errors of `run`.
        """
        if self._packed is None:
            reason = self.packing.reason if self.packing is not None else "it was compiled without `packing`"
            raise UnsupportedError(f"model {self.description.name} does not pack sequences: {reason}")
        for feed in feeds:
            check_feeds(feed, self.inputs)
        # Feeds with defaults, or outside the assumptions, need code of their own.
        if any(self._fed_defaults(feed) or self._violates_assumptions(feed) for feed in feeds):
            return [self.run(feed, record) for feed in feeds]
        bound = [self._packed_feed(*self._bind(feed)) for feed in feeds]
        if not all(feed.tokens for feed in bound):  # a feed without tokens cannot be packed
            return [self.run(feed, record) for feed in feeds]
        return self._packed.get().run(bound, record)

    def _packed_feed(self, n: int, arrays: list[NDArray[Any]], binding: Binding) -> Feed:
        """The inputs of one caller for packed code; the only symbol besides the batch is the sequence length."""
        return Feed(dict(zip(self.inputs, arrays, strict=True)), n, binding[0][1])

    def _fed_defaults(self, feeds: Mapping[str, Any]) -> FedDefaults:
        """The names in `feeds` of inputs that have defaults."""
        return frozenset(feeds.keys() & self.defaults.keys()) if self.defaults else frozenset()

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether inputs of these shapes are as the code assumes, beyond what the model declares.

        Inputs that violate the assumptions run on code of their own, and never share a batch with other rows. True also
        if an input is missing or has another rank than declared: `run` refuses those.
        """
        return self._assumed is None or self._assumed.fits(shapes)

    def _violates_assumptions(self, feeds: Mapping[str, Any]) -> bool:
        """Whether the feeds violate what the code assumes."""
        if self._assumed is None:
            return False
        return not self._assumed.fits({name: np.shape(feed) for name, feed in feeds.items()})

    def _open_ranks(self, feeds: Mapping[str, Any]) -> Ranks:
        """The ranks that `feeds` give to the inputs whose ranks the model leaves open.

        Empty if there are no such inputs, if one is missing, or if the nodes do not accept these ranks. Otherwise there
        is a session for these ranks afterwards.
        """
        if not self._rankless or any(name not in feeds for name in self._rankless):
            return ()
        ranks = tuple((name, np.ndim(feeds[name])) for name in self._rankless)
        if ranks not in self._refused:
            try:
                self._ranked.get(ranks)
                return ranks
            except SessionClosed:
                raise
            except LatheError:  # the nodes do not take these ranks: the references report what is wrong
                if len(self._refused) >= _MAX_REFUSED:
                    self._refused.clear()
                self._refused.add(ranks)
        return ()

    def _other_sessions(self) -> list[Session]:
        """The sessions that exist now for runs with other inputs."""
        kinds = (
            self._variants.cached_sessions(),
            self._declared.cached_sessions(),
            self._ranked.cached_sessions(),
            self._sized.sessions.cached_sessions(),
        )
        return [session for made in kinds for session in made.values()]

    def _run_variant(
        self, variants: SessionCache[_Choice, Session], choice: _Choice, feeds: Mapping[str, Any], record: Record | None
    ) -> dict[str, Any]:
        while True:
            with suppress(SessionClosed):  # the cache evicted and closed it just now, or this session is closed, too
                return variants.get(choice).run(feeds, record)
            if self._closed:
                raise SessionClosed("the session is closed")

    def _run_sized(self, sizes: Sizes, feeds: Mapping[str, Any], record: Record | None) -> dict[str, Any]:
        """The outputs of the session for these values of the size inputs; FeedError if the model does not fit them."""
        try:
            return self._run_variant(self._sized.sessions, sizes, self._sized.others(feeds), record)
        except (VerifyError, UnsupportedError):
            raise
        except ModelError as error:  # the caller chose the sizes, such as those of an output larger than the memory
            fed = ", ".join(map(describe_size, sizes))
            raise FeedError(f"inputs with {fed} do not fit the model: {error}") from error

    def _run(self, given: RunInputs) -> list[Any]:
        """The outputs in the model's order, by the code of this shape, or by the stand-in for shapes without code.

        If that code does not serve the batch size, code for just this batch size runs.
        """
        with self._shapes.enter(given.binding, given.earlier_runs) as shape:
            results = self._shapes.stand_in_answer(shape, given)
            if results is not None:
                self._remember_stand_in(shape, given)
                return results
            with self._code_of(shape) as executable:
                reason = violated_assumption(batch_assumptions(executable), {"n": given.rows})
                if not reason and given.record is not None:
                    return run_recorded(executable, given.rows, given.arrays, given.record)
                if not reason:
                    results = executable.run(given.rows, given.arrays)
                    every = not given.binding and not batch_assumptions(executable)
                    self._calls.keep(given.arrays, given.rows, executable, shape, partial(_call_of, executable), every)
                    return results
        alone = self._bind_batch(given.rows, given.binding, reason)
        return self._run(replace(given, binding=alone, earlier_runs=shape.runs_by_rows.get(given.rows, 0)))

    def _remember_stand_in(self, shape: Shape, given: RunInputs) -> None:
        """Register the stand-in in the call cache, so that further runs of these sizes take the short path."""
        run = self._shapes.stand_in_call(shape, given) if shape.standing is not None else None
        if run is not None and shape.standing is not None:
            self._calls.keep(given.arrays, given.rows, shape.standing, shape, lambda n: run, False)

    def profile(self, feeds: Mapping[str, Any], runs: int = 10) -> Profile:
        """The median time of every step over `runs` runs, with the least time that this machine needs (roofline).

        Of packed code only the code for tokens is measured. The runs, and one before them, update the model's states.
        Errors as for `run`.
        """
        if self._sized.names and (sizes := self._sized.choice(feeds)):
            return self._sized.sessions.get(sizes).profile(self._sized.others(feeds), runs)
        if fed := self._fed_defaults(feeds):
            return self._variants.get(fed).profile(feeds, runs)
        if self._violates_assumptions(feeds):
            return self._declared.get(frozenset()).profile(feeds, runs)
        if ranks := self._open_ranks(feeds):
            return self._ranked.get(ranks).profile(feeds, runs)
        n, arrays, binding = self._bind(self._shadows.beside(feeds))
        if self._packed is not None and (feed := self._packed_feed(n, arrays, binding)).tokens:
            packed = self._packed.get()
            return profile(packed.tokens, *packed.arrays([feed], split_feeds([feed], n * feed.length)), runs)
        with self._executable(binding) as executable:
            reason = violated_assumption(batch_assumptions(executable), {"n": n})
            if not reason:
                return profile(executable, n, arrays, runs)
        with self._executable(self._bind_batch(n, binding, reason)) as executable:
            return profile(executable, n, arrays, runs)

    def explain(self, batch: int = 1) -> str:
        """A report for people about a batch of `batch` rows.

        It names what the passes did, the kernel of each node and its share of the work, the nodes that fall back to the
        reference and why, and the memory. For packed code, `batch` is a number of tokens; that code is compiled now if
        it was not yet.
        """
        lines = [f"model {self.description.name}"]
        lines.append(f"batching: {'yes' if self.batching.batchable else 'no'} - {self.batching.reason}")
        lines += self._explain_packing(batch)
        states, executables = self._shapes.states(), self._shapes.cached_runners()
        if not states and self._packed is None:
            lines.append("no shapes seen yet: the model is compiled for each combination of its other dimensions")
        for binding, state in states.items():
            if state:
                lines.append(f"for {', '.join(f'{name}={value}' for name, value in binding) or 'all shapes'}: {state}")
            if binding in executables:
                lines += executables[binding].explain(batch)
        for runner in self._shapes.standing():
            lines += ["dynamic-shape code:", *runner.explain(batch)]
        if failure := self._shapes.stand_in_failure():
            lines.append(f"no dynamic-shape code, so each shape is compiled separately: {failure}")
        for fed, session in self._variants.cached_sessions().items():
            lines += [f"with {', '.join(sorted(fed))} fed:", session.explain(batch)]
        for ranks, session in self._ranked.cached_sessions().items():
            lines += [f"for {', '.join(f'{name} of rank {rank}' for name, rank in ranks)}:", session.explain(batch)]
        for sizes, session in self._sized.sessions.cached_sessions().items():
            lines += [f"with {', '.join(map(describe_size, sizes))}:", session.explain(batch)]
        for session in self._declared.cached_sessions().values():
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
            lines += ["code for whole sequences:", *packed.sequences.explain(1)]
        return lines

    def prepare(self) -> None:
        """Load the stand-in for shapes without code of their own, so that the first run does not have to.

        No effect unless there is a stand-in, and it is in the cache.
        """
        self._shapes.prepare()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is compiled, tuned or captured in the background.

        False if that takes longer than `timeout` seconds altogether.
        """
        return settle_all(self._settling(), timeout)

    def _settling(self) -> Iterator[Settling]:
        """Yield what may have background work. Settling the shapes may make further runners."""
        yield self._shapes
        yield from self._shapes.cached_runners().values()
        yield from self._other_sessions()

    def runs(self) -> dict[int, int]:
        """The number of each run in flight by thread identifier; empty unless the session `may_not_end`.

        No two runs of a process have the same number. One call of `run` may take several of them, one after the other.
        """
        return {thread: run for host in self._interruptible() for thread, run in host.runs().items()}

    def interrupt(self, run: int | None = None) -> None:
        """Interrupt run number `run` (see `runs`), or all current runs.

        The run raises Interrupted at the next iteration of a loop. No effect if it has ended. A call of `run` may start
        another run afterwards, so callers repeat this until the call returns.
        """
        for host in self._interruptible():
            host.interrupt(run)

    def _interruptible(self) -> list[Interruptible]:
        """The code whose runs may go on for ever, also code that better code has replaced but runs still use."""
        packed = self._packed.made if self._packed is not None else None
        runners = [*self._shapes.runners(), *(packed.runners if packed is not None else ())]
        own = [host for runner in runners for host in _interruptible(runner)]
        caches = (self._variants, self._declared, self._ranked, self._sized.sessions)
        variants = [session for cache in caches for session in cache.alive()]
        return own + [host for session in variants for host in session._interruptible()]

    def close(self) -> None:
        """Stop the background work. New runs raise SessionClosed; memory is freed once runs in flight have ended.

        Kills compilations in child processes. Waits for those in this process, one after the other, at most 30 seconds
        for each.
        """
        self._closed = True
        self._calls.close()
        self._shapes.close()
        if self._packed is not None:
            self._packed.close()
        self._variants.close()
        self._declared.close()
        self._ranked.close()
        self._sized.sessions.close()

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
        if reason := violated_assumption(self.batching.supposed, values):
            return self._single_batch(values, reason), arrays, tuple(sorted(values.items()))
        n = values.pop(self.batching.symbol, 1) if self.batching.symbol else 1
        return n, arrays, others

    def _bind_batch(self, n: int, binding: Binding, reason: str) -> Binding:
        """The values of all symbols, with the batch size `n` among them, for code that serves just this batch size.

        `reason`: why other code does not fit. FeedError if the session cannot compile such code.
        """
        values = {**dict(binding), self.batching.symbol or "": n}
        self._single_batch(values, reason)
        return tuple(sorted(values.items()))

    def _single_batch(self, values: Mapping[str, int], reason: str) -> int:
        """The batch size in `values`, for a run whose code is compiled for just that batch size.

        FeedError, which gives `reason`, if the session cannot compile such code.
        """
        n = values[self.batching.symbol or ""]
        if self._is_fixed or self._packed is not None:
            raise FeedError(f"a batch of {n} does not fit the model: {reason}")
        return n

    @contextmanager
    def _executable(self, binding: CodeBinding) -> Iterator[Runner]:
        with self._shapes.enter(binding) as shape, self._code_of(shape) as executable:
            yield executable

    @contextmanager
    def _code_of(self, shape: Shape) -> Iterator[Runner]:
        """As `ShapeCache.executable`, but FeedError if compiling shows that the fed sizes do not fit the model."""
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


def _interruptible(runner: Runner) -> list[Interruptible]:
    """The parts of a runner on the host whose runs may go on for ever."""
    return [host for host in runner.hosts if host.may_not_end]
