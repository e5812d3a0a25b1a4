"""What the data path needs of a loaded model, whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from server.types import Fits, Tensors, TensorSpec


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory in bytes: from loading to closing, and of each batch while it runs."""

    weights: int
    run: int


class LoadedModel(Protocol):
    """A model in memory.

    ``batchable`` says that rows along the leading axis of every input and output are independent, so that the
    requests of different callers may share one execution; ``batch_reason`` says why or why not.
    """

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def batchable(self) -> bool: ...
    @property
    def batch_reason(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def platform(self) -> str: ...

    def execute(self, inputs: Tensors) -> Tensors:
        """Run once and block, with the interpreter lock released.

        Every input comes under its name, row-major, in its spec's dtype.
        """
        ...

    def close(self) -> None:
        """Give memory and code back. Nobody executes any more."""
        ...


@runtime_checkable
class PackingModel(LoadedModel, Protocol):
    """A model that may take requests of different lengths together, their tokens one after the other.

    ``packs`` says whether this one does; ``packing_reason`` why, or why not, and is empty where nobody asked for it.
    """

    @property
    def packs(self) -> bool: ...
    @property
    def packing_reason(self) -> str: ...

    def tokens(self, inputs: Tensors) -> int:
        """Return how many tokens a request has."""
        ...

    def execute_packed(self, requests: list[Tensors]) -> list[Tensors]:
        """Run once for all requests, as :meth:`execute` would for each."""
        ...


@runtime_checkable
class OpenModel(LoadedModel, Protocol):
    """A model that also takes requests of other inputs than those it batches."""

    @property
    def optional(self) -> tuple[TensorSpec, ...]:
        """Inputs that it has values of its own for, which a request may give instead; ``inputs`` has the others."""
        ...

    @property
    def assumes(self) -> bool:
        """Whether batching rests on dimensions being equal that the model lets differ."""
        ...

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a request of these shapes is like those that it batches. Any other runs alone."""
        ...


@runtime_checkable
class PlacedModel(LoadedModel, Protocol):
    """A model that may run on other devices than the processor."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Their names, such as "cuda:0"."""
        ...

    @property
    def lost(self) -> str:
        """Why no execution works any more: a device is out of use. Empty while all of them work."""
        ...


@runtime_checkable
class EndlessModel(LoadedModel, Protocol):
    """A model whose runs may go on for ever, if ``may_not_end`` says so (always the same), but can be broken off."""

    @property
    def may_not_end(self) -> bool: ...

    def runs(self) -> Mapping[int, int]:
        """Return which run goes on now in which thread. A run's number is never used again; an execution may take
        several runs, one after the other."""
        ...

    def interrupt(self, run: int | None = None) -> None:
        """Have a run, or all that are under way, end soon: the execution raises BrokenOff. To be repeated until it
        has; nothing happens where it has ended."""
        ...


class KernelRun(Protocol):
    """One kernel of an execution; ``began`` and ``ended`` are nanoseconds of ``time.monotonic_ns``."""

    @property
    def label(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def began(self) -> int: ...
    @property
    def ended(self) -> int: ...


@runtime_checkable
class RecordingModel(LoadedModel, Protocol):
    """A model that can tell what its executions consist of."""

    def recorded(self, kernels: list[KernelRun]) -> LoadedModel:
        """Return this model as one whose executions add their kernels to a list, in order; the same in all else."""
        ...


def recorded(model: LoadedModel, kernels: list[KernelRun]) -> LoadedModel:
    """Return the model as one that fills the list; as it is where it cannot."""
    return model.recorded(kernels) if isinstance(model, RecordingModel) else model


@runtime_checkable
class SeparateModel(LoadedModel, Protocol):
    """A model that takes many requests at once, but does them one by one."""

    def execute_each(self, requests: list[Tensors]) -> list[Tensors | Exception]:
        """Return for each request what :meth:`execute` would return or raise; raises BrokenOff for all of them."""
        ...


def endless(model: LoadedModel) -> EndlessModel | None:
    """Return the model as one that may run for ever; None where it does not."""
    return model if isinstance(model, EndlessModel) and model.may_not_end else None


def devices(model: LoadedModel) -> tuple[str, ...]:
    """Return the devices that run the model, or parts of it, besides the processor."""
    return model.devices if isinstance(model, PlacedModel) else ()


def lost(model: LoadedModel) -> str:
    """Return why the model has to be loaded anew; empty where it works."""
    return model.lost if isinstance(model, PlacedModel) else ""


def optional(model: LoadedModel) -> tuple[TensorSpec, ...]:
    """Return the inputs that a request may leave out."""
    return model.optional if isinstance(model, OpenModel) else ()


def fitting(model: LoadedModel) -> Fits | None:
    """Return what says whether a request is like those that a model batches; None where every one is."""
    return model.fits if isinstance(model, OpenModel) and model.assumes else None


def packing(model: LoadedModel) -> PackingModel | None:
    """Return the model as one that packs; None where it does not."""
    return model if isinstance(model, PackingModel) and model.packs else None


class Backend(Protocol):
    """Loads compiled artifacts."""

    def needs(self, artifact: Path) -> Needs:
        """Return what the artifact in this folder takes once loaded; raises ``Unprocessable`` as :meth:`load` does."""
        ...

    def load(self, artifact: Path, threads: int | None, closed: Callable[[], None]) -> LoadedModel:
        """Load the artifact in this folder; ``closed`` is told once, when the model has given all back.

        Raises ``server.errors.Unprocessable`` when it cannot be loaded.
        """
        ...
