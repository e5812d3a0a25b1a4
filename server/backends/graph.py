"""Lathe's own engine behind the server's contract: the one place of the data path that imports core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from server.backends.base import Needs
from server.datatypes import NUMPY_OF
from server.errors import BadRequest, Internal, Unprocessable
from server.types import Tensors, TensorSpec

if TYPE_CHECKING:
    from core import Session
    from core.ir.types import ValueType

PLATFORM = "lathe_onnx"
_FILE = "model.lathe"  # of an artifact's folder


class GraphModel:
    """A compiled session, with what never changes about it read once."""

    platform = PLATFORM

    def __init__(self, session: Session, closed: Callable[[], None] = lambda: None) -> None:
        self._session = session
        self._closed = closed
        self.inputs = tuple(_spec(name, type_) for name, type_ in session.inputs.items())
        self.outputs = tuple(_spec(name, type_) for name, type_ in session.outputs.items())
        self.max_batch = session.max_batch
        self.batchable = session.batching.batchable
        self.batch_reason = session.batching.reason

    @property
    def memory_bytes(self) -> int:
        """Weights, and the arena of the largest batch."""
        memory = self._session.memory
        return memory.weights + memory.peak * self.max_batch if memory is not None else 0

    def execute(self, inputs: Tensors) -> Tensors:
        """Run once; raises BadRequest when dimensions that must agree do not."""
        from core.errors import FeedError, LatheError

        for name, array in inputs.items():
            if not array.flags.aligned:  # a view into a request's body
                inputs = {**inputs, name: array.copy()}
        try:
            return self._session.run(inputs)
        except FeedError as error:
            raise BadRequest(str(error)) from error
        except LatheError as error:
            raise Internal(str(error)) from error

    def close(self) -> None:
        self._session.close()
        self._closed()


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
        request has to wait. Raises Unprocessable when it is damaged or cannot be served."""
        import core

        try:
            session = core.load_compiled(
                artifact / _FILE, threads=threads, cache_dir=self._cache, new_shapes="background"
            )
        except core.errors.LatheError as error:
            raise Unprocessable(f"the compiled model cannot be loaded: {error}") from error
        try:
            return GraphModel(session, closed)
        except Unprocessable:
            session.close()
            raise


def _spec(name: str, type_: ValueType) -> TensorSpec:
    from core.ir.types import TensorType

    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype.triton not in NUMPY_OF:
        raise Unprocessable(f"{name!r} is {type_}, which the inference protocol cannot carry")
    return TensorSpec(name, type_.dtype.triton, tuple(dim if isinstance(dim, int) else -1 for dim in type_.shape))
