"""Aliases: which values have the same elements, so that views, parts and concatenations need not be copied.

The checker derives aliases from the operators and the nodes that the plan runs, and for a Concat that is a step from
the addresses of its operands. A value that a step or a fallback computes owns its memory: it is a *home*. The output of
a view, Slice, Split, Gather or Concat without a step is part of the home of another value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lathe.core.check.boxes import Box, whole_box
from lathe.core.check.facts import Facts, Sizes, StepFacts
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Node, Value
from lathe.core.kernels.call import In, Out
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
PARTS = ("Slice", "Split", "Gather")


class Aliases:
    """For one batch size, the box of every value: the bytes that it occupies in the memory of its home."""

    def __init__(self, facts: Facts, sizes: Sizes) -> None:
        self._facts, self._sizes = facts, sizes
        self._boxes: dict[Value, Box] = {}
        self.inside: dict[Node, frozenset[Value]] = {}  # the inputs of each Concat that already are in its output
        self._find()

    def box(self, value: Value) -> Box | None:
        """The box of a value; None if the value has no planned memory."""
        return self._boxes.get(value)

    def _find(self) -> None:
        facts = self._facts
        steps = {each.node: each for each in facts.steps if each.node.op == "Concat"}
        for node in reversed(facts.graph.nodes):
            if node.op == "Concat":
                self._join(node, steps.get(node))
        for value in facts.graph.values():
            if value not in self._boxes:
                self._set_box(value)

    # -- Concat: its inputs may lie inside its output ------------------------------------------------------------------

    def _join(self, node: Node, step: StepFacts | None) -> None:
        """Set the boxes of the inputs of a Concat that lie inside its output, as parts of the output's memory.

        An input that is a view gets no box here; the source of the view does. `step` is the step that runs the Concat:
        only inputs that are in place by the addresses of its operands count. None if no step runs the Concat: then all
        inputs count. But nothing is done if a fallback computes it, or all its inputs are parts of other values
        (`_is_part`).
        """
        if step is None and (node in self._facts.runs or all(map(self._is_part, node.inputs))):
            return
        if node.output not in self._boxes and (own := self._whole(node.output)) is not None:
            self._boxes[node.output] = own
        joined = self._boxes.get(node.output)
        if joined is None:
            return
        found = set()
        for index, (value, part) in enumerate(self._joined_parts(node, joined)):
            if step is None or self._is_inside(step, index, joined, part):
                found.add(value)
                self._set_origin_box(value, part)
        self.inside[node] = frozenset(found)

    def _joined_parts(self, node: Node, joined: Box) -> Iterator[tuple[Value, Box]]:
        """Yield each input of a Concat with its part of `joined`, the box of the output; ends at an unknown shape."""
        axis, first = _attr(node, "axis") % len(joined.shape), 0
        for value in node.inputs:
            shape = self._sizes.shape(value) if value is not None else None
            if value is None or shape is None:
                return
            yield value, joined.cut(axis, first, 1, shape[axis])
            first += shape[axis]

    def _is_inside(self, step: StepFacts, index: int, joined: Box, part: Box) -> bool:
        """Whether input `index` of a Concat is at the address of `part` inside the output, so that no copy is needed.

        The addresses are those of the step's operands. `joined` is the box of the output.
        """
        operands = dict(zip(step.call.operands, step.step.operands, strict=True))
        source, target = operands.get(In(index)), operands.get(Out(0))
        if source is None or target is None or source.base != target.base:
            return False
        return self._sizes.at(source) - self._sizes.at(target) == part.start - joined.start

    def _set_origin_box(self, value: Value, box: Box) -> None:
        """Set the box of the origin of `value`: the value from which views alone compute it, or `value` itself.

        `box` is the box of `value`. A box that is set already stays. Nothing is set if no strides give the elements of
        `box` the shape of the origin.
        """
        chain = [value]
        while (producer := chain[-1].producer) is not None and self._is_view(producer):
            chain.append(producer.inputs[0])  # type: ignore[arg-type]
        shape = self._sizes.shape(chain[-1])
        origin = box.reshaped(shape) if shape is not None and len(chain) > 1 else box
        if origin is not None:
            self._boxes.setdefault(chain[-1], origin)

    def _is_part(self, value: Value | None) -> bool:
        """Whether a value, or the source of which it is a view, lies inside another value.

        The value is part of its producer's input if the producer is a Slice, Split or Gather that neither a step nor a
        fallback runs. It is part of the output of a later Concat if it has a box already.
        """
        while value is not None and value.producer is not None and self._is_view(value.producer):
            value = value.producer.inputs[0]
        producer = value.producer if value is not None else None
        return value in self._boxes or (
            producer is not None and producer.op in PARTS and producer not in self._facts.runs
        )

    def _is_view(self, node: Node) -> bool:
        return node.op in VIEWS and node not in self._facts.runs

    # -- all other values: homes, or parts of the input of their producer ----------------------------------------------

    def _set_box(self, value: Value) -> None:
        node = value.producer
        box = None
        if node is None or node in self._facts.runs:
            box = self._whole(value)
        elif node.op in (*VIEWS, *PARTS) and node.inputs[0] is not None:
            source, shape = self._boxes.get(node.inputs[0]), self._sizes.shape(value)
            if source is not None and shape is not None:
                box = self._part_of(node, value, source, shape)
                box = box if box is not None and box.shape == shape else None
        elif node.op == "Concat":
            box = self._union(node)
        if box is None:
            box = self._whole(value)
        if box is not None:
            self._boxes[value] = box

    def _part_of(self, node: Node, value: Value, source: Box, shape: tuple[int, ...]) -> Box | None:
        """The part of `source` that `value` is; None if that is unknown.

        `node` is a view, Slice, Split or Gather that no step runs, `source` the box of its first input, and `value` one
        of its outputs, with `shape`. A Gather counts only with a constant scalar index within range.
        """
        if node.op in VIEWS:
            return source.reshaped(shape)
        if node.op == "Slice":
            return slice_box(node, source, self._sizes)
        axis = _attr(node, "axis") % max(len(source.shape), 1)
        if node.op == "Split":
            before = node.outputs[: node.outputs.index(value)]
            shapes = [self._sizes.shape(each) for each in before]
            first = sum(each[axis] for each in shapes if each is not None)
            return source.cut(axis, first, 1, shape[axis])
        index = self._facts.graph.constant_of(node.inputs[1])
        if index is None or np.ndim(index) != 0 or not -source.shape[axis] <= int(index) < source.shape[axis]:
            return None
        return source.picked(axis, int(index) % source.shape[axis])

    def _union(self, node: Node) -> Box | None:
        """The box of the output of a Concat if its inputs are consecutive parts of one home; None otherwise."""
        parts = [self._boxes.get(value) for value in node.inputs if value is not None]
        shape = self._sizes.shape(node.output)
        if shape is None or not parts or parts[0] is None:
            return None
        first = parts[0]
        joined = Box(first.start, shape, first.strides, first.itemsize, first.home)
        for part, (_, expected) in zip(parts, self._joined_parts(node, joined), strict=False):
            if part is None or part.home is not expected.home or not part.is_same_as(expected):
                return None
        return joined

    def _whole(self, value: Value) -> Box | None:
        shape = self._sizes.shape(value)
        return whole_box(value, shape, value.dtype.itemsize) if shape is not None else None


def slice_box(node: Node, source: Box, sizes: Sizes) -> Box | None:
    """The part of `source` that a Slice returns, by ONNX's rules; None if its bounds are inputs, not attributes."""
    starts, ends = _numbers(node, "starts", sizes), _numbers(node, "ends", sizes)
    if starts is None or ends is None or len(node.inputs) != 1:
        return None
    axes = _numbers(node, "axes", sizes) or range(len(starts))
    steps = _numbers(node, "steps", sizes) or [1] * len(starts)
    box = source
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        places = range(*slice(start, end, step).indices(source.shape[axis]))
        box = box.cut(axis % len(source.shape), places.start, step, len(places))
    return box


def _numbers(node: Node, name: str, sizes: Sizes) -> list[int] | None:
    found: Any = _attr(node, name)
    if found is None:
        return None
    given: Sequence[Dim] = found.ravel().tolist() if isinstance(found, np.ndarray) else found
    return [sizes.dim(dim) for dim in given]


def _attr(node: Node, name: str) -> Any:
    """The value of an attribute, or the operator's default; None if the operator has no such attribute."""
    if name in node.attrs:
        return node.attrs[name]
    op = registry.get(node.op)
    return NodeView(op, node).attr(name) if name in op.attrs else None
