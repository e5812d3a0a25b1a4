"""Values that live inside others: what Slice, Split and Gather take of a tensor, and what Concat puts into one.

Such a value has the strides of the tensor it is part of, so nothing has to be copied: producers write it in its place,
readers find it there. It needs kernels on all sides that honour strides (`KernelCall.strided`); where one does not, the
value has memory of its own and is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.ir.graph import Graph, Node, Value, node_reads
from core.ir.types import Dim
from core.kernels.catalog import In, KernelCall, Out, Request, candidates, select
from core.kernels.catalog.attributes import attribute, axis_of
from core.kernels.catalog.copy import sliced
from core.kernels.catalog.nest import row_major
from core.plan.liveness import Affine

Strides = Mapping[Value, tuple[Dim, ...]]


@dataclass(frozen=True, slots=True)
class Window:
    """Where a value is: in `parent`, from `offset` on (in elements), with strides of its own."""

    parent: Value
    offset: Dim
    strides: tuple[Dim, ...]

    def is_fixed(self, alignment: int) -> bool:
        """Whether it begins at one place for all batch sizes, a multiple of so many bytes. Addresses are those of a
        batch of one for an empty one, so what begins after the rows of a batch cannot be found by its address."""
        return isinstance(self.offset, int) and self.offset * self.parent.dtype.itemsize % alignment == 0

    @property
    def start(self) -> Affine:
        """In bytes."""
        return Affine(b=self.offset * self.parent.dtype.itemsize) if isinstance(self.offset, int) else Affine()


class Windows:
    """All windows of a graph. `calls` holds the kernels that nodes have for dense operands, and `request` what is asked
    of the catalog for one; nodes in `gone` have nothing left to do. Every window begins at a multiple of `alignment`
    bytes, which is what kernels of the target count on."""

    def __init__(
        self,
        graph: Graph,
        calls: Mapping[Node, KernelCall],
        request: Callable[[Node], Request],
        view: Callable[[Node], bool],
        alignment: int = 1,
    ) -> None:
        self.alignment = alignment
        self.graph, self.calls, self.request, self.is_view = graph, calls, request, view
        self.readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(node_reads(node)):
                self.readers.setdefault(value, []).append(node)
        self.fixed = set(map(self._root, graph.live_outs()))
        self.updates = {self._root(state.update) for state in graph.states}
        self.windows: dict[Value, Window] = {}
        self.gone: set[Node] = set()
        self._touched: dict[Node, None] = {}
        self._placed: dict[Node, frozenset[Value]] = {}

    def find(self, nodes: Sequence[Node]) -> None:
        """Parts of tensors first, in order; then joined tensors, the outermost (which come last) first."""
        for node in nodes:
            if node in self.calls and self._take_apart(node):
                self.gone.add(node)
        for node in reversed(nodes):
            if node.op == "Concat" and node in self.calls:
                self._join(node)

    def kernels(self) -> dict[Node, KernelCall]:
        """The kernels of all nodes that read or write windows."""
        strides = self._strides(self.windows)
        return {node: self._same_kernel(node, strides) for node in self._touched if node not in self.gone}

    # -- parts ------------------------------------------------------------------------------------------------------

    def _take_apart(self, node: Node) -> bool:
        """Whether all outputs of the node are windows now."""
        source = node.input(0)
        if source is None or source in self.graph.constants:
            return False
        parts = dict(_parts(node, self.strides_of(source), self.graph))
        if len(parts) < len(node.outputs):
            return False
        given = self.window_of(source)
        found: dict[Value, Window] = {}
        for value, (offset, strides) in parts.items():
            window = Window(given.parent, given.offset + offset, strides)
            seen = self._seen(value, window)
            if seen is None or not window.is_fixed(self.alignment):
                return False
            found |= seen
        return self._accept(found, ())

    # -- wholes -----------------------------------------------------------------------------------------------------

    def _join(self, node: Node) -> None:
        """Place as many inputs of a Concat inside its output as can be."""
        whole = node.output
        if self._root(whole) in self.updates:
            return
        self._nested(node)
        given, strides = self.window_of(whole), self.strides_of(whole)
        axis = axis_of(attribute(node, "axis"), len(whole.shape))
        offset, placed = given.offset, set()
        for value in node.inputs:
            if value is None:
                return
            window = Window(given.parent, offset, strides)
            if self._is_there(value, window) or self._place(node, value, window):
                placed.add(value)
            offset = offset + value.shape[axis] * strides[axis]
        self._touched[node] = None
        self._placed[node] = frozenset(placed)
        if placed == set(node.inputs):
            self.gone.add(node)

    def _nested(self, node: Node) -> None:
        """Where all inputs lie one after the other in another tensor already, so does the output."""
        first = node.inputs[0]
        if first is None or first not in self.windows or node.output in self.windows or node.output in self.fixed:
            return
        if self._is_parent(node.output):
            return
        window = self.windows[first]
        axis = axis_of(attribute(node, "axis"), len(node.output.shape))
        if window.strides[axis] == 0:
            return  # it says nothing: the first input has extent 1 there
        offset = window.offset
        for value in node.inputs:
            if value is None or not self._is_there(value, Window(window.parent, offset, window.strides)):
                return
            offset = offset + value.shape[axis] * window.strides[axis]
        seen = self._seen(node.output, window)
        if seen is not None:
            self._accept(seen, ())

    def _is_there(self, value: Value, window: Window) -> bool:
        found = self.windows.get(value)
        return found is not None and _same(found, window, value.shape)

    def _place(self, node: Node, value: Value, window: Window) -> bool:
        """Have the producer of a Concat's input write it into the output."""
        root = self._root(value)
        producer = root.producer
        if producer not in self.calls or producer is None or producer in self.gone or root in self.windows:
            return False
        if root in self.fixed or self._is_parent(root) or not window.is_fixed(self.alignment):
            return False
        if sum(self._root(other) is root for other in node.inputs if other is not None) != 1:
            return False
        strides = restrided(value.shape, window.strides, root.shape)
        seen = self._seen(root, replace(window, strides=strides)) if strides is not None else None
        return seen is not None and self._accept(seen, (producer,))

    def _is_parent(self, value: Value) -> bool:
        return any(window.parent is value for window in self.windows.values())

    # -- what all sides have to honour --------------------------------------------------------------------------------

    def _seen(self, value: Value, window: Window) -> dict[Value, Window] | None:
        """The windows of a value and of all views of it; None where one cannot look at it."""
        found = {value: window}
        pending = [value]
        while pending:
            current = pending.pop()
            if current in self.graph.live_outs():
                return None
            for reader in self.readers.get(current, ()):
                if self.is_view(reader):
                    strides = restrided(current.shape, found[current].strides, reader.output.shape)
                    if strides is None:
                        return None
                    found[reader.output] = replace(window, strides=strides)
                    pending.append(reader.output)
        return found

    def _accept(self, found: Mapping[Value, Window], producers: Sequence[Node]) -> bool:
        """Add windows when every kernel that touches them honours strides."""
        strides = self._strides({**self.windows, **found})
        readers = (reader for value in found for reader in self.readers.get(value, ()) if not self.is_view(reader))
        touched = dict.fromkeys([*producers, *readers])
        if not all(self._can_follow(node, strides) for node in touched):
            return False
        self.windows |= found
        self._touched |= touched
        return True

    def _can_follow(self, node: Node, strides: Strides) -> bool:
        """Whether the node's kernel honours the strides of all its operands."""
        if node not in self.calls or any(value in strides for value in set(node_reads(node)) - set(node.inputs)):
            return False
        if node.op == "Concat":
            return True  # a copy, and a large one would be asked often
        call = select(replace(self.request(node), strides=strides))
        return call is not None and _honours(node, call, strides)

    def _same_kernel(self, node: Node, strides: Strides) -> KernelCall:
        """The kernel that the node has, for operands that lie elsewhere."""
        dense = self.request(node)
        inside = replace(dense, strides=strides, placed=self._placed.get(node, frozenset()))
        chosen = self.calls[node].spec.key
        before, after = [select(dense)], [select(inside)]
        if before[0] is None or before[0].spec.key != chosen:  # the tuner took another one
            before, after = list(candidates(dense)), list(candidates(inside))
        pairs = zip(before, after, strict=False)
        same = next((new for old, new in pairs if old is not None and old.spec.key == chosen), after[0])
        if same is None or not _honours(node, same, strides):
            raise ValueError(f"the kernel of {node.op} '{node.name}' does not honour the strides it was asked for")
        return same

    # -- lookups ----------------------------------------------------------------------------------------------------

    def window_of(self, value: Value) -> Window:
        """A value that is no window is one of all of itself."""
        if value in self.windows:
            return self.windows[value]
        return Window(self._root(value), 0, row_major(value.shape))

    def strides_of(self, value: Value) -> tuple[Dim, ...]:
        return self.window_of(value).strides

    def _strides(self, windows: Mapping[Value, Window]) -> Strides:
        return {value: window.strides for value, window in windows.items()}

    def _root(self, value: Value) -> Value:
        while value.producer is not None and self.is_view(value.producer):
            value = value.producer.inputs[0]  # type: ignore[assignment]
        return value


