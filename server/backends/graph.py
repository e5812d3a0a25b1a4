"""Lathe's own engine behind the server's contract: the one place of the data path that imports core."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from server.backends.base import KernelRun, Needs
from server.datatypes import NUMPY_OF
from server.errors import BadRequest, BrokenOff, Internal, OutOfMemory, Unavailable, Unprocessable
from server.types import Tensors, TensorSpec

if TYPE_CHECKING:
    from core import Session
    from core.ir.types import ValueType

PLATFORM = "lathe_onnx"
_FILE = "model.lathe"  # of an artifact's folder


class GraphModel:
    """A compiled session, with what never changes about it read once."""

    platform = PLATFORM
    _record: Callable[[KernelRun], None] | None = None  # told of each kernel

    def __init__(self, session: Session, closed: Callable[[], None] = lambda: None) -> None:
        self._session = session
        self._closed = closed
        self.inputs = tuple(_spec(name, type_) for name, type_ in session.inputs.items())
        self.optional = tuple(_spec(name, type_) for name, type_ in session.defaults.items() if _travels(type_))
        self.outputs = tuple(_spec(name, type_) for name, type_ in session.outputs.items())
        self.assumes = bool(session.description.declared)
        self.max_batch = session.max_batch
        self.batchable = session.batching.batchable
        self.batch_reason = session.batching.reason
        self.packs = session.packing is not None and session.packing.packable
        self.packing_reason = session.packing.reason if session.packing is not None else ""

    @property
    def memory_bytes(self) -> int:
        """Weights, and the arena of the largest batch, or of the most tokens that run packed."""
        memory, packing = self._session.memory, self._session.packing
        rows = packing.tokens if packing is not None and self.packs else self.max_batch
        return memory.weights + memory.peak * rows if memory is not None else 0

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices besides the processor that run parts of it, as far as its shapes are known."""
        return self._session.devices

    @property
    def lost(self) -> str:
        """Why no execution works any more, after a fault of one of them."""
        return self._session.lost

    def execute(self, inputs: Tensors) -> Tensors:
        """Run once; raises BadRequest when dimensions that must agree do not."""
        try:
            return self._session.run(_aligned(inputs), self._record)
        except Exception as error:
            _raise_as_the_servers(error)
            raise

    def execute_packed(self, requests: list[Tensors]) -> list[Tensors]:
        """Run once for all; raises BadRequest when one of them does not fit."""
        try:
            return self._session.run_packed([_aligned(inputs) for inputs in requests], self._record)
        except Exception as error:
            _raise_as_the_servers(error)
            raise

    def recorded(self, kernels: list[KernelRun]) -> GraphModel:
        """Return the same model, whose executions add their kernels to a list."""
        model = copy.copy(self)
        model._record = kernels.append
        return model

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a request of these shapes is like those that are batched."""
        return self._session.fits(shapes)

    @property
    def may_not_end(self) -> bool:
        """Whether data may make its loops go round for ever."""
        return self._session.may_not_end

    def runs(self) -> dict[int, int]:
        """Return the run of each thread, where they may not end."""
        return self._session.runs()

    def interrupt(self, run: int | None = None) -> None:
        """Have a run's loops end, or those of all; what runs raises BrokenOff."""
        self._session.interrupt(run)

    def tokens(self, inputs: Tensors) -> int:
        """Return how many tokens there are: of a model that packs, every length besides the rows is that of
        sequences."""
        for spec in self.inputs:
            lengths = [size for size, given in zip(inputs[spec.name].shape, spec.shape, strict=True) if given == -1]
            if len(lengths) > 1:
                return prod(lengths)
        return 0

    def close(self) -> None:
        self._session.close()
        self._closed()


def _raise_as_the_servers(error: Exception) -> None:
    """Raise what an error of the engine is to the server; nothing for any other."""
    from core.errors import DeviceLost, FeedError, Interrupted, LatheError

    if isinstance(error, Interrupted):
        raise BrokenOff from None  # where it was says nothing

    if isinstance(error, DeviceLost):
        raise Unavailable(str(error)) from error
    if isinstance(error, FeedError):
        raise BadRequest(str(error)) from error
    if isinstance(error, LatheError):
        raise Internal(str(error)) from error


def _aligned(inputs: Tensors) -> Tensors:
    """Arrays that are views into a request's body may begin anywhere."""
    for name, array in inputs.items():
        if not array.flags.aligned:
            inputs = {**inputs, name: array.copy()}
    return inputs


class GraphBackend:
    """Loads artifacts that core's compile stage has written."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache

    def needs(self, artifact: Path) -> Needs:
        """Return what the plan says. Raises Unprocessable when it is damaged."""
        from core.errors import LatheError
        from core.runtime.needs import needs

        try:
            found = needs(artifact / _FILE)
        except LatheError as error:
            raise Unprocessable(f"the compiled model cannot be loaded: {error}") from error
        return Needs(found.weights, found.run)

    def load(self, artifact: Path, threads: int | None, closed: Callable[[], None] = lambda: None) -> GraphModel:
        """Load an artifact; compiles nothing: shapes that come later do so in child processes, so that no other
        request has to wait. Raises Unprocessable when it is damaged or cannot be served, OutOfMemory when a device has
        no room for it, Unavailable when its device is out of use."""
        import core

        try:
            session = core.load_compiled(
                artifact / _FILE, threads=threads, cache_dir=self._cache, new_shapes="background"
            )
        except core.errors.DeviceMemoryError as error:
            raise OutOfMemory(str(error)) from error
        except core.errors.DeviceLost as error:
            raise Unavailable(str(error)) from error
        except core.errors.LatheError as error:
            raise Unprocessable(f"the compiled model cannot be loaded: {error}") from error
        session.prepare()
        try:
            return GraphModel(session, closed)
        except Unprocessable:
            session.close()
            raise


def _travels(type_: ValueType) -> bool:
    """Whether the inference protocol can carry such a value."""
    from core.ir.types import TensorType

    return isinstance(type_, TensorType) and type_.dtype.triton in NUMPY_OF


def _spec(name: str, type_: ValueType) -> TensorSpec:
    from core.ir.types import TensorType

    if not isinstance(type_, TensorType) or not _travels(type_):
        raise Unprocessable(f"{name!r} is {type_}, which the inference protocol cannot carry")
    if type_.shape is None:
        return TensorSpec(name, type_.dtype.triton, (-1,), any_rank=True)
    return TensorSpec(name, type_.dtype.triton, tuple(dim if isinstance(dim, int) else -1 for dim in type_.shape))
