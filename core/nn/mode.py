"""Where operators go: run at once on arrays (eager), or written into a graph (tracing).

Both are a `Writer` of `core.ops.terms`, so a layer's code is the same both ways. The eager one keeps no nodes: it
infers the types of a node, as every writer does, and then runs its reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from core.errors import TraceError
from core.ir.graph import Array, Attr, Graph, Node, Value
from core.ir.types import DType, TensorType
from core.ops.inference import infer_node
from core.ops.terms import Number, Term, Writer
from core.reference import run_node

if TYPE_CHECKING:
    from core.nn.parameter import Parameter


class Computed(Value):
    """A value of an eager run, together with its elements."""

    __slots__ = ("array",)

    def __init__(self, name: str, array: Array) -> None:
        super().__init__(name, TensorType(DType.from_numpy(array.dtype), array.shape))
        self.array = array


class Mode(Protocol):
    """What tensors ask of where they are used."""

    writer: Writer

    def take(self, value: Value, home: Mode) -> Value:
        """The value, made in `home`, as operators may use it here; TraceError for one of another trace."""
        ...

    def parameter(self, parameter: Parameter) -> Value:
        """The value that stands for a parameter here."""
        ...


class _EagerWriter(Writer):
    """Runs nodes instead of keeping them."""

    def __init__(self) -> None:
        super().__init__(Graph("eager"))

    def fresh(self, base: str) -> str:
        return base

    def emit(
        self, op: str, inputs: Sequence[Value | None], attrs: dict[str, Attr] | None = None, outputs: int = 1
    ) -> list[Value]:
        """The outputs of a node, computed. ModelError when the inputs do not fit the operator, FeedError when their
        elements do not."""
        arrays: dict[Value, Array] = {value: value.array for value in inputs if isinstance(value, Computed)}
        node = Node(op, list(inputs), [], dict(attrs or {}), self.scope + op.lower())
        node.outputs = [Value(f"{node.name}.{i}", _UNTYPED, node) for i in range(outputs)]
        infer_node(node, dict(arrays))
        results = run_node(node, [None if value is None else arrays[value] for value in inputs], {}, {})
        return [Computed(node.name, array) for array in results[:outputs]]

    def array(self, array: object, dtype: DType | None = None, name: str = "c") -> Term:
        return Term(self, Computed(name, np.array(array, dtype.numpy if dtype else None)))

    def number(self, number: Number, dtype: DType) -> Term:
        return self.array(number, dtype)  # kept for nobody


_UNTYPED = TensorType(DType.FLOAT32, None)


class Eager:
    """Every operator runs when Python comes to it."""

    def __init__(self) -> None:
        self.writer: Writer = _EagerWriter()

    def take(self, value: Value, home: Mode) -> Value:
        return value if isinstance(value, Computed) else _foreign(value)

    def parameter(self, parameter: Parameter) -> Value:
        return Computed("parameter", parameter.data)


class Tracing:
    """Operators become nodes of a graph, parameters its constants, named by `names`.

    Constants of real numbers count as parameters when a graph is trained, so what must not be trained goes through
    StopGradient: frozen parameters, buffers, and arrays that are used beside tensors.
    """

    def __init__(self, graph: Graph, names: Mapping[Parameter, str]) -> None:
        self.writer = self._outermost = Writer(graph)
        self._names = names
        self._parameters: dict[Parameter, Value] = {}
        self._adopted: dict[Value, Value] = {}

    def take(self, value: Value, home: Mode) -> Value:
        if not isinstance(value, Computed):
            return value if home is self else _foreign(value)
        if value not in self._adopted:
            self._adopted[value] = self._frozen(self._outermost.array(value.array, name=value.name))
        return self._adopted[value]

    def parameter(self, parameter: Parameter) -> Value:
        if parameter not in self._parameters:
            constant = self._outermost.array(parameter.data, name=self._names.get(parameter, "parameter"))
            self._parameters[parameter] = constant.value if parameter.moves else self._frozen(constant)
        return self._parameters[parameter]

    @contextmanager
    def inside(self, graph: Graph) -> Iterator[None]:
        """Write into a graph nested in the current one."""
        outer, self.writer = self.writer, self.writer.nested(graph)
        try:
            yield
        finally:
            self.writer = outer

    def _frozen(self, constant: Term) -> Value:
        if not constant.dtype.is_float or constant.rank == 0:
            return constant.value
        (value,) = self._outermost.emit("StopGradient", [constant.value])
        return value


def _foreign(value: Value) -> NoReturn:
    raise TraceError(f"is a tensor of a trace that has ended, {value.type}", where=f"%{value.name}")


_EAGER = Eager()
_current: ContextVar[Mode] = ContextVar("mode", default=_EAGER)


def current() -> Mode:
    """Where operators go now."""
    return _current.get()


@contextmanager
def entered(mode: Mode) -> Iterator[None]:
    """Let operators go to `mode`."""
    token = _current.set(mode)
    try:
        yield
    finally:
        _current.reset(token)
