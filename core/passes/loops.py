"""This pass sets the trip count of a Loop whose condition counts, and moves values that no iteration changes out of it.

TensorFlow writes a layer over time as a while loop: a counter grows by one, and the loop goes on while it is less than
the number of steps. Only a run would show how many results such a loop stacks, and all that reads them would have no
kernel, as long as the condition decides. Its weights are carried from iteration to iteration, which hides that they are
constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import DType
from core.ops.inference import infer_graph
from core.passes.base import PassResult
from core.passes.edit import Editor

_EXACT = 1 << 24  # whole numbers up to there are floats, too
_WIDE = (DType.INT32, DType.INT64, DType.FLOAT32, DType.FLOAT64)  # types that hold them all


@dataclass(frozen=True)
class SimplifyLoops:
    name: str = "loops"

    def run(self, graph: Graph) -> PassResult:
        """One after the other: what a loop stacks may tell how often the next one runs."""
        changed = _keep_outside(graph)
        while any(node.op == "Loop" for node in graph.nodes):
            known, editor = infer_graph(graph), Editor(graph)
            for node in editor.nodes():
                if node.op == "Loop" and (trips := _trips(node, known)) is not None:
                    _tell(editor, node, trips)
            changed += (found := editor.finish().changed)
            if not found:
                break
        return PassResult(changed)


def _keep_outside(graph: Graph) -> int:
    """Take what no iteration changes out of the carried values; returns how many."""
    editor = Editor(graph)
    for node in editor.nodes():
        body = node.attrs["body"] if node.op == "Loop" else None
        if isinstance(body, Graph):
            for place in reversed(range(2, len(node.inputs))):
                _keep_one_outside(editor, node, body, place)
    return editor.finish().changed


def _keep_one_outside(editor: Editor, node: Node, body: Graph, place: int) -> None:
    outer, inner, result = node.inputs[place], body.inputs[place], body.outputs[place - 1]
    while result.producer is not None and result.producer.op == "Identity" and result.producer.inputs[0] is not None:
        result = result.producer.inputs[0]
    has_others = 1 < len(node.outputs) > place - 2
    if outer is None or result is not inner or outer.type != inner.type or not has_others:
        return
    editor.replace(node.outputs[place - 2], outer)
    del node.outputs[place - 2], body.inputs[place], body.outputs[place - 1]
    body.replace_uses({inner: outer})
    editor.set_inputs(node, [*node.inputs[:place], *node.inputs[place + 1 :]])


def _tell(editor: Editor, node: Node, trips: int) -> None:
    body = node.attrs["body"]
    assert isinstance(body, Graph)
    body.outputs[0] = body.inputs[1]
    body.remove_dead()
    editor.set_inputs(node, [editor.constant(np.array(trips), "trips"), None, *node.inputs[2:]])


def _trips(node: Node, known: Mapping[Value, Array]) -> int | None:
    """How often the body runs, where its condition counts and nothing else ends the loop before."""
    limit, first, body = node.input(0), node.input(1), node.attrs["body"]
    assert isinstance(body, Graph)
    most = known.get(limit) if limit is not None else np.array(_EXACT)
    holds = first is None or _number(first, known)
    less = _origin(body.outputs[0]).producer
    if most is None or most.size != 1 or most.dtype.kind != "i" or not holds or less is None or less.op != "Less":
        return None
    counter, bound = (_origin(value) for value in less.inputs if value is not None)
    stop, steps = _constant(node, body, bound, known), _steps(node, body, counter, known)
    if stop is None or steps is None:
        return None
    start, step = steps
    return min(max(-(-(stop - start) // step), 1), max(int(most.reshape(-1)[0]), 0))


def _steps(node: Node, body: Graph, counter: Value, known: Mapping[Value, Array]) -> tuple[int, int] | None:
    """Where a carried value starts and by how much it grows, if `counter` is what it is in the next iteration."""
    add = counter.producer
    if add is None or add.op != "Add" or counter.dtype not in _WIDE:
        return None
    for before, step in (add.inputs, add.inputs[::-1]):
        if before is None or step is None or (before := _origin(before)) not in body.inputs[2:]:
            continue
        place = body.inputs.index(before)
        start, by = _number(node.inputs[place], known), _number(step, {**known, **body.constants})
        if _origin(body.outputs[place - 1]) is counter and start is not None and by is not None and by > 0:
            return start, by
    return None


def _constant(node: Node, body: Graph, value: Value, known: Mapping[Value, Array]) -> int | None:
    """A number that no iteration changes."""
    if value in body.inputs[2:]:
        place = body.inputs.index(value)
        kept = _origin(body.outputs[place - 1]) is value
        return _number(node.inputs[place], known) if kept else None
    return _number(value, {**known, **body.constants})


def _origin(value: Value) -> Value:
    """Where a value comes from that is the same whole number in another type."""
    while (node := value.producer) is not None and node.inputs and node.inputs[0] is not None:
        if node.op != "Identity" and (node.op != "Cast" or value.dtype not in _WIDE):
            break
        value = node.inputs[0]
    return value


def _number(value: Value | None, known: Mapping[Value, Array]) -> int | None:
    """A whole number that a float holds exactly, too; None for any other."""
    array = known.get(value) if value is not None else None
    if array is None or array.size != 1 or array.dtype.kind not in "biuf":
        return None
    number = array.reshape(-1)[0]
    return int(number) if np.isfinite(number) and number == int(number) and abs(int(number)) < _EXACT else None
