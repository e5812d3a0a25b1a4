"""Windows: values that are strided views into other tensors, so that Slice, Split, Gather and Concat copy nothing.

A window has the strides of its parent tensor. Its producer writes it into the parent, and readers read it there. All
kernels that write or read it must support strides (`KernelCall.strided`); otherwise the value has memory of its own and
is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lathe.core.ir.graph import Graph, Node, Value, node_reads
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, Out, Request, recalled_call
from lathe.core.kernels.choose import candidates, select
from lathe.core.kernels.copy.spec import slice_strides
from lathe.core.kernels.shared.attributes import attribute, axis_of
from lathe.core.kernels.shared.nest import row_major
from lathe.core.plan.liveness import Affine

Strides = Mapping[Value, tuple[Dim, ...]]


@dataclass(frozen=True, slots=True)
class Window:
    """The location of a value inside `parent`: the offset of the first element, and the strides, in elements."""

    parent: Value
    offset: Dim
    strides: tuple[Dim, ...]

    def is_fixed(self, alignment: int) -> bool:
        """Whether the window begins at the same offset for all batch sizes, at a multiple of `alignment` bytes.

        An empty batch uses the addresses of n = 1. So a window whose offset depends on n would be at a wrong address
        there.
        """
        return isinstance(self.offset, int) and self.offset * self.parent.dtype.itemsize % alignment == 0

    @property
    def start(self) -> Affine:
        """The offset in bytes; 0 if it depends on the batch size or on sizes, which `is_fixed` excludes."""
        return Affine(b=self.offset * self.parent.dtype.itemsize) if isinstance(self.offset, int) else Affine()


class Windows:
    """Finds the windows of a graph.

    `calls` has the kernels of nodes for dense operands, `request` makes the request of a node to the catalog, and
    `view` says whether a node is a view. After `find`, `windows` has the windows by value, and nodes in `gone` have no
    work left. Every window begins at a multiple of `alignment` bytes, as kernels of the target assume.
    """

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
        """Find all windows: outputs of Slice, Split and Gather in order, then inputs of Concat in reverse order.

        In reverse order, the outermost of nested Concats comes first.
        """
        for node in nodes:
            if node in self.calls and self._make_output_windows(node):
                self.gone.add(node)
        for node in reversed(nodes):
            if node.op == "Concat" and node in self.calls:
                self._make_input_windows(node)

    def kernels(self) -> dict[Node, KernelCall]:
        """New kernel calls, with strides, for the nodes that read or write windows, except those in `gone`."""
        strides = self._strides(self.windows)
        return {node: self._same_kernel(node, strides) for node in self._touched if node not in self.gone}

    # -- Slice, Split, Gather ---------------------------------------------------------------------------------------

    def _make_output_windows(self, node: Node) -> bool:
        """Make all outputs of a Slice, Split or Gather windows of its first input; return whether that was possible."""
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
            with_views = self._with_views(value, window)
            if with_views is None or not window.is_fixed(self.alignment):
                return False
            found |= with_views
        return self._accept(found, ())

    # -- Concat -----------------------------------------------------------------------------------------------------

    def _make_input_windows(self, node: Node) -> None:
        """Make as many inputs of a Concat as possible windows of its output."""
        output = node.output
        if self._root(output) in self.updates:
            return
        self._reuse_parent(node)
        given, strides = self.window_of(output), self.strides_of(output)
        axis = axis_of(attribute(node, "axis"), len(output.shape))
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

    def _reuse_parent(self, node: Node) -> None:
        """Make the output of a Concat a window if all inputs already are consecutive windows of one other tensor."""
        first = node.inputs[0]
        if first is None or first not in self.windows or node.output in self.windows or node.output in self.fixed:
            return
        if self._is_parent(node.output):
            return
        window = self.windows[first]
        axis = axis_of(attribute(node, "axis"), len(node.output.shape))
        if window.strides[axis] == 0:
            return  # the first input has extent 1 along the axis, so its stride says nothing
        offset = window.offset
        for value in node.inputs:
            if value is None or not self._is_there(value, Window(window.parent, offset, window.strides)):
                return
            offset = offset + value.shape[axis] * window.strides[axis]
        with_views = self._with_views(node.output, window)
        if with_views is not None:
            self._accept(with_views, ())

    def _is_there(self, value: Value, window: Window) -> bool:
        found = self.windows.get(value)
        return found is not None and _same(found, window, value.shape)

    def _place(self, node: Node, value: Value, window: Window) -> bool:
        """Let the producer of a Concat's input write it directly into the output; return whether that is possible."""
        root = self._root(value)
        producer = root.producer
        if producer not in self.calls or producer is None or producer in self.gone or root in self.windows:
            return False
        if root in self.fixed or self._is_parent(root) or not window.is_fixed(self.alignment):
            return False
        if sum(self._root(other) is root for other in node.inputs if other is not None) != 1:
            return False
        strides = view_strides(value.shape, window.strides, root.shape)
        with_views = self._with_views(root, replace(window, strides=strides)) if strides is not None else None
        return with_views is not None and self._accept(with_views, (producer,))

    def _is_parent(self, value: Value) -> bool:
        return any(window.parent is value for window in self.windows.values())

    # -- support for strides by kernels -------------------------------------------------------------------------------

    def _with_views(self, value: Value, window: Window) -> dict[Value, Window] | None:
        """The windows of a value, given its `window`, and of all views of it.

        None if one of them is an output or the update of a state, or the strides of a view cannot be expressed.
        """
        found = {value: window}
        pending = [value]
        while pending:
            current = pending.pop()
            if current in self.graph.live_outs():
                return None
            for reader in self.readers.get(current, ()):
                if self.is_view(reader):
                    strides = view_strides(current.shape, found[current].strides, reader.output.shape)
                    if strides is None:
                        return None
                    found[reader.output] = replace(window, strides=strides)
                    pending.append(reader.output)
        return found

    def _accept(self, found: Mapping[Value, Window], producers: Sequence[Node]) -> bool:
        """Add the windows `found` if all kernels that read them, and the kernels of `producers`, support their strides.

        Returns whether they were added.
        """
        strides = self._strides({**self.windows, **found})
        readers = (reader for value in found for reader in self.readers.get(value, ()) if not self.is_view(reader))
        touched = dict.fromkeys([*producers, *readers])
        if not all(self._supports(node, strides) for node in touched):
            return False
        self.windows |= found
        self._touched |= touched
        return True

    def _supports(self, node: Node, strides: Strides) -> bool:
        """Whether the catalog's first kernel for the node and `strides` supports these for all operands that are keys.

        Always true for a Concat with a kernel, which is a copy. Never true if the node has no kernel, or a body of the
        node captures such a value.
        """
        if node not in self.calls or any(value in strides for value in set(node_reads(node)) - set(node.inputs)):
            return False
        if node.op == "Concat":
            return True  # a copy: always possible, and asking the catalog for many inputs is slow
        call = select(replace(self.request(node), strides=strides))
        return call is not None and _supports_strides(node, call, strides)

    def _same_kernel(self, node: Node, strides: Strides) -> KernelCall:
        """The call, for operands with these strides, of the kernel that was chosen for the node.

        If the catalog no longer offers that kernel, its first kernel. ValueError if this does not support the strides.
        """
        dense, chosen = self.request(node), self.calls[node]
        inside = replace(dense, strides=strides, inputs_in_place=self._placed.get(node, frozenset()))
        before, same = select(dense), select(inside)
        if before is None or before.key != chosen.key:  # the tuner chose another one
            old, new = ([each for call in candidates(r) for _, each in call.kernels] for r in (dense, inside))
            places = {one.spec.symbol: other for one, other in zip(old, new, strict=False)}
            same = recalled_call(chosen.finding, places) or same
        if same is None or not _supports_strides(node, same, strides):
            raise ValueError(f"the kernel of {node.op} '{node.name}' does not support the strides of its operands")
        return same

    # -- lookups ----------------------------------------------------------------------------------------------------

    def window_of(self, value: Value) -> Window:
        """The window of a value; for a value that is no window, one over all of the value that owns its memory."""
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
    """Yield outputs of a Slice, Split or Gather that are strided parts of the first input, with (offset, strides).

    Both are in elements; `strides` are those of the first input.
    """
    source = node.inputs[0]
    if source is None:
        return
    if node.op == "Slice":
        part = slice_strides(node, strides)
        if part is not None:
            yield node.output, part
    elif node.op == "Split" and len(node.inputs) == 1:
        axis = axis_of(attribute(node, "axis"), len(source.shape))
        offset: Dim = 0
        for value in node.outputs:
            yield value, (offset, strides)
            offset = offset + value.shape[axis] * strides[axis]
    elif node.op == "Gather":
        yield from _gather(node, strides, graph)


