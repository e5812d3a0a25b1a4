"""Runs models on Lathe's engine. Only this module and `json_numbers.py` call native code for requests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from lathe.server.backends.base import KernelRun, MemoryNeeds
from lathe.server.datatypes import NUMPY_OF
from lathe.server.errors import BadRequest, ExecutionInterrupted, Internal, OutOfMemory, Unavailable, Unprocessable
from lathe.server.types import Tensors, TensorSpec

if TYPE_CHECKING:
    from lathe import Session
    from lathe.core.ir.types import ValueType

PLATFORM = "lathe_onnx"
_FILE = "model.lathe"  # in an artifact's folder


class GraphModel:
    """A LoadedModel over a compiled session. The session's constant properties are read once."""

    platform = PLATFORM
    _record: Callable[[KernelRun], None] | None = None  # called for each kernel run

    def __init__(self, session: Session, closed: Callable[[], None] = lambda: None) -> None:
        self._session = session
        self._closed = closed
        self.inputs = tuple(_spec(name, type_) for name, type_ in session.inputs.items())
        self.optional = tuple(_spec(name, type_) for name, type_ in session.defaults.items() if _has_datatype(type_))
        self.outputs = tuple(_spec(name, type_) for name, type_ in session.outputs.items())
        self.assumes = bool(session.description.declared)
        self.max_batch = session.max_batch
        self.batchable = session.batching.batchable
        self.batch_reason = session.batching.reason
        self.packs = session.packing is not None and session.packing.packable
        self.packing_reason = session.packing.reason if session.packing is not None else ""

    @property
    def memory_bytes(self) -> int:
        """The bytes of the weights and of the arena for the largest batch, or for the most packed tokens.

        0 if the session does not know its memory.
        """
        memory, packing = self._session.memory, self._session.packing
        rows = packing.tokens if packing is not None and self.packs else self.max_batch
        return memory.weights + memory.peak * rows if memory is not None else 0

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices, besides the CPU, that run parts of the model, for the shapes compiled so far."""
        return self._session.devices

    @property
    def lost(self) -> str:
        """Why all executions fail, after a device error; empty while all devices work."""
        return self._session.lost

    def execute(self, inputs: Tensors) -> Tensors:
        """Run once; raises BadRequest if the inputs do not fit, for example dimensions that must be equal differ.

        Raises Unavailable after the loss of a device, ExecutionInterrupted after `interrupt`, and Internal for other
        errors of the engine.
        """
        try:
            return self._session.run(_aligned(inputs), self._record)
        except Exception as error:
            _raise_server_error(error)
            raise

    def execute_packed(self, requests: list[Tensors]) -> list[Tensors]:
        """Run once for all requests, packed; raises BadRequest if the shapes of one do not fit, others as `execute`."""
        try:
            return self._session.run_packed([_aligned(inputs) for inputs in requests], self._record)
        except Exception as error:
            _raise_server_error(error)
            raise

    def recorded(self, kernels: list[KernelRun]) -> GraphModel:
        """Return a copy over the same session whose executions append their kernels to `kernels`."""
        model = copy.copy(self)
        model._record = kernels.append
        return model

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a request with these input shapes (by name) may be batched with others."""
        return self._session.fits(shapes)

    @property
    def may_not_end(self) -> bool:
        """Whether the graph has loops that may run for ever, depending on the data."""
        return self._session.may_not_end

    def runs(self) -> dict[int, int]:
        """Return the number of each current run by the id of its thread; empty if runs always end."""
        return self._session.runs()

    def interrupt(self, run: int | None = None) -> None:
        """Interrupt the loops of a run, or of all runs; their executions raise ExecutionInterrupted."""
        self._session.interrupt(run)

    def tokens(self, inputs: Tensors) -> int:
        """Return the number of tokens of a request: rows times sequence length.

        In a model that packs, every dynamic dimension besides the rows is the sequence length. 0 if no input has both.
        """
        for spec in self.inputs:
            lengths = [size for size, dim in zip(inputs[spec.name].shape, spec.shape, strict=True) if dim == -1]
            if len(lengths) > 1:
                return prod(lengths)
        return 0

    def close(self) -> None:
        self._session.close()
        self._closed()


def _raise_server_error(error: Exception) -> None:
    """Raise the server's error for an error of the engine; return if `error` is any other exception."""
    from lathe.core.errors import DeviceLost, FeedError, Interrupted, LatheError

    if isinstance(error, Interrupted):
        raise ExecutionInterrupted from None  # the traceback of the interrupted run does not help

    if isinstance(error, DeviceLost):
        raise Unavailable(str(error)) from error
    if isinstance(error, FeedError):
        raise BadRequest(str(error)) from error
    if isinstance(error, LatheError):
        raise Internal(str(error)) from error


def _aligned(inputs: Tensors) -> Tensors:
    """Return the inputs with unaligned arrays copied: views into a request's body may begin at any byte."""
    for name, array in inputs.items():
        if not array.flags.aligned:
            inputs = {**inputs, name: array.copy()}
    return inputs


class GraphBackend:
    """Loads artifacts that the compile stage (`lathe.core.compiler.child_stages`) has written."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache

    def needs(self, artifact: Path) -> MemoryNeeds:
        """Return the memory needs in the artifact's plan; raises Unprocessable if it is damaged."""
        from lathe.core.errors import LatheError
        from lathe.core.runtime.artifact.memory_needs import memory_needs

        try:
            found = memory_needs(artifact / _FILE)
        except LatheError as error:
            raise Unprocessable(f"the compiled model cannot be loaded: {error}") from error
        return MemoryNeeds(found.weights, found.run)

    def load(self, artifact: Path, threads: int | None, closed: Callable[[], None] = lambda: None) -> GraphModel:
        """Load an artifact, without compiling. New shapes are compiled later, in child processes.

        A request waits for such a compilation only if NumPy references would take too long.

        Raises Unprocessable if the artifact is damaged or its types cannot be served, OutOfMemory if a device is too
        small, Unavailable if its device is unusable.
        """
        import lathe

        try:
            session = lathe.load_compiled(
                artifact / _FILE, threads=threads, cache_dir=self._cache, new_shapes="background"
            )
        except lathe.errors.DeviceMemoryError as error:
            raise OutOfMemory(str(error)) from error
        except lathe.errors.DeviceLost as error:
            raise Unavailable(str(error)) from error
        except lathe.errors.LatheError as error:
            raise Unprocessable(f"the compiled model cannot be loaded: {error}") from error
        session.prepare()
        try:
            return GraphModel(session, closed)
        except Unprocessable:
            session.close()
            raise


def _has_datatype(type_: ValueType) -> bool:
    """Whether values of this type are tensors with a datatype of the inference protocol."""
    from lathe.core.ir.types import TensorType

    return isinstance(type_, TensorType) and type_.dtype.triton in NUMPY_OF


def _spec(name: str, type_: ValueType) -> TensorSpec:
    from lathe.core.ir.types import TensorType

    if not isinstance(type_, TensorType) or not _has_datatype(type_):
        raise Unprocessable(f"{name!r} is {type_}, for which the inference protocol has no datatype")
    if type_.shape is None:
        return TensorSpec(name, type_.dtype.triton, (-1,), any_rank=True)
    return TensorSpec(name, type_.dtype.triton, tuple(dim if isinstance(dim, int) else -1 for dim in type_.shape))
