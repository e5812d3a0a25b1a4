"""The state of an import: unique names, scopes of values, and an emitter that adds nodes and infers their types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx

from lathe.core.errors import LatheError, ModelError, UnknownRankError, UnsupportedError
from lathe.core.frontends.declared_types import Symbols, check_size
from lathe.core.frontends.external import ExternalFiles
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.ops.opdef.registry import describe

# Nested function calls can inline to any number of nodes; real models have tens of thousands.
MAX_NODES = 200_000
_UNTYPED = TensorType(DType.FLOAT32, None)


@dataclass
class ImportSession:
    """The state of one import: the names in use, the symbols, the known elements of values, and the number of nodes."""

    names: set[str]  # all names of values: those of the file, and those made during the import
    symbols: Symbols = field(default_factory=Symbols)
    known: dict[Value, Array] = field(default_factory=dict)  # the elements of constants, and inferred ones
    nodes: int = 0
    labels: set[str] = field(default_factory=set)  # all names of nodes
    used: dict[str, int] = field(default_factory=dict)  # the last number that was appended to each base name
    read: set[str] = field(default_factory=set)  # names of the values whose elements an adapter has read
    files: ExternalFiles | None = None  # the files with external data

    def fresh(self, base: str) -> str:
        """A name that no value has, which is then taken: `base`, or `base_2`, `base_3`, ..."""
        return self._make_unique(base, self.names)

    def fresh_label(self, base: str) -> str:
        """A name that no node has, which is then taken: `base`, or `base_2`, `base_3`, ..."""
        return self._make_unique(base, self.labels)

    def _make_unique(self, base: str, taken: set[str]) -> str:
        name = base
        while name in taken:
            self.used[base] = self.used.get(base, 1) + 1
            name = f"{base}_{self.used[base]}"
        taken.add(name)
        return name

    def count_nodes(self, count: int) -> None:
        """Add `count` to the number of nodes. UnsupportedError if there are more than `MAX_NODES`."""
        self.nodes += count
        if self.nodes > MAX_NODES:
            raise UnsupportedError(f"the model has more than {MAX_NODES} nodes once its functions are unfolded")


class Scope:
    """Maps names to values, or to None for an argument that a function's caller omits. `read` sees enclosing scopes."""

    def __init__(self, outer: Scope | None = None) -> None:
        self.outer = outer
        self.values: dict[str, Value | None] = {}

    def define(self, name: str, value: Value | None) -> None:
        if name in self.values:
            raise ModelError("is defined twice", where=f"value '{name}'")
        self.values[name] = value

    def read(self, name: str, where: str) -> Value | None:
        """The value of this name, also from enclosing scopes; None for an omitted argument. ModelError if undefined."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        raise ModelError(f"reads '{name}', which nothing defines", where=where)

    @property
    def depth(self) -> int:
        return 0 if self.outer is None else 1 + self.outer.depth

    def has_name(self, name: str) -> bool:
        return name in self.values or (self.outer is not None and self.outer.has_name(name))


class Emitter:
    """Appends nodes and constants to a graph. `label` is the node being imported, for new names and errors.

    New nodes get the annotation `device`, and the control edges `after` if they read a value that is no constant.
    """

    def __init__(self, graph: Graph, session: ImportSession, label: str = "") -> None:
        self.graph = graph
        self.session = session
        self.label = label
        self.device = ""
        self.after: tuple[Value, ...] = ()

    def constant(self, array: object, name: str = "", dtype: DType | None = None) -> Value:
        """Add a constant, whose elements count as known, and return its value. The array itself becomes read-only."""
        data = np.asarray(array, dtype=dtype.numpy if dtype else None)
        data.setflags(write=False)
        type_ = TensorType(DType.from_numpy(data.dtype), data.shape)
        value = Value(name or self.session.fresh(f"{self.label}.c"), type_)
        self.graph.constants[value] = self.session.known[value] = data
        return value

    def value_of(self, value: Value | None) -> Array | None:
        """The elements of a value if they are known at import and have no symbols, otherwise None.

        Records that an adapter has read them (`ImportSession.read`).
        """
        array = None if value is None else self.session.known.get(value)
        if value is not None:
            self.session.read.add(value.name)
        return None if array is None or array.dtype == object else array

    def __call__(self, op: str, *inputs: Value | None, **attrs: Attr) -> Value:
        """Add a node with one output, which gets a new name; return the output."""
        name = self.session.fresh(f"{self.label}.{op.lower()}")
        return self.emit(op, inputs, attrs, [name], name)[0]

    def emit(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Attr],
        outputs: Sequence[str],
        label: str = "",
    ) -> list[Value]:
        """Add a node with outputs of these names, infer their types, and return them.

        ModelError, which names the node, if its inputs or attributes do not fit; UnsupportedError for an unknown
        operator, or an unknown rank that the operator needs. After an error, the node is not in the graph.
        """
        can_wait = any(value is not None and value not in self.graph.constants for value in inputs)
        after = self.after if can_wait else ()
        name = self.session.fresh_label(label or self.label)
        node = Node(op, list(inputs), [], dict(attrs), name, self.device, after)
        node.outputs = [Value(name, _UNTYPED, node) for name in outputs]
        while node.inputs and node.inputs[-1] is None:
            node.inputs.pop()
        with errors_at(describe(node)):
            infer_node(node, self.session.known)
            for value in node.outputs:
                check_size(value.type, describe(node))
        self.graph.nodes.append(node)
        return node.outputs

    @contextmanager
    def annotated(self, device: str, after: Sequence[Value]) -> Iterator[None]:
        """Within the context, nodes have a device ("": that of outside), and control edges besides those of outside."""
        outside = self.device, self.after
        self.device, self.after = device or self.device, tuple(dict.fromkeys((*self.after, *after)))
        try:
            yield
        finally:
            self.device, self.after = outside


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """A context that turns Python's errors into a ModelError at `where`, an unknown rank into an UnsupportedError.

    Other errors of Lathe pass unchanged. Operators and adapters assume inputs as ONNX specifies them. Other contents of
    a file, such as text where a number belongs, make them raise one of Python's errors.
    """
    try:
        yield
    except UnknownRankError as error:
        raise UnsupportedError(str(error), where=where) from error
    except LatheError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MemoryError, RecursionError) as error:
        raise ModelError(f"is malformed: {type(error).__name__}: {error}", where=where) from error


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function that is being inlined: the calling node, the attributes, the results and the depth."""

    label: str  # the name of the calling node
    attributes: Mapping[str, Attr]
    results: Mapping[str, str]  # names of results in the function to names in the graph
    depth: int


@dataclass(frozen=True)
class Frame:
    """The context in which nodes are imported: a graph of the file, or a function body."""

    emitter: Emitter
    scope: Scope
    opsets: Mapping[str, int]
    call: FunctionCall | None = None
    declared: Mapping[str, onnx.TypeProto] = field(default_factory=dict)  # declared types of intermediate values

    def label(self, name: str) -> str:
        """The label in the graph for node `name` of the file: inside a function, with the caller's label as prefix."""
        return f"{self.call.label}/{name}" if self.call else name

    def value_name(self, name: str) -> str:
        """A unique name in the graph for the value `name` of the file.

        It is `name` itself where possible. Inside a function, results get the names of the caller's outputs, and other
        values a new name with the caller's as prefix.
        """
        session = self.emitter.session
        if not name:
            return session.fresh(f"{self.emitter.label}.unused")
        if self.call is None:
            shadows = self.scope.outer is not None and self.scope.outer.has_name(name)
            return session.fresh(name) if shadows else name
        return self.call.results.get(name) or session.fresh(self.label(name))