def _parts(node: Node, strides: tuple[Dim, ...], graph: Graph) -> Iterator[tuple[Value, tuple[Dim, tuple[Dim, ...]]]]:
    """The outputs that are regular parts of the first input, with their offsets and strides."""
    source = node.inputs[0]
    if source is None:
        return
    if node.op == "Slice":
        part = sliced(node, strides)
        if part is not None:
            yield node.output, part
    elif node.op == "Split" and len(node.inputs) == 1:
        axis = axis_of(attribute(node, "axis"), len(source.shape))
        offset: Dim = 0
        for value in node.outputs:
            yield value, (offset, strides)
            offset = offset + value.shape[axis] * strides[axis]
    elif node.op == "Gather":
        yield from _picked(node, strides, graph)


def _picked(node: Node, strides: tuple[Dim, ...], graph: Graph) -> Iterator[tuple[Value, tuple[Dim, tuple[Dim, ...]]]]:
    """A Gather of one place along an axis: a slice without that axis."""
    source, index = node.inputs[0], graph.constant_of(node.inputs[1])
    if source is None or index is None or np.ndim(index) != 0:
        return
    axis = axis_of(attribute(node, "axis"), len(source.shape))
    place, extent = int(index), source.shape[axis]
    if not isinstance(extent, int) or not -extent <= place < extent:
        return
    yield node.output, (place % extent * strides[axis], (*strides[:axis], *strides[axis + 1 :]))


def restrided(shape: Sequence[Dim], strides: Sequence[Dim], target: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The strides with which elements of `shape` are seen in the shape `target`; None where no strides do that. Axes of
    extent 1 come and go; others stay."""
    kept = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    if [extent for extent, _ in kept] != [extent for extent in target if extent != 1]:
        return None
    remaining = iter(kept)
    return tuple(0 if extent == 1 else next(remaining)[1] for extent in target)


def _same(a: Window, b: Window, shape: Sequence[Dim]) -> bool:
    """Whether two windows show the same elements; strides along axes of extent 1 say nothing."""
    alike = all(s == t for s, t, n in zip(a.strides, b.strides, shape, strict=True) if n != 1)
    return a.parent is b.parent and a.offset == b.offset and alike


def _honours(node: Node, call: KernelCall, strides: Strides) -> bool:
    inside = [In(i) for i, value in enumerate(node.inputs) if value is not None and value in strides]
    written = [Out(i) for i, value in enumerate(node.outputs) if value in strides]
    return all(operand in call.strided for operand in (*inside, *written) if operand in call.operands)
