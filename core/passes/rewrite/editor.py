"""`Editor`: edits a graph while a pass walks over it, and tracks the readers, names and liveness of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lathe.core.errors import VerifyError
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value, node_reads
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.passes.rewrite.base import PassResult, reshape_attrs, shape_of

_UNTYPED = TensorType(DType.FLOAT32, None)


class Editor:
    """Edits one graph in place during one pass.

    A node that loses its last reader is dead: `nodes` and `readers` skip it at once, and `finish` removes it. `changed`
    counts the calls of `replace` and `set_inputs`; `notes` become those of the pass result. The editor does not see
    edits of the graph that bypass its methods.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.changed = 0
        self.notes: list[str] = []
        self._readers = graph.uses()
        self._known = dict(graph.constants)
        self._names = {value.name for value in graph.values()}
        self._dead: set[Node] = set()

    def finish(self) -> PassResult:
        """Removes dead nodes and unread constants, and returns the result of the pass."""
        self.graph.remove_dead()
        return PassResult(self.changed, tuple(self.notes))

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes of the graph at the time of this call, except those that have died when it is their turn."""
        return (node for node in list(self.graph.nodes) if node not in self._dead)

    def array(self, value: Value | None) -> Array | None:
        """The elements of a constant; None for any other value."""
        return self.graph.constant_of(value)

    def readers(self, value: Value) -> list[Node]:
        """The nodes that read a value, each once, in the order in which their reads were recorded."""
        return list(dict.fromkeys(self._readers.get(value, ())))

    def is_output(self, value: Value) -> bool:
        """Whether a value is live at the end of the graph: an output, or the update of a state."""
        return value in self.graph.live_outs()

    def only_reader(self, value: Value) -> Node | None:
        """The single node that reads `value`; None if there are no or several readers, or `is_output(value)`."""
        readers = self.readers(value)
        return readers[0] if len(readers) == 1 and not self.is_output(value) else None

    def constant(self, array: Array, name: str = "c") -> Value:
        """A new constant of the graph: a read-only view of `array`, no copy; `name` gets a suffix if it is taken."""
        array = array.view()
        array.setflags(write=False)
        value = Value(self._fresh(name), TensorType(DType.from_numpy(array.dtype), array.shape))
        self.graph.constants[value] = self._known[value] = array
        return value

    def emit(
        self, anchor: Node, op: str, *inputs: Value | None, attrs: Mapping[str, Attr] | None = None, name: str = ""
    ) -> Value:
        """Inserts a node with one output before `anchor`, and infers its type; returns the output.

        The node is named like `anchor` unless `name` is given.
        """
        return self.emit_many(anchor, op, inputs, 1, attrs or {}, name)[0]

    def emit_many(
        self,
        anchor: Node,
        op: str,
        inputs: Sequence[Value | None],
        outputs: int,
        attrs: Mapping[str, Attr],
        name: str = "",
    ) -> list[Value]:
        """Inserts a node with `outputs` outputs before `anchor`, and infers their types; returns the outputs."""
        node = Node(op, without_trailing_absent(inputs), [], dict(attrs), name or anchor.name)
        base = anchor.outputs[0].name
        node.outputs = [Value(self._fresh(base), _UNTYPED, node) for _ in range(outputs)]
        infer_node(node, self._known)
        self.graph.insert_before(anchor, node)
        for value in node_reads(node):
            self._readers.setdefault(value, []).append(node)
        return node.outputs

    def splice(self, anchor: Node, body: Graph) -> list[Value]:
        """Copies nodes and constants of `body`, a graph without inputs, before `anchor`; returns the copied outputs.

        Values that `body` captures are read from the graph. The copies get names that are free in the graph.
        """
        body = body.clone()
        for value in body.values():
            value.name = self._fresh(value.name)
        self.graph.constants.update(body.constants)
        self._known.update(body.constants)
        for node in body.nodes:
            self.graph.insert_before(anchor, node)
            for value in node_reads(node):
                self._readers.setdefault(value, []).append(node)
        return body.outputs

    def replace(self, old: Value, new: Value) -> None:
        """Makes every reader of `old` read `new` instead, updates of states and outputs included.

        Nodes that only `old` needed die. An output of the graph keeps its name: `new` takes it, or an Identity of `new`
        where `renamable(new)` is false. VerifyError if the two have different ranks or different known extents.
        """
        self.changed += 1
        _check_shapes(old, new)
        _keep_shape(old, new)
        for reader in self._readers.pop(old, []):
            _substitute(reader, old, new)
            self._readers.setdefault(new, []).append(reader)
        for state in self.graph.states:
            state.update = new if state.update is old else state.update
        if old in self.graph.outputs:
            self._replace_output(old, new)
        elif new.producer is not None and new.name.startswith(f"{old.name}_"):
            old.name, new.name = new.name, old.name  # `emit` named `new` after `old`: give it the name without a suffix
        self._release(old.producer)

    def renamable(self, value: Value) -> bool:
        """Whether `value` can take over the name of an output: it is computed or constant, and no output itself."""
        computed = value.producer is not None or value in self.graph.constants
        return computed and value not in self.graph.outputs

    def reshaped(self, anchor: Node, value: Value, shape: tuple[Dim, ...]) -> Value:
        """`value` reshaped to `shape` by a new node before `anchor`; `value` itself if it already has that shape."""
        return value if shape_of(value) == shape else self.emit(anchor, "Reshape", value, attrs=reshape_attrs(shape))

    def set_inputs(self, node: Node, inputs: Sequence[Value | None]) -> None:
        """Gives a node new inputs. Nodes that only the old inputs needed die."""
        self.changed += 1
        before = node_reads(node)
        self._forget_reads(node)
        node.inputs = without_trailing_absent(inputs)
        for value in node_reads(node):
            self._readers.setdefault(value, []).append(node)
        for value in before:
            self._release(value.producer)

    def _replace_output(self, old: Value, new: Value) -> None:
        if not self.renamable(new):
            new = self.emit(self.graph.nodes[-1], "Identity", new)
            self.graph.nodes.append(self.graph.nodes.pop(-2))
        old.name, new.name = new.name, old.name
        self.graph.outputs = [new if value is old else value for value in self.graph.outputs]

    def _release(self, node: Node | None) -> None:
        """Marks a node as dead if its outputs have no readers and are not live at the graph's end.

        The producers of its inputs are then marked by the same rule.
        """
        pending = [node]
        while pending:
            node = pending.pop()
            if node is None or node in self._dead or self._is_needed(node):
                continue
            self._dead.add(node)
            self._forget_reads(node)
            pending += [value.producer for value in node_reads(node)]

    def _is_needed(self, node: Node) -> bool:
        return any(self._readers.get(value) or self.is_output(value) for value in node.outputs)

    def _forget_reads(self, node: Node) -> None:
        for value in node_reads(node):
            self._readers[value] = [reader for reader in self._readers.get(value, ()) if reader is not node]

    def _fresh(self, base: str) -> str:
        name, index = base, 1
        while name in self._names:
            index += 1
            name = f"{base}_{index}"
        self._names.add(name)
        return name


def without_trailing_absent(inputs: Sequence[Value | None]) -> list[Value | None]:
    """A list of the inputs without absent inputs (None) at its end."""
    result = list(inputs)
    while result and result[-1] is None:
        result.pop()
    return result


def _check_shapes(old: Value, new: Value) -> None:
    """VerifyError if the two values have different ranks, or different numbers as the extents of an axis."""
    before, after = shape_of(old), shape_of(new)
    if before is None or after is None:
        return
    pairs = zip(before, after, strict=False)
    differ = any(a != b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
    if len(before) != len(after) or differ:
        raise VerifyError(f"%{new.name} : {new.type} cannot replace %{old.name} : {old.type}: the shapes differ")


def _keep_shape(old: Value, new: Value) -> None:
    """Copies the shape of `old` to `new` where inference finds none: the model declared it."""
    if shape_of(new) is None and shape_of(old) is not None and new.dtype is old.dtype:
        new.type = old.type


def _substitute(node: Node, old: Value, new: Value) -> None:
    node.inputs = [new if value is old else value for value in node.inputs]
    for body in node.subgraphs:
        body.outputs = [new if value is old else value for value in body.outputs]
        for inner in body.nodes:
            _substitute(inner, old, new)
