"""What importing one model works with: unique names, scopes of values, and an emitter that infers types at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx

from core.errors import LatheError, ModelError, UnknownRankError, UnsupportedError
from core.frontends.declared import Symbols, check_size
from core.frontends.external import ExternalFiles
from core.ir.graph import Array, Attr, Graph, Node, Value
from core.ir.types import DType, TensorType
from core.ops.inference import infer_node
from core.ops.registry import describe

# Functions that call functions can unfold to any size; real models have tens of thousands of nodes.
MAX_NODES = 200_000
_UNTYPED = TensorType(DType.FLOAT32, None)


@dataclass
class Session:
    """State of one import."""

    names: set[str]  # every name of the file, and every name made since
    symbols: Symbols = field(default_factory=Symbols)
    known: dict[Value, Array] = field(default_factory=dict)
    nodes: int = 0
    labels: set[str] = field(default_factory=set)  # every name of a node
    used: dict[str, int] = field(default_factory=dict)  # how often a base was asked for
    read: set[str] = field(default_factory=set)  # names of the values whose elements an adapter has asked for
    files: ExternalFiles | None = None  # where tensors may lie that are not in the file

    def fresh(self, base: str) -> str:
        """A name that nothing in the file has: `base`, or `base_2` ..."""
        return self._unused(base, self.names)

    def fresh_label(self, base: str) -> str:
        """A name that no node of the graph has yet."""
        return self._unused(base, self.labels)

    def _unused(self, base: str, taken: set[str]) -> str:
        name = base
        while name in taken:
            self.used[base] = self.used.get(base, 1) + 1
            name = f"{base}_{self.used[base]}"
        taken.add(name)
        return name

    def count_nodes(self, count: int) -> None:
        """UnsupportedError when there are too many nodes with `count` more."""
        self.nodes += count
        if self.nodes > MAX_NODES:
            raise UnsupportedError(f"the model has more than {MAX_NODES} nodes once its functions are unfolded")


class Scope:
    """Values by name, None for an absent argument of a function; a nested scope sees those around it."""

    def __init__(self, outer: Scope | None = None) -> None:
        self.outer = outer
        self.values: dict[str, Value | None] = {}

    def define(self, name: str, value: Value | None) -> None:
        if name in self.values:
            raise ModelError("is defined twice", where=f"value '{name}'")
        self.values[name] = value

    def read(self, name: str, where: str) -> Value | None:
        """The value of this name; ModelError when nothing defines it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        raise ModelError(f"reads '{name}', which nothing defines", where=where)

    @property
    def depth(self) -> int:
        return 0 if self.outer is None else 1 + self.outer.depth

    def sees(self, name: str) -> bool:
        return name in self.values or (self.outer is not None and self.outer.sees(name))


class Emitter:
    """Appends nodes and constants to a graph. `label` names what is being imported, for names and errors."""

    def __init__(self, graph: Graph, session: Session, label: str = "") -> None:
        self.graph = graph
        self.session = session
        self.label = label

    def constant(self, array: object, name: str = "", dtype: DType | None = None) -> Value:
        data = np.asarray(array, dtype=dtype.numpy if dtype else None)
        data.setflags(write=False)
        type_ = TensorType(DType.from_numpy(data.dtype), data.shape)
        value = Value(name or self.session.fresh(f"{self.label}.c"), type_)
        self.graph.constants[value] = self.session.known[value] = data
        return value

    def value_of(self, value: Value | None) -> Array | None:
        """The elements of a value if they are known numbers."""
        array = None if value is None else self.session.known.get(value)
        if value is not None:
            self.session.read.add(value.name)
        return None if array is None or array.dtype == object else array

    def __call__(self, op: str, *inputs: Value | None, **attrs: Attr) -> Value:
        """A node with one output under a new name."""
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
        """A node with outputs of these names, its types inferred. ModelError, naming the node, when it does not fit."""
        node = Node(op, list(inputs), [], dict(attrs), self.session.fresh_label(label or self.label))
        node.outputs = [Value(name, _UNTYPED, node) for name in outputs]
        while node.inputs and node.inputs[-1] is None:
            node.inputs.pop()
        with naming(describe(node)):
            infer_node(node, self.session.known)
            for value in node.outputs:
                check_size(value.type, describe(node))
        self.graph.nodes.append(node)
        return node.outputs


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors at the border. Operators and adapters check what the ONNX text promises; the rest of what a file can hold
    (text where a number belongs, say) surfaces as one of these."""
    try:
        yield
    except UnknownRankError as error:
        raise UnsupportedError(str(error), where=where) from error
    except LatheError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MemoryError, RecursionError) as error:
        raise ModelError(f"is malformed: {type(error).__name__}: {error}", where=where) from error


@dataclass(frozen=True)
class Call:
    """A function being unfolded."""

    label: str  # of the node that calls it
    attributes: Mapping[str, Attr]
    results: Mapping[str, str]  # names of its results -> those of the values they become
    depth: int


@dataclass(frozen=True)
class Frame:
    """Where the nodes being imported belong."""

    emitter: Emitter
    scope: Scope
    opsets: Mapping[str, int]
    call: Call | None = None
    declared: Mapping[str, onnx.TypeProto] = field(default_factory=dict)  # what the file says about inner values

    def label(self, name: str) -> str:
        """How a node of the file is called in the graph."""
        return f"{self.call.label}/{name}" if self.call else name

    def value_name(self, name: str) -> str:
        """How a value of the file is called in the graph, where every name is used once."""
        session = self.emitter.session
        if not name:
            return session.fresh(f"{self.emitter.label}.unused")
        if self.call is None:
            shadows = self.scope.outer is not None and self.scope.outer.sees(name)
            return session.fresh(name) if shadows else name
        return self.call.results.get(name) or session.fresh(self.label(name))
