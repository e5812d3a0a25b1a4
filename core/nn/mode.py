"""Execution modes: operators run immediately on arrays (eager), or become nodes of a graph (tracing).

Both modes use a `Writer` of `lathe.core.ops.opdef.terms`, so the code of a layer is the same in both. The eager writer
stores no nodes: it infers the types of a node, as every writer does, and then runs its NumPy reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from lathe.core.errors import TraceError
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.ops.opdef.terms import Number, Term, Writer
from lathe.core.reference import run_node

if TYPE_CHECKING:
    from lathe.core.nn.parameter import Parameter


class EagerValue(Value):
    """A value of an eager run with its elements, `array`."""

    __slots__ = ("array",)

    def __init__(self, name: str, array: Array) -> None:
        super().__init__(name, TensorType(DType.from_numpy(array.dtype), array.shape))
        self.array = array


class Mode(Protocol):
    """An execution mode: `writer` executes or records operators; the methods give values for their inputs."""

    writer: Writer

    def take(self, value: Value, home: Mode) -> Value:
        """The value in this mode for `value`, created in mode `home`: a trace makes eager values its constants.

        TraceError for a value of another trace.
        """
        ...

    def parameter(self, parameter: Parameter) -> Value:
        """The value of a parameter in this mode: its elements, or a constant of the traced graph."""
        ...


class _EagerWriter(Writer):
    """Runs each node immediately instead of adding it to a graph."""

    def __init__(self) -> None:
        super().__init__(Graph("eager"))

    def fresh(self, base: str) -> str:
        return base

    def emit(
        self, op: str, inputs: Sequence[Value | None], attrs: dict[str, Attr] | None = None, outputs: int = 1
    ) -> list[Value]:
        """Run a node at once; returns its first `outputs` outputs.

        ModelError if the types of the inputs do not fit the operator, FeedError if their elements do not.
        """
        arrays: dict[Value, Array] = {value: value.array for value in inputs if isinstance(value, EagerValue)}
        node = Node(op, list(inputs), [], dict(attrs or {}), self.scope + op.lower())
        node.outputs = [Value(f"{node.name}.{i}", _UNTYPED, node) for i in range(outputs)]
        infer_node(node, dict(arrays))
        results = run_node(node, [None if value is None else arrays[value] for value in inputs], {}, {})
        return [EagerValue(node.name, array) for array in results[:outputs]]

    def array(self, array: object, dtype: DType | None = None, name: str = "c") -> Term:
        return Term(self, EagerValue(name, np.array(array, dtype.numpy if dtype else None)))

    def number(self, number: Number, dtype: DType) -> Term:
        return self.array(number, dtype)  # without a graph there are no constants to share


_UNTYPED = TensorType(DType.FLOAT32, None)


class Eager:
    """The eager mode: every operator runs immediately."""

    def __init__(self) -> None:
        self.writer: Writer = _EagerWriter()

    def take(self, value: Value, home: Mode) -> Value:
        return value if isinstance(value, EagerValue) else _raise_foreign(value)

    def parameter(self, parameter: Parameter) -> Value:
        return EagerValue("parameter", parameter.data)


class Tracing:
    """The tracing mode: operators become nodes of a graph, parameters its constants, named by `names`.

    A training step takes floating-point constants as parameters. So frozen parameters, buffers and plain arrays, which
    must not be trained, pass through StopGradient.
    """

    def __init__(self, graph: Graph, names: Mapping[Parameter, str]) -> None:
        self.writer = self._root_writer = Writer(graph)
        self._names = names
        self._parameters: dict[Parameter, Value] = {}
        self._constants: dict[Value, Value] = {}

    def take(self, value: Value, home: Mode) -> Value:
        if not isinstance(value, EagerValue):
            return value if home is self else _raise_foreign(value)
        if value not in self._constants:
            self._constants[value] = self._freeze(self._root_writer.array(value.array, name=value.name))
        return self._constants[value]

    def parameter(self, parameter: Parameter) -> Value:
        if parameter not in self._parameters:
            constant = self._root_writer.array(parameter.data, name=self._names.get(parameter, "parameter"))
            self._parameters[parameter] = constant.value if parameter.moves else self._freeze(constant)
        return self._parameters[parameter]

    @contextmanager
    def inside(self, graph: Graph) -> Iterator[None]:
        """Within the context, write nodes into `graph`, the body of a node of the graph that is written now."""
        outer, self.writer = self.writer, self.writer.nested(graph)
        try:
            yield
        finally:
            self.writer = outer

    def _freeze(self, constant: Term) -> Value:
        if not constant.dtype.is_float or constant.rank == 0:
            return constant.value
        (value,) = self._root_writer.emit("StopGradient", [constant.value])
        return value


def _raise_foreign(value: Value) -> NoReturn:
    raise TraceError(f"is a tensor {value.type} of a trace that has ended", where=f"%{value.name}")


_EAGER = Eager()
_current: ContextVar[Mode] = ContextVar("mode", default=_EAGER)


def current_mode() -> Mode:
    """The current execution mode of this context: eager unless a trace is running."""
    return _current.get()


@contextmanager
def use_mode(mode: Mode) -> Iterator[None]:
    """Make `mode` the current mode within the context."""
    token = _current.set(mode)
    try:
        yield
    finally:
        _current.reset(token)
