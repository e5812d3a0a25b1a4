"""The interfaces between the data path and the engines that run models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from lathe.server.types import Fits, Tensors, TensorSpec


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory of a model in bytes."""

    weights: int  # from loading to closing
    run: int  # of each batch while it runs


class LoadedModel(Protocol):
    """A model in memory.

    `batchable`: rows along the leading axis of all inputs and outputs are independent, so that requests of different
    clients may share one execution; `batch_reason` says why or why not.
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
        """Run once and block, with the interpreter lock released; returns all outputs by name.

        `inputs` has an array for each input, row-major, in the dtype of its spec.
        """
        ...

    def close(self) -> None:
        """Free memory and code. No execution may run or follow."""
        ...


@runtime_checkable
class PackingModel(LoadedModel, Protocol):
    """A model that may run sequences of different lengths together, packed: their tokens one after the other.

    `packs` says whether this model does; `packing_reason` why or why not, empty if packing was not requested.
    """

    @property
    def packs(self) -> bool: ...
    @property
    def packing_reason(self) -> str: ...

    def tokens(self, inputs: Tensors) -> int:
        """Return the number of tokens of a request."""
        ...

    def execute_packed(self, requests: list[Tensors]) -> list[Tensors]:
        """Run once for all requests; returns the outputs of each, as `execute` would."""
        ...


@runtime_checkable
class FlexibleModel(LoadedModel, Protocol):
    """A model with optional inputs, or whose requests can be batched for some shapes only."""

    @property
    def optional(self) -> tuple[TensorSpec, ...]:
        """Inputs with default values, which a request may replace; `inputs` has the required ones."""
        ...

    @property
    def assumes(self) -> bool:
        """Whether batching assumes that certain dimensions of a request are equal, which the model lets differ."""
        ...

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a request with these input shapes (by name) meets the assumption; otherwise it runs alone."""
        ...


@runtime_checkable
class PlacedModel(LoadedModel, Protocol):
    """A model that may run on other devices than the CPU."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices besides the CPU, such as "cuda:0"; empty if there are none."""
        ...

    @property
    def lost(self) -> str:
        """Why all executions fail: the error that made a device unusable. Empty while all devices work."""
        ...


@runtime_checkable
class EndlessModel(LoadedModel, Protocol):
    """A model whose runs can be interrupted. `may_not_end` (constant) says whether they may run for ever."""

    @property
    def may_not_end(self) -> bool: ...

    def runs(self) -> Mapping[int, int]:
        """Return the number of each current run, by the id of its thread.

        Run numbers are never reused. An execution may consist of several runs, one after the other.
        """
        ...

    def interrupt(self, run: int | None = None) -> None:
        """Interrupt a run, or all current runs: their executions raise ExecutionInterrupted.

        Callers repeat it until the run has ended; interrupting an ended run does nothing.
        """
        ...


@runtime_checkable
class PatientModel(EndlessModel, Protocol):
    """An endless model whose runs usually end by themselves. `last_seconds`: how long they may go on at closing."""

    @property
    def last_seconds(self) -> float: ...


class KernelRun(Protocol):
    """One kernel run (step) of an execution; `began` and `ended` are nanoseconds of `time.monotonic_ns`."""

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
    """A model that can record the kernels of its executions."""

    def recorded(self, kernels: list[KernelRun]) -> LoadedModel:
        """Return a view of this model whose executions append their kernels to `kernels`, in order."""
        ...


def with_recording(model: LoadedModel, kernels: list[KernelRun]) -> LoadedModel:
    """Return a view of the model that appends its kernel runs to `kernels`; the model itself if it cannot record."""
    return model.recorded(kernels) if isinstance(model, RecordingModel) else model


@runtime_checkable
class SeparateModel(LoadedModel, Protocol):
    """A model that takes several requests in one call, but runs them one by one."""

    def execute_each(self, requests: list[Tensors]) -> list[Tensors | Exception]:
        """Return for each request what `execute` would return or raise; raises ExecutionInterrupted."""
        ...


@runtime_checkable
class TokenizingModel(LoadedModel, Protocol):
    """A model that makes tokens of texts."""

    @property
    def truncations(self) -> range:
        """The numbers of tokens to which a request may have each of its texts truncated."""
        ...

    def limited(self, inputs: Tensors, most: int, packed: bool) -> Tensors:
        """Return the inputs of `execute` for a request.

        Texts are truncated to `most` tokens, a number in `truncations`, or 0 if the request does not ask for it.
        `packed`: all models that read the tokens pack, so nothing need be padded.
        """
        ...

    def token_count(self, outputs: Tensors) -> int:
        """Return the number of tokens of a request's texts, from the outputs of the model."""
        ...


def as_endless(model: LoadedModel) -> EndlessModel | None:
    """Return the model if its runs may go on for ever, otherwise None."""
    return model if isinstance(model, EndlessModel) and model.may_not_end else None


def devices(model: LoadedModel) -> tuple[str, ...]:
    """Return the names of the devices besides the CPU that run the model or parts of it; empty if there are none."""
    return model.devices if isinstance(model, PlacedModel) else ()


def lost_reason(model: LoadedModel) -> str:
    """Return the error of a lost device, after which the model must be reloaded; empty while all devices work."""
    return model.lost if isinstance(model, PlacedModel) else ""


def optional_inputs(model: LoadedModel) -> tuple[TensorSpec, ...]:
    """Return the inputs that a request may omit, because they have default values; empty if there are none."""
    return model.optional if isinstance(model, FlexibleModel) else ()


def shape_predicate(model: LoadedModel) -> Fits | None:
    """Return the function that says whether a request of given shapes may be batched; None if all may."""
    return model.fits if isinstance(model, FlexibleModel) and model.assumes else None


def as_packing(model: LoadedModel) -> PackingModel | None:
    """Return the model if it packs sequences, otherwise None."""
    return model if isinstance(model, PackingModel) and model.packs else None


def as_tokenizing(model: LoadedModel) -> TokenizingModel | None:
    """Return the model if it makes tokens of texts, otherwise None."""
    return model if isinstance(model, TokenizingModel) else None


class Backend(Protocol):
    """Loads compiled artifacts."""

    def needs(self, artifact: Path) -> MemoryNeeds:
        """Return the memory that the artifact in this folder needs once loaded; raises `Unprocessable` as `load`."""
        ...

    def load(self, artifact: Path, threads: int | None, closed: Callable[[], None]) -> LoadedModel:
        """Load the artifact in this folder; `closed` is called once, when the model has freed its memory.

        Raises an error of `lathe.server.errors`: Unprocessable if the artifact cannot be loaded, OutOfMemory if a
        device is too small, Unavailable if a device cannot be used.
        """
        ...