def _gather(node: Node, strides: tuple[Dim, ...], graph: Graph) -> Iterator[tuple[Value, tuple[Dim, tuple[Dim, ...]]]]:
    """Yield the output of a Gather, with its offset and strides, if the index is a constant scalar within range.

    Nothing is yielded for any other Gather, or if the extent of the axis is not a number.
    """
    source, index = node.inputs[0], graph.constant_of(node.inputs[1])
    if source is None or index is None or np.ndim(index) != 0:
        return
    axis = axis_of(attribute(node, "axis"), len(source.shape))
    place, extent = int(index), source.shape[axis]
    if not isinstance(extent, int) or not -extent <= place < extent:
        return
    yield node.output, (place % extent * strides[axis], (*strides[:axis], *strides[axis + 1 :]))


def view_strides(shape: Sequence[Dim], strides: Sequence[Dim], target: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The strides of a view with shape `target` of a tensor with `shape` and `strides`.

    None if the shapes differ by more than axes of extent 1; these get stride 0.
    """
    nontrivial = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    if [extent for extent, _ in nontrivial] != [extent for extent in target if extent != 1]:
        return None
    remaining = iter(nontrivial)
    return tuple(0 if extent == 1 else next(remaining)[1] for extent in target)


def _same(a: Window, b: Window, shape: Sequence[Dim]) -> bool:
    """Whether two windows have the same elements. Strides along axes of extent 1 do not matter."""
    alike = all(s == t for s, t, n in zip(a.strides, b.strides, shape, strict=True) if n != 1)
    return a.parent is b.parent and a.offset == b.offset and alike


def _supports_strides(node: Node, call: KernelCall, strides: Strides) -> bool:
    """Whether the kernel supports strides for all operands that are in `strides`."""
    inside = [In(i) for i, value in enumerate(node.inputs) if value is not None and value in strides]
    written = [Out(i) for i, value in enumerate(node.outputs) if value in strides]
    return all(operand in call.strided for operand in (*inside, *written) if operand in call.operands)
